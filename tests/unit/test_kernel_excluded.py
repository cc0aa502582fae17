"""Excluded token ids in every function of the package, against softmax over the logits of the other tokens in fp64."""

import math

import pytest
import torch

from spmdrl_kernels import chunked_loss, collision_probability, linear_logprob
from spmdrl_kernels.aligned import Matched, SpanTeacher, aligned_loss
from spmdrl_kernels.distill import distillation_loss, top_logprobs
from spmdrl_kernels.divergence import StatesTeacher, TopTeacher

EXCLUDED = (0, 7, 8, 9, 40)
"""With blocks of 3 columns, one block has excluded columns only."""
T, D, V = 23, 6, 41


def make(dtype=torch.float64, *shapes, seed=0):
    rng = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(*s, generator=rng, dtype=torch.float64).to(dtype) for s in ((T, D), (V, D), *shapes)]
    # Excluded tokens would be the likeliest ones.
    drawn[1][list(EXCLUDED)] += 3
    drawn[0] += 0.5
    return [x.requires_grad_() for x in drawn[:2]] + drawn[2:]


def kept(V=V):
    return torch.tensor([i for i in range(V) if i not in EXCLUDED])


def targets_of(seed=0):
    chosen = torch.randint(V - len(EXCLUDED), (T,), generator=torch.Generator().manual_seed(seed))
    return kept()[chosen], chosen


def close(got, want, limit=1e-10):
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        assert (a.double() - b).norm() <= limit * max(1.0, b.norm())


def logp_of(hidden, weight, divisor: float | torch.Tensor = 1.0):
    """Log-probabilities of the tokens that are not excluded, from their rows of the weight only."""
    logits = hidden.double() @ weight.double()[kept(len(weight))].t()
    return torch.log_softmax(logits / divisor, -1)


LIMIT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(
    "options", [{}, {"chunk_tokens": 5, "chunk_vocab": 3}, {"batch_invariant": True, "chunk_vocab": 16}, {"mask": True}]
)
def test_kernel_excluded_tokens_have_no_probability_and_no_gradient(dtype, options):
    hidden, weight, grads, heat = make(dtype, (2, T), (T,))
    (targets, chosen), heat = targets_of(), heat.double().abs() + 0.5
    mask = torch.arange(T) % 3 > 0 if "mask" in options else torch.ones(T, dtype=torch.bool)
    got = linear_logprob(hidden, weight, targets, heat, excluded=EXCLUDED, **options | {"mask": mask})
    found = *got, *torch.autograd.grad(got, (hidden, weight), list(grads.to(got[0].dtype)))
    log_p = logp_of(hidden, weight, heat[:, None]) * mask[:, None]
    entropy = -(log_p.exp() * log_p).sum(-1)
    want = log_p.gather(1, chosen[:, None])[:, 0], entropy
    want = *want, *torch.autograd.grad(want, (hidden, weight), list(grads.double()))
    close(found, want, LIMIT[dtype])
    assert not found[3][list(EXCLUDED)].any()
    if "mask" in options:
        return
    collision = collision_probability(
        hidden.detach(), weight.detach(), heat, excluded=EXCLUDED, chunk_vocab=options.get("chunk_vocab")
    )
    close([collision], [log_p.detach().exp().square().sum(-1)], LIMIT[dtype])
    best = kept()[log_p.argmax(-1)]
    top = linear_logprob(hidden, weight, best, heat, top=True, excluded=EXCLUDED, **options)[1]
    assert top is not None and top.all()


def weighted(logp, entropy, x):
    return x["g"] * logp + x["e"] * entropy, {"p": logp.exp()}


