"""The kernels over a vocabulary divided among ranks, against the whole vocabulary in fp64."""

import pytest
import torch
import torch.distributed as dist

from spmdrl_kernels import chunked_loss, collision_probability, linear_logprob, token_logprob
from tests.ranks.harness import RankError, run_ranks

T, D, V = 23, 6, 61
PARTS = {
    "2 even": [30, 31],
    "2 uneven": [60, 1],
    "2, first empty": [0, 61],
    "2, last empty": [61, 0],
    "3 uneven": [7, 40, 14],
    "3, middle empty": [20, 0, 41],
}
LEFT_OUT = (22, 23, 58, 60)
SETTINGS = [
    {},
    {"temperature": 0.7, "softcap": 2.0, "valid_vocab": 33},
    {"temperature": "per token", "mask": "some", "valid_vocab": 20, "chunk_tokens": 5, "chunk_vocab": 8},
    {"temperature": 0.7, "excluded": LEFT_OUT, "chunk_vocab": 2},
]


def make(dtype=torch.float64):
    rng = torch.Generator().manual_seed(3)
    hidden = torch.randn(T, D, generator=rng, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=rng, dtype=torch.float64).to(dtype)
    # Two columns far above the rest, on different ranks in most cases.
    weight[5] += 4
    weight[-3] += 4
    targets, grads = torch.randint(20, (T,), generator=rng), torch.randn(2, T, generator=rng, dtype=torch.float64)
    heat = torch.rand(T, generator=rng, dtype=torch.float64) + 0.5
    return hidden, weight, targets, grads, heat


def given(settings, heat, targets):
    """Settings with tensors in the place of words."""
    out, some = dict(settings), torch.arange(T) % 3 != 1
    if "mask" in out:
        out["mask"], targets = some, torch.where(some, targets, -100)
    if out.get("temperature") == "per token":
        out["temperature"] = heat
    return out, targets


