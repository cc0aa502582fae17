"""chunked_loss against the same loss on logp and entropy from a full softmax."""

import pytest
import torch

from spmdrl_kernels import chunked_loss, linear_logprob
from tests.unit.test_kernel_reference import make, plain


def ppo(logp, entropy, x):
    ratio = (logp - x["old_logp"]).exp()
    surrogate = torch.maximum(-x["advantage"] * ratio, -x["advantage"] * ratio.clamp(0.8, 1.2))
    loss = (surrogate.double() - 0.01 * entropy) * x["weight"]
    return loss, {"ratio": ratio, "kl": x["old_logp"] - logp}


def case(T=41, D=7, V=150, dtype=torch.float64):
    hidden, weight, targets, (a, b) = make(T, D, V, dtype=dtype)
    old = plain(hidden, weight, targets)[0].detach() + 0.3 * b
    inputs = {"advantage": a, "old_logp": old, "weight": torch.full((T,), 1 / max(1, T), dtype=torch.float64)}
    return hidden, weight, targets, inputs


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "softcap": 2.0}])
@pytest.mark.parametrize("rows", [None, 1, 16, 41])
def test_kernel_loss_in_chunks(options, rows):
    hidden, weight, targets, inputs = case()
    logp, entropy = plain(hidden, weight, targets, **options)
    loss, extra = ppo(logp, entropy, inputs)
    want = torch.autograd.grad(3 * loss.sum(), (hidden, weight))
    total, told = chunked_loss(hidden, weight, targets, ppo, inputs, chunk_tokens=rows, **options)
    got = torch.autograd.grad(3 * total, (hidden, weight))
    torch.testing.assert_close((total, *got), (loss.sum(), *want), rtol=1e-10, atol=1e-10)
    assert sorted(told) == ["entropy", "kl", "logp", "loss", "ratio"] and not any(
        x.requires_grad for x in told.values()
    )
    for name, value in {"logp": logp, "entropy": entropy, "loss": loss, **extra}.items():
        torch.testing.assert_close(told[name], value.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_kernel_loss_in_chunks_of_other_dtypes(dtype, limit):
    hidden, weight, targets, inputs = case(dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = ppo(*plain(*wide, targets), inputs)[0].sum()
    want = torch.autograd.grad(loss, wide)
    total, _ = chunked_loss(hidden, weight, targets, ppo, inputs, chunk_tokens=16)
    assert total.dtype == torch.float64
    got = torch.autograd.grad(total, (hidden, weight))
    for a, b, like in zip((total, *got), (loss, *want), (total, hidden, weight), strict=True):
        assert a.dtype == like.dtype and (a.double() - b).norm() <= limit * b.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernel_logp_of_narrow_dtypes_is_that_of_their_exact_products(dtype):
    """Rounding logits of +-30 to bfloat16 would cost 0.06: the target is 2e-3, and that both ways agree."""
    T, D, V = 70, 64, 3001
    hidden, weight, targets, _ = make(T, D, V, dtype=dtype)
    hidden = (8 * hidden).detach().requires_grad_()
    logp, entropy = plain(hidden, weight, targets)
    one = linear_logprob(hidden, weight, targets, chunk_vocab=999)
    _, told = chunked_loss(hidden, weight, targets, lambda logp, entropy, x: logp * entropy, chunk_tokens=32)
    for got in (one, (told["logp"], told["entropy"])):
        assert (got[0] - logp).abs().max() < 2e-4 and (got[1] - entropy).abs().max() < 2e-4
    assert (one[0] - told["logp"]).abs().max() < 1e-5


@pytest.mark.parametrize("way", ["linear_logprob", "chunked_loss"])
def test_kernel_gradient_of_tokens_that_are_nearly_certain(way):
    """At p = 0.97 to 0.9999 and logits of about 32, 1 - p is small: one rounding of a logit would drown it."""
    T, D, V = 24, 64, 501
    hidden, weight, targets, (g, e) = make(T, D, V, dtype=torch.bfloat16)
    with torch.no_grad():
        # 20 for every logit, and a direction of its own for each target, which its token has.
        hidden[:, T], weight[:, T], targets = 5.0, 4.0, torch.arange(T)
        weight[:T, :T], hidden[:, :T] = 2.75 * torch.eye(T), 4.5 * torch.eye(T)
        hidden += torch.rand(hidden.shape, generator=torch.Generator().manual_seed(5)).bfloat16() / 8
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logp, entropy = plain(*wide, targets)
    assert logp.exp().min() > 0.97 and logp.exp().max() < 0.9999, logp.exp()
    inputs = {"g": g, "e": e}

    def loss(logp, entropy, x):
        return x["g"] * logp + x["e"] * entropy

    want = torch.autograd.grad(loss(logp, entropy, inputs).sum(), wide)
    if way == "chunked_loss":
        total, _ = chunked_loss(hidden, weight, targets, loss, inputs, chunk_tokens=16)
    else:
        total = loss(*linear_logprob(hidden, weight, targets, chunk_vocab=99), inputs).sum()
    for a, b in zip(torch.autograd.grad(total, (hidden, weight)), want, strict=True):
        assert (a.double() - b).norm() < (0.1 if way == "chunked_loss" else 0.01) * b.norm()


def test_kernel_loss_in_chunks_with_mask_and_padding():
    hidden, weight, targets, inputs = case()
    targets, mask = targets % 100, torch.arange(41) % 3 > 0
    logp, entropy = plain(hidden, weight[:100], targets)
    loss = ppo(logp, entropy, inputs)[0] * mask
    want = torch.autograd.grad(loss.sum(), (hidden, weight))
    total, told = chunked_loss(
        hidden, weight, targets.masked_fill(~mask, -1), ppo, inputs, mask=mask, valid_vocab=100, chunk_tokens=8
    )
    got = torch.autograd.grad(total, (hidden, weight))
    torch.testing.assert_close((total, *got), (loss.sum(), *want), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(told["loss"], loss.detach(), rtol=1e-10, atol=1e-10)
    assert not told["logp"][~mask].any()


def test_kernel_loss_in_chunks_three_matmuls_or_one(monkeypatch):
    """A gradient costs as many multiplications as 3 matmuls, and no gradient costs 1."""
    hidden, weight, targets, inputs = case()
    count = 0

    def counted(function, first):
        def call(*args, **options):
            nonlocal count
            a, b = args[first : first + 2]
            count += a.shape[0] * a.shape[1] * b.shape[1]
            return function(*args, **options)

        return call

    monkeypatch.setattr(torch, "mm", counted(torch.mm, 0))
    monkeypatch.setattr(torch, "addmm", counted(torch.addmm, 1))
    total, _ = chunked_loss(hidden, weight, targets, ppo, inputs, chunk_tokens=8)
    total.backward()
    assert count == 3 * 41 * 7 * 150
    count = 0
    with torch.no_grad():
        alone, _ = chunked_loss(hidden, weight, targets, ppo, inputs, chunk_tokens=8)
    assert count == 41 * 7 * 150 and alone == total and not alone.requires_grad


def test_kernel_loss_in_chunks_entropy_alone_and_logp_alone():
    hidden, weight, targets, _ = case()
    for which, function in ((0, lambda p, e, _: p * 2), (1, lambda p, e, _: e * 2)):
        want = torch.autograd.grad(2 * plain(hidden, weight, targets)[which].sum(), (hidden, weight))
        total, _ = chunked_loss(hidden, weight, targets, function, chunk_tokens=16)
        got = torch.autograd.grad(total, (hidden, weight))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    total, told = chunked_loss(hidden, weight, targets, lambda p, e, _: p if e is None else 1 / 0, entropy=False)
    assert sorted(told) == ["logp", "loss"]


def test_kernel_loss_in_chunks_works_once_and_with_no_tokens():
    hidden, weight, targets, inputs = case()
    total, _ = chunked_loss(hidden, weight, targets, ppo, inputs)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="works once"):
        total.backward()
    hidden, weight, targets, inputs = case(T=0)
    total, told = chunked_loss(hidden, weight, targets, ppo, inputs)
    total.backward()
    assert total == 0 and told["logp"].shape == (0,) and not weight.grad.any()


def test_kernel_loss_in_chunks_refuses_what_is_not_token_by_token():
    hidden, weight, targets, inputs = case()
    seq = torch.arange(41) // 10

    def gspo(logp, entropy, x):
        return (torch.zeros(5, dtype=logp.dtype).index_add(0, x["seq"], logp) / 10)[x["seq"]].exp() * x["advantage"]

    bad = [
        (lambda p, e, x: p.mean(), inputs, "one loss per token"),
        (lambda p, e, x: (p, {"kl": p.sum()}), inputs, "one kl per token"),
        (lambda p, e, x: p - p.mean(), inputs, "depends on other tokens.*linear_logprob"),
        (gspo, inputs | {"seq": seq}, "depends on other tokens"),
        (lambda p, e, x: p.detach(), inputs, "neither logp nor entropy"),
        (ppo, inputs | {"weight": torch.ones(3)}, r"inputs\['weight'\] must be \[T"),
        (ppo, inputs | {"weight": torch.ones(41, requires_grad=True)}, "without gradient"),
    ]
    for function, given, message in bad:
        with pytest.raises(ValueError, match=message):
            chunked_loss(hidden, weight, targets, function, given)


def test_kernel_loss_in_chunks_names_no_rows_and_bad_results():
    hidden, weight, targets, inputs = case()
    for name in ("logp", "entropy", "loss"):
        with pytest.raises(ValueError, match=f"logs \\['{name}'\\], names that chunked_loss uses itself"):
            chunked_loss(hidden, weight, targets, lambda logp, _, x, name=name: (-logp, {name: logp}))
    for result in (None, [1, 2], (1, 2)):
        with pytest.raises(ValueError, match="loss_fn must return loss"):
            chunked_loss(hidden, weight, targets, lambda logp, _, x, result=result: result)
    with pytest.raises(ValueError, match=r"inputs\['a'\] must be"):
        chunked_loss(hidden, weight, targets, ppo, {"a": 3})
    with pytest.raises(ValueError, match="depends on other tokens"):
        # The first chunk has one row, which cannot tell.
        mask = torch.arange(41) < 4
        chunked_loss(hidden, weight, targets, lambda lp, _, x: lp - lp.mean(), mask=mask, chunk_tokens=3)
    total, told = chunked_loss(hidden, weight, targets, ppo, inputs, mask=torch.zeros(41, dtype=torch.bool))
    some, names = chunked_loss(hidden, weight, targets, ppo, inputs)
    assert total == 0 and total.dtype == some.dtype and told.keys() == names.keys()
    assert all(told[name].dtype == names[name].dtype and not told[name].any() for name in names)
    assert not any(x.any() for x in torch.autograd.grad(total, (hidden, weight)))
