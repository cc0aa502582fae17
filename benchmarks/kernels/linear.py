"""Times logp and entropy from hidden states, after a check: our functions and others, with peak memory.

    python benchmarks/kernels/linear.py [--quick] [--json FILE] [--plot FILE] [--shapes T,D,V ...] [--seconds S]

On a GPU it runs in bfloat16 with T in {1k, 8k, 32k}, D in {2048, 4096, 8192}, V in {32k, 128256, 151936} and with the
width of Qwen2.5-0.5B (--quick: T=8192, V=151936 with D=4096 and D=896, without slow contenders), timed by CUDA events.
On a CPU it runs in float32 with small sizes on one thread, timed by the CPU seconds of the process, so that other load
on the machine does not change the figures.

The bare matmul and all contenders take turns over rotating inputs in 15 rounds; the figures are medians, with their
ranges in FILE. The time is compared with that of the necessary bare matmuls of the same round (`ratio`): 1 for the
forward, 4 for forward and backward with recomputation, 3 for a loss inside the chunk. A contender is listed but not
timed if the error of its results or gradients, for random or for nearly certain tokens, exceeds what its dtype
explains. Memory is the peak in addition to inputs and returned gradients, after a first call: of the allocator on a
GPU, of resident memory on a CPU. FILE has the clocks of the GPU before and after each call, and is written after every
round.
LIGER_KERNEL_IMPL=cutedsl times Liger's SM90 kernels instead of its Triton kernels.
"""

import itertools
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "kernels"), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from _check import check, make, precision, work  # noqa: E402
from _contenders import contenders  # noqa: E402
from _measure import MIB, Job, each_shape, facts_of, options, plot, show, target, worst_ratios  # noqa: E402

TARGET = (8192, 4096, 151936)
NARROW = (8192, 896, 151936)
"""The width of Qwen2.5-0.5B: the products take a fifth of the time, reading the logits as long as at TARGET."""
SHAPES = {
    # The shapes with targets come first, so that a run that is stopped early includes them.
    "cuda": list(
        dict.fromkeys(
            [TARGET, NARROW, *itertools.product((1024, 8192, 32768), (2048, 4096, 8192), (32768, 128256, 151936))]
        )
    ),
    "cuda quick": [TARGET, NARROW],
    "cpu": [(512, 256, 32768), (256, 64, 32768), (256, 64, 151936), (256, 512, 151936)],
    "cpu quick": [(256, 64, 32768), (256, 64, 151936)],
}
GOALS = {"forward": 1.06, "backward": 1.04}
"""Largest times at TARGET, divided by the bare matmuls' in the same run; kernels/NOTES.md lists the targets."""
LOSS_MS = 48.0
"""Largest time of the loss in chunks at TARGET in milliseconds, on an H100 or H200."""
EXTRA_MIB = 614.0
"""Largest extra memory in MiB: 0.6 GiB."""
FLAT = 1.25
LEAST = {"forward": 1, "backward": 4, "loss": 3}


