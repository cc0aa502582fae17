"""Makes inputs, calls a contender on them, and measures the error of its results and gradients against fp64."""

from typing import Any

import torch
from _contenders import Contender, ours, ours_loss, plain, told_logp
from _measure import reason, target

SHAPE = (48, 128, 1112)
"""T, D, V of the test. Some contenders need D and V to be multiples of 8 or 64."""
KINDS = ("random", "certain")
LIMITS = {
    # Rounding a logit of 30 and the logsumexp to fp32 adds an error of 4e-6, which is 4e-3 of 1 - p >= 0.001.
    (torch.float32, "random"): 2e-4,
    (torch.float32, "certain"): 4e-3,
    (torch.bfloat16, "random"): 2e-2,
}
"""Largest errors of results and gradients, as a share of their norm. For (bf16, certain) see `Contender.certain`."""
GOALS = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
"""Largest error of a logp; kernels/NOTES.md lists the targets."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def make(shape, device, dtype, seed, what="random"):
    """Make hidden, weight, targets and upstream gradients [2, T].

    what: `random`; or `certain`, for targets with p > 0.99 and logits of 29 to 30.
    """
    T, D, V = shape
    torch.manual_seed(seed)
    h, w = torch.randn(T, D, device=device), torch.randn(V, D, device=device).div_(D**0.5)
    t, upstream = torch.randint(V, (T,), device=device), torch.randn(2, T, device=device)
    if what == "certain":
        t = torch.arange(T, device=device)
        # All logits are 16, the target's 12.7 to 14.5 more: p is 0.994 to 0.999, and bf16 rounds each logit
        # differently.
        w[:T] = 0
        h[:, T], w[:, T] = 4.0, 4.0
        h[:, :T] = 3.625 * torch.eye(T, device=device)
        w[:T, :T] = torch.linspace(3.5, 4, T, device=device).diag()
    return h.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), t, upstream


def work(contender: Contender, kind: str, inputs) -> tuple[Any, Any]:
    """Run one forward without gradients, or forward and backward with upstream gradients that differ by token."""
    h, w, t, (g, e) = inputs
    if kind == "forward":
        with torch.no_grad():
            return contender.call(h, w, t), None
    result = contender.call(h, w, t)
    if contender.gives == "loss":
        return result, torch.autograd.grad(result, (h, w))
    logp, entropy = result
    pairs = [(logp, g)] + ([(entropy, e)] if contender.gives == "both" else [])
    outputs, upstream = zip(*((x, y.to(x.dtype)) for x, y in pairs), strict=True)
    return result, torch.autograd.grad(outputs, (h, w), upstream)


def errors(contender: Contender, device: str, dtype: torch.dtype, what: str) -> dict[str, float]:
    """Return errors of results and gradients, as a share of their norm (results: at least 1); `max dlogp` is
    absolute."""
    inputs = make(SHAPE, device, dtype, 7, what)
    wide = [x.detach().double().requires_grad_() for x in inputs[:2]]
    got, got_grads = work(contender, "backward", inputs)
    logp, entropy = plain(wide[0], wide[1], inputs[2])
    g, e = inputs[3].double()
    loss = -logp.mean()
    if contender.gives == "loss":
        pairs, objective = {"loss": (got, loss)}, loss
    else:
        pairs, objective = {"logp": (got[0], logp)}, (g * logp).sum()
        if contender.gives == "both":
            pairs["entropy"], objective = (got[1], entropy), objective + (e * entropy).sum()
    out = {name: share(*pair, least=1.0) for name, pair in pairs.items()}
    want_grads = torch.autograd.grad(objective, wide)
    out["dhidden"], out["dweight"] = map(share, got_grads, want_grads)
    given = contender.logp(*inputs[:3]) if contender.logp else got[0] if contender.gives != "loss" else None
    if given is not None:
        out["max dlogp"] = (given.double() - logp).abs().max().item()
    return out


def share(got: torch.Tensor, want: torch.Tensor, least: float = 0.0) -> float:
    """Return the norm of the difference divided by the norm of the expected tensor, or by `least` if that is larger."""
    return (got.double() - want).norm().item() / max(want.norm().item(), least)


def too_far(off: dict[str, float], limit: float, what: str) -> str:
    """Return a message about errors above the limit or nan; empty if there are none."""
    wrong = [f"{name} is off by {x:.1e} for {what} tokens" for name, x in off.items() if not x <= limit]
    return "; ".join(x for x in wrong if not x.startswith("max dlogp"))


def check(contender: Contender, device: str, dtype: torch.dtype) -> str:
    """Compare results and gradients with fp64 on a small shape; return the problem, empty if they agree."""
    for what in KINDS:
        try:
            off = errors(contender, device, dtype, what)
        except Exception as error:
            return reason(error)
        if problem := too_far(off, LIMITS.get((dtype, what), contender.certain), what):
            return problem
    return ""


def precision(backend: str, device: str) -> dict[str, dict[str, float]]:
    """Return the errors of our functions in bf16 and fp32; print their targets."""
    found = {}
    mine = {
        "": Contender("linear_logprob", "both", ours(backend), 4, certain=2e-2),
        "loss-": Contender("chunked_loss", "loss", ours_loss(backend), 3, logp=told_logp(backend)),
    }
    for (kind, contender), dtype in ((pair, dtype) for pair in mine.items() for dtype in GOALS):
        off = {what: errors(contender, device, dtype, what) for what in KINDS}
        largest = max(x["max dlogp"] for x in off.values())
        target(f"kernel-{kind}{NAMES[dtype]}-max-dlogp", largest, GOALS[dtype], ".1e")
        for what in KINDS:
            found[f"{contender.name} {NAMES[dtype]} {what}"] = off[what]
            steep = max(off[what]["dhidden"], off[what]["dweight"])
            limit = LIMITS.get((dtype, what), contender.certain)
            target(f"kernel-{kind}{NAMES[dtype]}-{what}-gradient", steep, limit, ".1e")
    return found