@pytest.mark.parametrize("dtype", [*LIMIT, torch.float16])
def test_kernel_excluded_tokens_in_a_chunked_loss(dtype):
    hidden, weight, grads = make(dtype, (2, T))
    targets, chosen = targets_of()
    inputs = dict(zip("ge", grads.double(), strict=True))
    options = {"excluded": EXCLUDED, "chunk_tokens": 5}
    total, told = chunked_loss(hidden, weight, targets, weighted, inputs, 0.8, top=True, **options)
    found = told["logp"], told["entropy"], *torch.autograd.grad(total, (hidden, weight))
    log_p = logp_of(hidden, weight, 0.8)
    logp, entropy = log_p.gather(1, chosen[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    loss, _ = weighted(logp, entropy, inputs)
    want = logp, entropy, *torch.autograd.grad(loss.sum(), (hidden, weight))
    close(found, want, LIMIT.get(dtype, 3e-3))
    assert not found[3][list(EXCLUDED)].any()
    assert torch.equal(told["top"] > 0, log_p.argmax(-1) == chosen)


@pytest.mark.parametrize("way", ["linear", "chunked"])
def test_kernel_a_target_that_is_excluded_has_no_gradient_and_changes_no_other_row(way):
    hidden, weight, grads = make(torch.float64, (2, T))
    targets, _ = targets_of()
    odd = torch.arange(T) % 5 == 2
    hit, inputs = torch.where(odd, 8, targets), dict(zip("ge", grads, strict=True))

    def numbers(targets, nothing):
        def loss(logp, entropy, x):
            # The loss of a row with logp = -inf may have a gradient of nan.
            return logp.where(~x["odd"], 0 * logp if nothing else (logp - logp) ** 2) * x["g"] + x["e"] * entropy

        given = inputs | {"odd": odd}
        if way == "chunked":
            total, told = chunked_loss(hidden, weight, targets, loss, given, excluded=EXCLUDED)
            return told["logp"], *torch.autograd.grad(total, (hidden, weight))
        logp, entropy = linear_logprob(hidden, weight, targets, excluded=EXCLUDED)
        return logp, *torch.autograd.grad(loss(logp, entropy, given).sum(), (hidden, weight))

    logp, *found = numbers(hit, False)
    alone, *want = numbers(targets, True)
    assert logp[odd].eq(-torch.inf).all() and torch.equal(logp[~odd], alone[~odd])
    close(found, want)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", LIMIT)
def test_kernel_excluded_tokens_in_distillation(beta, dtype):
    hidden, weight, states, head, share = make(dtype, (T, 5), (V + 2, 5), (T,))
    share = share.double().abs()
    s, t = logp_of(hidden, weight, 1.3), logp_of(states, head[:V], 0.7)

    def definition(s, t):
        p, q = s.exp(), t.exp()
        if beta in (0.0, 1.0):
            return ((p if beta else q) * (s - t if beta else t - s)).sum(-1)
        m = (beta * q + (1 - beta) * p).log()
        return (beta * q * (t - m) + (1 - beta) * p * (s - m)).sum(-1)

    options = {"excluded": EXCLUDED, "chunk_tokens": 5}
    ids, logp, rest = top_logprobs(states, head, 4, 0.7, valid_vocab=V, **options)
    best, places = t.topk(4, -1)
    close((ids, logp, rest), (kept()[places].double(), best, torch.log1p(-best.exp().sum(-1))), LIMIT[dtype])
    buckets = [torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in (s.gather(1, places), best)]
    # Some teachers report excluded tokens too; their probabilities go to the others.
    mixed = (
        torch.cat([ids, torch.full((T, 1), 8)], 1),
        torch.cat([logp - 0.5, logp.new_full((T, 1), math.log1p(-math.exp(-0.5)))], 1),
    )
    cases = {
        "states": (StatesTeacher(states, head, 0.7), (s, t)),
        "top": (TopTeacher(ids, logp, rest), buckets),
        "top with an excluded token": (TopTeacher(*mixed, rest - 0.5), buckets),
        "renormalized": (
            TopTeacher(*mixed, renormalized=True),
            [torch.log_softmax(x, -1) for x in (s.gather(1, places), best)],
        ),
    }
    for name, (teacher, pair) in cases.items():
        total, divergence, entropy = distillation_loss(hidden, weight, [(teacher, share)], beta, 1.3, **options)
        found = divergence[:, 0], entropy, *torch.autograd.grad(total, (hidden, weight))
        want = definition(*pair), -(s.exp() * s).sum(-1)
        want = *want, *torch.autograd.grad((want[0] * share).sum(), (hidden, weight), retain_graph=True)
        close(found, want, LIMIT[dtype] if dtype != torch.float64 else 1e-9)
        assert not found[3][list(EXCLUDED)].any(), name


@pytest.mark.parametrize("gold", [False, True])
def test_kernel_excluded_tokens_in_aligned_distillation(gold):
    U, theirs, beta = 53, (2, 50), 0.4
    hidden, weight, states, head, share, shift, own = make(torch.float64, (T, 5), (U, 5), (T,), (T,), (T,))
    own.requires_grad_()
    mine, other = torch.tensor([3, 4, 11]), torch.tensor([5, 1, 30])
    matched = Matched(mine, other, beta) if gold else None
    teacher = SpanTeacher(states, head, shift, 0.7, excluded=theirs)
    options = {"excluded": EXCLUDED, "chunk_tokens": 5}
    total, slope, distance, entropy = aligned_loss(
        hidden, weight, own.detach(), teacher, share, matched, 1.3, **options
    )
    found = total, distance, entropy, slope, *torch.autograd.grad(total, (hidden, weight))
    # By definition, without the rows of the excluded tokens.
    left = torch.tensor([i for i in range(U) if i not in theirs])
    s = logp_of(hidden, weight, 1.3)
    a, b = s + own[:, None], torch.log_softmax(states @ head[left].t() / 0.7, -1) + shift[:, None]
    p, q, direct, part = a.exp(), b.exp(), torch.zeros(T), 0.0
    if gold:
        at, there = torch.searchsorted(kept(), mine), torch.searchsorted(left, other)
        m = ((1 - beta) * p[:, at] + beta * q[:, there]).log()
        direct = (1 - beta) * (p[:, at] * (a[:, at] - m)).sum(1) + beta * (q[:, there] * (b[:, there] - m)).sum(1)
        part, p, q = 3 / U, p.index_fill(1, at, 0), q.index_fill(1, there, 0)
    p, q = (torch.nn.functional.pad(x, (0, U - x.shape[1])).sort(1, descending=True).values for x in (p, q))
    apart = part * direct + (1 - part) * (p - q).abs().sum(1)
    want = (apart * share).sum()
    want = want, apart, -(s.exp() * s).sum(-1), *torch.autograd.grad(want, (own, hidden, weight))
    close(found, want)
    assert not found[-1][list(EXCLUDED)].any()


def test_kernel_excluded_ids_that_do_not_fit_are_refused():
    hidden, weight = make()
    targets, _ = targets_of()
    with pytest.raises(ValueError, match="softcap cannot be combined with excluded ids"):
        linear_logprob(hidden, weight, targets, softcap=3.0, excluded=(1,))
    with pytest.raises(ValueError, match="softcap cannot be combined with excluded ids"):
        teacher = StatesTeacher(hidden.detach(), weight.detach(), softcap=3.0)
        distillation_loss(hidden, weight, [(teacher, torch.ones(T))], 0.5, excluded=(1,))
    with pytest.raises(ValueError, match="at least 0, got \\[-1\\]"):
        collision_probability(hidden, weight, excluded=[-1])
    with pytest.raises(ValueError, match="has all 41 ids"):
        chunked_loss(hidden, weight, targets, weighted, excluded=range(50))
    with pytest.raises(ValueError, match="liger' does not support excluded"):
        linear_logprob(hidden, weight, targets, entropy=False, excluded=[1], backend="liger")
    with pytest.raises(ValueError, match=r"k must lie in \[1, 36\)"):
        top_logprobs(hidden, weight, 36, excluded=EXCLUDED)
    plain, beyond = (linear_logprob(hidden, weight, targets, excluded=x)[0] for x in ((), (V, V + 9)))
    assert torch.equal(plain, beyond)