def bare_matmul(shape, device, dtype) -> Callable[[], Any]:
    """Return a function that computes hidden @ weight.T alone, in pieces that fit into memory."""
    h, w, *_ = make(shape, device, dtype, 0)
    h, w = h.detach(), w.detach()
    columns = max(256, (2**20 if device == "cpu" else 2**28) // shape[0])
    pieces = w.split(columns)
    out = torch.empty(shape[0] * columns, device=device, dtype=dtype)

    def run():
        for piece in pieces:
            torch.mm(h, piece.t(), out=out[: shape[0] * len(piece)].view(shape[0], len(piece)))

    return run


def jobs_of(shape, device, dtype, field) -> list[Job]:
    sets = [make(shape, device, dtype, seed) for seed in range(2 if device == "cpu" else 3)]
    jobs = []
    for c, kind in [(c, kind) for c in field for kind in ("forward", "backward")]:
        if c.gives == "loss" and kind == "forward":
            continue
        name = "loss" if c.gives == "loss" else kind
        returned = 0 if kind == "forward" else sum(x.numel() * x.element_size() for x in sets[0][:2])

        def run(i, c=c, kind=kind):
            work(c, kind, sets[i % len(sets)])

        row = {"who": c.name, "kind": name, "gives": c.gives, "shape": shape}
        jobs.append(Job(row, run, LEAST[name], returned))
    return jobs


def targets_gpu(rows: list[dict]) -> None:
    """Print whether our time and memory at TARGET meet the targets; a missing row is a miss."""
    for kind in (*GOALS, "loss"):
        ours = [r for r in rows if r["who"].startswith("spmdrl (triton)") and r["gives"] != "logp" and "ms" in r]
        row = next((r for r in ours if r["kind"] == kind), {})
        if kind in GOALS:
            target(f"kernel-{kind}-over-bare-matmuls", row.get("ratio"), GOALS[kind], ".3f")
            target(f"kernel-{kind}-extra-mib", row.get("mib"), EXTRA_MIB, ".0f")
            continue
        target("kernel-loss-ms", row.get("ms"), LOSS_MS)
        # At this shape the loss runs in several chunks, whose weight gradients are summed in fp32.
        _, D, V = TARGET
        rest = row["mib"] - 4 * V * D / MIB if row else None
        target("kernel-loss-extra-mib-without-fp32-sum-of-dw", rest, EXTRA_MIB, ".0f")
        if row:
            print(f"chunked_loss takes {row['ratio']:.3f} times three bare matmuls")
            print(f"chunked_loss holds {row['mib']:.0f} MiB, {4 * V * D / MIB:.0f} of them its fp32 sum of dW")


def targets_narrow(rows: list[dict]) -> None:
    """Print the targets at NARROW: ours is not slower than contenders with equal results."""
    for (kind, gives), ratio in worst_ratios(rows).items():
        target(f"kernel-narrow-{kind}-{gives}-worst-ratio", ratio, 1.0)


def targets_cpu(rows: list[dict]) -> None:
    """Print the targets: ours is not slower than contenders with equal results, and memory does not grow with V."""
    for (kind, gives), ratio in worst_ratios(rows).items():
        target(f"kernel-cpu-{kind}-{gives}-worst-ratio", ratio, 1.0)
    held: dict[tuple, dict[int, float]] = {}
    for row in rows:
        if row["who"].startswith("spmdrl") and "ms" in row:
            held.setdefault((row["who"], row["kind"], *row["shape"][:2]), {})[row["shape"][2]] = row["mib"]
    for (who, kind, T, D), by_vocab in held.items():
        (least, low), (most, high) = min(by_vocab.items()), max(by_vocab.items())
        if least == most:
            continue
        if kind == "loss":
            grows = f"{low:.0f} MiB at V={least}, {high:.0f} at {most}"
            print(f"memory of {who}, T={T} D={D}: {grows}: whole rows of logits")
        else:
            name = f"kernel-cpu-{kind}{'-logp' if 'logp only' in who else ''}-memory-over-v"
            target(name, high / low, FLAT)


def main() -> None:
    args = options(__doc__, "TDV")
    device, dtype = args.device, torch.bfloat16 if args.device == "cuda" else torch.float32
    facts = facts_of(device, dtype, args.json)
    facts["errors"] = precision("triton" if device == "cuda" else "torch", device)
    field, absent = contenders(device, args.quick)
    wrong = {c.name: problem for c in field if (problem := check(c, device, dtype))}
    facts["left_out"] = absent | wrong
    for name, problem in facts["left_out"].items():
        print(f"left out: {name}: {problem}", flush=True)
    field = [c for c in field if c.name not in wrong]
    rows = []
    shapes = args.shapes or SHAPES[device + (" quick" if args.quick else "")]
    jobs = partial(jobs_of, field=field)
    for shape, part in each_shape(shapes, args, args.json, facts, jobs, bare_matmul, dtype):
        rows += part
        show(part, "TDV")
        if device == "cuda" and shape in (TARGET, NARROW):
            (targets_gpu if shape == TARGET else targets_narrow)(part)
    if device == "cpu":
        targets_cpu(rows)
    plot(rows, args.plot)


if __name__ == "__main__":
    main()