def whole(settings, dtype):
    """Returns logp, entropy, collision probability, dH, dW of the full softmax in fp64."""
    hidden, weight, targets, grads, heat = make(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    settings, _ = given(settings, heat, targets)
    logits = hidden @ weight.t()
    if cap := settings.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    logits = logits.index_fill(1, torch.tensor(settings.get("excluded", ()), dtype=torch.int64), -1e30)
    temperature = torch.as_tensor(settings.get("temperature", 1.0), dtype=torch.float64)
    logits = logits[:, : settings.get("valid_vocab", V)] / temperature.reshape(-1, 1)
    log_p = torch.log_softmax(logits, -1)
    keep = settings.get("mask", torch.ones(T, dtype=torch.bool)).double()
    logp, entropy = log_p.gather(1, targets[:, None])[:, 0] * keep, -(log_p.exp() * log_p).sum(-1) * keep
    gradients = torch.autograd.grad((logp, entropy), (hidden, weight), list(grads))
    return [x.detach() for x in (logp, entropy, log_p.exp().square().sum(-1), *gradients)]


def part_of_vocabulary(world, parts, settings, dtype):
    hidden, weight, targets, grads, heat = make(dtype)
    settings, targets = given(settings, heat, targets)
    start = sum(parts[: world.rank])
    shard = weight[start : start + parts[world.rank]].clone().requires_grad_()
    hidden.requires_grad_()
    logp, entropy = linear_logprob(hidden, shard, targets, group=dist.group.WORLD, **settings)
    gradients = torch.autograd.grad((logp, entropy), (hidden, shard), list(grads.to(logp.dtype)))
    settings.pop("mask", None)
    collision = collision_probability(hidden, shard, group=dist.group.WORLD, **settings)
    return [x.detach() for x in (logp, entropy, collision, *gradients)]


def every_case(world, parts, dtype):
    return [part_of_vocabulary(world, parts, settings, dtype) for settings in SETTINGS]


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_kernel_vocabulary_over_ranks(parts):
    cases = [(torch.float64, 1e-10), (torch.float32, 1e-5)] if parts == PARTS["3 uneven"] else [(torch.float64, 1e-10)]
    for dtype, tolerance in cases:
        by_rank = run_ranks(every_case, len(parts), parts, dtype)
        for i, settings in enumerate(SETTINGS):
            want = whole(settings, dtype)
            results = [values[i] for values in by_rank]
            for got in results:
                for a, b in zip(got[:4], want[:4], strict=True):
                    torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
                # Every rank goes on with the same numbers, bit for bit.
                assert all(torch.equal(a, b) for a, b in zip(got[:4], results[0][:4], strict=True))
            dw = torch.cat([got[4] for got in results])
            torch.testing.assert_close(dw.double(), want[4], rtol=tolerance, atol=tolerance)


def half_precision(world):
    hidden, weight, targets, grads, _ = make(torch.bfloat16)
    parts = [25, 36]
    shard = weight.split(parts)[world.rank].clone().requires_grad_()
    hidden.requires_grad_()
    outputs = linear_logprob(hidden, shard, targets, group=dist.group.WORLD)
    dh, dw = torch.autograd.grad(outputs, (hidden, shard), list(grads.float()))
    with pytest.raises(ValueError, match=r"\[0, 61\)"):
        linear_logprob(hidden, shard, targets + 50, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"valid_vocab must lie in \[1, 61\]"):
        linear_logprob(hidden, shard, targets, group=dist.group.WORLD, valid_vocab=62)
    nothing = linear_logprob(hidden[:0], shard, targets[:0], group=dist.group.WORLD)
    (nothing[0].sum() + nothing[1].sum()).backward()
    assert shard.grad.shape == shard.shape and not shard.grad.any()
    return [x.detach() for x in (*outputs, dh, dw)]


def test_kernel_vocabulary_over_ranks_in_bfloat16_and_bad_input():
    by_rank = run_ranks(half_precision, 2)
    want = whole({}, torch.bfloat16)
    got = [*by_rank[0][:3], torch.cat([values[3] for values in by_rank])]
    for a, b in zip(got, [*want[:2], *want[3:]], strict=True):
        assert (a.double() - b).norm() <= 1e-2 * b.norm()


def own_tokens(world):
    hidden, weight, targets, *_ = make()
    linear_logprob(hidden, weight, (targets + world.rank) % V, group=dist.group.WORLD)


def test_kernel_ranks_that_hold_different_tokens_are_told():
    with pytest.raises(RankError, match="must pass the same tokens"):
        run_ranks(own_tokens, 2)


def given_logits_and_chunked_loss(world, parts):
    hidden, weight, targets, grads, heat = make()
    start = sum(parts[: world.rank])
    shard = weight[start : start + parts[world.rank]].clone().requires_grad_()
    hidden.requires_grad_()
    group = dist.group.WORLD
    logits = hidden.detach() @ shard.detach().t()
    outputs = token_logprob(logits.requires_grad_(), targets, heat, group=group, valid_vocab=33)
    (dlogits,) = torch.autograd.grad(outputs, logits, list(grads))
    total, told = chunked_loss(
        hidden, shard, targets, weighted, {"g": grads.t()}, heat, group=group, valid_vocab=33, chunk_tokens=7
    )
    excluded, _ = chunked_loss(
        *(hidden, shard, targets, weighted, {"g": grads.t()}, heat), group=group, excluded=LEFT_OUT, chunk_tokens=7
    )
    gradients = [torch.autograd.grad(x, (hidden, shard)) for x in (total, excluded)]
    return [x.detach() for x in (*outputs, told["logp"], *gradients[0], dlogits, *gradients[1])]


def weighted(logp, entropy, inputs):
    """Computes a loss whose gradients are those of `whole`."""
    return inputs["g"][:, 0] * logp + inputs["g"][:, 1] * entropy


def test_kernel_given_logits_and_chunked_loss_over_ranks():
    parts = PARTS["3, middle empty"]
    by_rank = run_ranks(given_logits_and_chunked_loss, 3, parts)
    logp, entropy, _, dh, dw = whole({"temperature": "per token", "valid_vocab": 33}, torch.float64)
    for got in by_rank:
        torch.testing.assert_close(got[:4], [logp, entropy, logp, dh], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([got[4] for got in by_rank]), dw, rtol=1e-10, atol=1e-10)
    dlogits = torch.cat([got[5] for got in by_rank], 1)
    torch.testing.assert_close(dlogits.t() @ make()[0], dw, rtol=1e-10, atol=1e-10)
    *_, dh, dw = whole({"temperature": "per token", "excluded": LEFT_OUT}, torch.float64)
    assert all((got[6] - dh).abs().max() <= 1e-10 for got in by_rank)
    torch.testing.assert_close(torch.cat([got[7] for got in by_rank]), dw, rtol=1e-10, atol=1e-10)


def invariant(world):
    """Returns the result of a token beside few others and beside many."""
    rng = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(200, 32, generator=rng), torch.randn(90, 32, generator=rng)
    targets, shard = torch.randint(90, (200,), generator=rng), weight[30 * world.rank :][:30].contiguous()
    results = []
    for rows in (slice(64), slice(200)):
        states = hidden[rows].clone().requires_grad_()
        outputs = linear_logprob(states, shard, targets[rows], batch_invariant=True, group=dist.group.WORLD)
        (dh,) = torch.autograd.grad(outputs, states, [torch.ones(len(states)), torch.ones(len(states))])
        results.append([x.detach()[:64] for x in (*outputs, dh)])
    return results


def test_kernel_batch_invariant_to_the_bit_over_ranks():
    for few, many in run_ranks(invariant, 3):
        assert all(torch.equal(a, b) for a, b in zip(few, many, strict=True))
