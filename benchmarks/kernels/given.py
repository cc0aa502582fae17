"""Times logp and entropy of given logits, after a check: `token_logprob` and others, with peak memory.

    python benchmarks/kernels/given.py [--quick] [--json FILE] [--plot FILE] [--shapes T,V ...] [--seconds S]

It works like linear.py, but the inputs are logits [T, V]. `backward` times forward and backward; ours writes the
gradient over the logits, which are refilled before every call (untimed). The time is compared with that of copying the
logits in the same round: a forward reads them once, which takes half as long as a copy; forward and backward take one
and a half copies. --quick leaves out contenders that are slow, or slow to compile.
Memory is the peak in addition to the logits; it includes the gradient.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "kernels"), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from _check import GOALS, KINDS, LIMITS, NAMES, share, too_far  # noqa: E402
from _contenders import Contender, compiled  # noqa: E402
from _measure import Job, each_shape, facts_of, options, plot, reason, show, target, worst_ratios  # noqa: E402

from spmdrl_kernels import token_logprob  # noqa: E402

TARGET = (8192, 151936)
SHAPES = {
    "cuda": [TARGET, (1024, 32768), (1024, 151936), (8192, 32768), (8192, 128256), (32768, 151936)],
    "cuda quick": [TARGET],
    "cpu": [(512, 32768), (256, 151936)],
    "cpu quick": [(128, 32768), (128, 151936)],
}
GOAL = 1.15
"""Largest time of a forward at TARGET, divided by half of a copy in the same run (kernels/NOTES.md)."""
LEAST = {"forward": 0.5, "backward": 1.5}


def make(shape, device, dtype, seed, what="random"):
    """Make logits, targets and upstream gradients [2, T].

    what: `random`; or `certain`, for targets with p > 0.99 and logits of 31.
    """
    T, V = shape
    torch.manual_seed(seed)
    logits = torch.randn(T, V, device=device)
    targets, upstream = torch.randint(V, (T,), device=device), torch.randn(2, T, device=device)
    if what == "certain":
        logits += 18
        logits[torch.arange(T, device=device), targets] = 31.25
    return logits.to(dtype), targets, upstream


def plain(logits, t):
    log_p = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    return log_p.gather(1, t[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def ours(backend):
    return lambda logits, t: token_logprob(logits, t, inplace_backward=True, backend=backend)


def contenders(device: str, quick: bool = False) -> list[Contender]:
    mine = ("torch",) if device == "cpu" else ("triton",) if quick else ("triton", "torch")
    out = [Contender(f"spmdrl ({name})", "both", ours(name), 0) for name in mine]
    out.append(Contender("torch, log_softmax", "both", plain, 0))
    if device == "cuda" and not quick:  # On a CPU, compiling takes longer than everything else.
        out.append(Contender("torch.compile'd log_softmax", "both", compiled(plain), 0))
    return out


def work(contender: Contender, kind: str, logits, t, upstream) -> tuple[Any, Any]:
    """Run a contender; return its results and the gradient of the logits (None for a forward)."""
    if kind == "forward":
        with torch.no_grad():
            return contender.call(logits, t), None
    leaf = logits.detach().requires_grad_()
    result = contender.call(leaf, t)
    return result, torch.autograd.grad(result, leaf, [g.to(x.dtype) for g, x in zip(upstream, result, strict=True)])[0]


def errors(contender: Contender, device, dtype, what) -> dict[str, float]:
    """Return errors of results and gradients, as `_check.errors` does."""
    logits, t, upstream = make((48, 1112), device, dtype, 7, what)
    wide = logits.double().requires_grad_()
    want = plain(wide, t)
    (want_gradient,) = torch.autograd.grad(want, wide, list(upstream.double()))
    (logp, entropy), gradient = work(contender, "backward", logits, t, upstream)
    out = {"logp": share(logp, want[0], 1.0), "entropy": share(entropy, want[1], 1.0)}
    dlogp = (logp.double() - want[0]).abs().max().item()
    return out | {"dlogits": share(gradient, want_gradient), "max dlogp": dlogp}


def check(contender: Contender, device, dtype) -> str:
    """Return the problem of a contender; empty if it has none.

    The logits are inputs, so nearly certain tokens are as exact as random ones in bf16 too.
    """
    for what in KINDS:
        try:
            off = errors(contender, device, dtype, what)
        except Exception as error:
            return reason(error)
        if problem := too_far(off, LIMITS.get((dtype, what), LIMITS[dtype, "random"]), what):
            return problem
    return ""


def jobs_of(shape, device, dtype, field) -> list[Job]:
    sets = [make(shape, device, dtype, seed) for seed in range(2)]
    space = [torch.empty_like(logits) for logits, *_ in sets]
    jobs = []
    for c in field:
        for kind in LEAST:

            def run(i, c=c, kind=kind):
                work(c, kind, space[i % 2], *sets[i % 2][1:])

            def ready(i):
                space[i % 2].copy_(sets[i % 2][0])

            jobs.append(
                Job({"who": c.name, "kind": kind, "gives": c.gives, "shape": shape}, run, LEAST[kind], ready=ready)
            )
    return jobs


def bare_copy(shape, device, dtype) -> partial:
    """Return a function that copies the logits."""
    logits, *_ = make(shape, device, dtype, 0)
    return partial(torch.empty_like(logits).copy_, logits)


def targets(rows: list[dict], device: str) -> None:
    if device == "cpu":
        for (kind, _), ratio in worst_ratios(rows).items():
            target(f"kernel-given-cpu-{kind}-worst-ratio", ratio, 1.0)
        return
    ours = (r for r in rows if r["kind"] == "forward" and r["who"] == "spmdrl (triton)" and r["shape"] == TARGET)
    target("kernel-given-forward-over-reading", next(ours, {}).get("ratio"), GOAL, ".3f")


def main() -> None:
    args = options(__doc__, "TV")
    device, dtype = args.device, torch.bfloat16 if args.device == "cuda" else torch.float32
    facts = facts_of(device, dtype, args.json)
    field = contenders(device, args.quick)
    for kind, goal in GOALS.items():
        largest = max(errors(field[0], device, kind, what)["max dlogp"] for what in KINDS)
        target(f"kernel-given-{NAMES[kind]}-max-dlogp", largest, goal, ".1e")
    facts["left_out"] = {c.name: problem for c in field if (problem := check(c, device, dtype))}
    for name, problem in facts["left_out"].items():
        print(f"left out: {name}: {problem}", flush=True)
    field = [c for c in field if c.name not in facts["left_out"]]
    rows = []
    shapes = args.shapes or SHAPES[device + (" quick" if args.quick else "")]
    jobs = partial(jobs_of, field=field)
    for shape, part in each_shape(shapes, args, args.json, facts, jobs, bare_copy, dtype):
        rows += part
        show(part, "TV")
        if device == "cuda" and shape == TARGET:
            targets(part, device)
    if device == "cpu":
        targets(rows, device)
    plot(rows, args.plot)


if __name__ == "__main__":
    main()
