"""token_logprob against log_softmax in fp64."""

import pytest
import torch

from spmdrl_kernels import token_logprob


def make(T=19, V=83, dtype=torch.float64):
    rng = torch.Generator().manual_seed(4)
    logits = (3 * torch.randn(T, V, generator=rng, dtype=torch.float64)).to(dtype).requires_grad_()
    return logits, torch.randint(V, (T,), generator=rng), torch.randn(2, T, generator=rng, dtype=torch.float64)


def plain(logits, targets, temperature=1.0, softcap=None):
    logits = logits.double() if softcap is None else softcap * torch.tanh(logits.double() / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "softcap": 4.0}])
@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("inplace", [False, True])
def test_kernel_given_logits(options, dtype, limit, inplace):
    logits, targets, grads = make(dtype=dtype)
    wide = logits.detach().double().requires_grad_()
    want = plain(wide, targets, **options)
    want += torch.autograd.grad(want, wide, list(grads))
    # A node and not a leaf, as a model gives it.
    node = logits * 1
    before = node.detach().clone()
    got = token_logprob(node, targets, inplace_backward=inplace, **options)
    got += torch.autograd.grad(got, logits, [g.to(got[0].dtype) for g in grads])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=limit, atol=limit)
    assert torch.equal(node, before) != inplace


def test_kernel_given_logits_gradcheck_and_one_output():
    logits, targets, (g, _) = make(3, 5)
    assert torch.autograd.gradcheck(lambda x: token_logprob(x, targets, 1.3, softcap=2.0), (logits,))
    for which in (0, 1):
        (want,) = torch.autograd.grad(plain(logits, targets)[which], logits, g)
        (got,) = torch.autograd.grad(token_logprob(logits, targets)[which], logits, g)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    logp, entropy = token_logprob(logits, targets, entropy=False)
    assert entropy is None
    torch.testing.assert_close(logp, plain(logits, targets)[0])


def test_kernel_given_logits_strided_padded_and_ruled_out():
    logits, targets, grads = make()
    targets, heat = targets % 40, torch.rand(19, dtype=torch.float64) + 0.5
    strided = logits.detach().t().contiguous().t().requires_grad_()
    torch.testing.assert_close(token_logprob(strided, targets), plain(logits, targets), rtol=1e-10, atol=1e-10)
    want = plain(logits[:, :40], targets, heat[:, None])
    want += torch.autograd.grad(want, logits, list(grads))
    out = torch.full_like(logits, -torch.inf)
    out[:, :40] = logits.detach()[:, :40]
    for given, options in ((logits, {"valid_vocab": 40}), (out.requires_grad_(), {})):
        got = token_logprob(given, targets, heat, **options)
        got += torch.autograd.grad(got, given, list(grads))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert token_logprob(out, targets + 40)[0].isneginf().all()


def test_kernel_given_logits_twice_in_place_is_refused():
    logits, targets, _ = make()
    logp, _ = token_logprob(logits * 1, targets, inplace_backward=True)
    logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()
    y = logits.exp()  # whose backward needs y
    logp, _ = token_logprob(y, targets, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


def test_kernel_given_logits_bad_input_and_none():
    x, t = torch.zeros(3, 5, requires_grad=True), torch.tensor([0, 4, 2])
    for args, message in [
        ((x[0], t), r"\[T, V\]"),
        ((x.long(), t), "int64"),
        ((x, t[:2]), "one target per row of logits"),
        ((x, t.int()), "int64"),
        ((x, t + 1), r"\[0, 5\)"),
        ((x, t, -1.0), "temperature"),
    ]:
        with pytest.raises(ValueError, match=message):
            token_logprob(*args)
    logp, entropy = token_logprob(x[:0], t[:0])
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == (0,) and not x.grad.any()
