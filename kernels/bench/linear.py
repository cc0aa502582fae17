"""logp and entropy from hidden states: results checked first, then time and peak memory, of ours and of others.

    python kernels/bench/linear.py [--quick] [--json FILE] [--plot FILE] [--shapes T,D,V ...] [--seconds S]

On a GPU bfloat16, T in {1k, 8k, 32k}, D in {2048, 4096, 8192}, V in {32k, 128256, 151936} (--quick: T=8192, D=4096,
V=151936), timed by events. On a CPU float32, small sizes, one thread, timed by the CPU seconds of the process, so that
a machine that does other things too gives the same figures.

All take turns over rotating inputs; medians. Time is given next to that of the bare matmuls it needs at best: 1 for the
forward, 4 for forward and backward with recomputation, 3 for a loss inside the chunk (the "roofline"). A contender
whose result is off by more than its dtype explains is named and not timed. Memory is the peak above inputs and the
gradients that are returned: of the allocator on a GPU, of the resident process (a forked one) on a CPU.
LIGER_KERNEL_IMPL=cutedsl times Liger's SM90 kernels in the place of its Triton ones.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from _contenders import Contender, contenders, plain  # noqa: E402

SHAPES = {
    "cuda": list(itertools.product((1024, 8192, 32768), (2048, 4096, 8192), (32768, 128256, 151936))),
    "cuda quick": [(8192, 4096, 151936)],
    "cpu": [(512, 256, 32768), (256, 64, 32768), (256, 64, 151936), (256, 512, 151936)],
    "cpu quick": [(256, 64, 32768), (256, 64, 151936)],
}
LIMITS = {torch.float32: 2e-4, torch.bfloat16: 2e-2}
MIB = 2**20
GOALS = {  # ms at T=8192, D=4096, V=151936 on an H200, see TARGETS
    "forward": 14.5,
    "backward": 58.0,
    "loss": 45.0,
}


def make(shape, device, dtype, seed):
    T, D, V = shape
    torch.manual_seed(seed)
    h = torch.randn(T, D, device=device).to(dtype).requires_grad_()
    w = torch.randn(V, D, device=device).div_(D**0.5).to(dtype).requires_grad_()
    return h, w, torch.randint(V, (T,), device=device), torch.randn(2, T, device=device)


def work(contender: Contender, kind: str, inputs):
    """One forward, or forward and backward with upstream gradients that differ by token."""
    h, w, t, (g, e) = inputs
    if kind == "forward":
        with torch.no_grad():
            return contender.call(h, w, t)
    result = contender.call(h, w, t)
    if contender.gives == "loss":
        return result, torch.autograd.grad(result, (h, w))
    logp, entropy = result
    pairs = [(logp, g)] + ([(entropy, e)] if contender.gives == "both" else [])
    outputs, upstream = zip(*((x, y.to(x.dtype)) for x, y in pairs), strict=True)
    return result, torch.autograd.grad(outputs, (h, w), upstream)


def check(contender: Contender, device, dtype) -> str:
    """Empty if its results and gradients are those of fp64 on a small shape; else what is wrong."""
    inputs = make((48, 128, 1111), device, dtype, 7)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs[:2])
    try:
        got, got_grads = work(contender, "backward", inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:160]
    logp, entropy = plain(*wide, inputs[2])
    (g, e) = inputs[3].double()
    if contender.gives == "loss":
        want, objective = [-logp.mean()], -logp.mean()
        got = [got]
    else:
        want = [logp, entropy] if contender.gives == "both" else [logp]
        objective = (g * logp).sum() + ((e * entropy).sum() if contender.gives == "both" else 0)
    want += torch.autograd.grad(objective, wide)
    for name, a, b in zip(
        ["logp", "entropy"][: len(want) - 2] + ["dhidden", "dweight"],
        [*got[: len(want) - 2], *got_grads],
        want,
        strict=True,
    ):
        off = ((a.double() - b).norm() / b.norm()).item()
        if not off <= LIMITS[dtype]:
            return f"{name} is off by {off:.1e}"
    return ""


def clock(device, function) -> float:
    """Milliseconds of one call."""
    if device == "cpu":
        began = time.process_time()
        function()
        return 1e3 * (time.process_time() - began)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def peak_mib(device, function) -> float:
    """Peak of what one call holds beyond what stood before, what it returns included."""
    if device == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    import resource

    read, write = os.pipe()
    if not os.fork():  # a child's peak starts where its parent stands
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        function()
        os.write(write, str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.wait()
    return float(text) if text else float("nan")


def bare_matmuls(shape, device, dtype) -> float:
    """Milliseconds of hidden @ weight.T alone, logits in pieces that fit."""
    h, w, *_ = make(shape, device, dtype, 0)
    h, w = h.detach(), w.detach()
    columns = max(256, (2**20 if device == "cpu" else 2**28) // shape[0])
    pieces = w.split(columns)
    out = torch.empty(shape[0] * columns, device=device, dtype=dtype)

    def run():
        for piece in pieces:
            torch.mm(h, piece.t(), out=out[: shape[0] * len(piece)].view(shape[0], len(piece)))

    run()
    return statistics.median(clock(device, run) for _ in range(5))


def measure(shape, device, dtype, field, seconds) -> list[dict]:
    sets = [make(shape, device, dtype, seed) for seed in range(2 if device == "cpu" else 3)]
    matmul = bare_matmuls(shape, device, dtype)
    jobs = [
        (c, kind) for c in field for kind in ("forward", "backward") if not (c.gives == "loss" and kind == "forward")
    ]
    rows, alive = {}, []
    for c, kind in jobs:
        name = "loss" if c.gives == "loss" else kind
        row = rows[c.name, kind] = {"who": c.name, "kind": name, "gives": c.gives, "shape": shape, "times": []}
        try:
            work(c, kind, sets[0])
            work(c, kind, sets[1])
            returned = 0 if kind == "forward" else sum(x.numel() * x.element_size() for x in sets[0][:2]) / MIB
            row["mib"] = peak_mib(device, lambda c=c, kind=kind: work(c, kind, sets[0])) - returned
            alive.append((c, kind))
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:160]
    end = time.monotonic() + seconds
    for i in itertools.count():
        for c, kind in alive:
            row = rows[c.name, kind]
            row["times"].append(clock(device, lambda c=c, kind=kind, i=i: work(c, kind, sets[i % len(sets)])))
        if i >= 2 and time.monotonic() > end:
            break
    for row in rows.values():
        times = row.pop("times")
        if times:
            least = {"forward": 1, "backward": 4, "loss": 3}[row["kind"]]
            row |= {"ms": statistics.median(times), "rounds": len(times), "matmul_ms": matmul}
            row["roofline"] = least * matmul / row["ms"]
    return list(rows.values())


def show(rows: list[dict]) -> None:
    print(f"{'T':>6} {'D':>5} {'V':>7}  {'what':9} {'who':32} {'gives':6} {'ms':>9} {'% roofline':>10} {'MiB':>7}")
    for row in rows:
        T, D, V = row["shape"]
        head = f"{T:>6} {D:>5} {V:>7}  {row['kind']:9} {row['who']:32} {row['gives']:6}"
        if "error" in row:
            print(head, row["error"])
        else:
            print(head, f"{row['ms']:>9.2f} {100 * row['roofline']:>10.0f} {row['mib']:>7.0f}")


def targets(rows: list[dict], device: str) -> None:
    """Against the fixed goals on a GPU; on a CPU, ours not slower than any that gives as much, and memory flat in V."""
    find = {(r["who"], r["kind"], tuple(r["shape"])): r for r in rows if "ms" in r}
    if device == "cuda":
        for (who, kind, shape), row in find.items():
            if shape == (8192, 4096, 151936) and who.startswith("spmdrl (triton)") and row["gives"] != "logp":
                met = "ok" if row["ms"] <= GOALS[kind] else "miss"
                print(f"target kernel-{kind}-ms {row['ms']:.2f} {GOALS[kind]} {met}")
        return
    ratios, growth = {}, {}
    for (who, kind, shape), row in find.items():
        if who.startswith("spmdrl"):
            others = [
                r["ms"]
                for (w, k, s), r in find.items()
                if (k, s, r["gives"]) == (kind, shape, row["gives"]) and not w.startswith("spmdrl")
            ]
            ratios.setdefault(f"{kind}-{row['gives']}", []).extend(row["ms"] / x for x in others)
            growth.setdefault((who, kind, shape[:2]), []).append(row["mib"])
    for name, values in ratios.items():
        if values:
            print(f"target kernel-cpu-{name}-worst-ratio {max(values):.2f} 1.0 {'ok' if max(values) <= 1 else 'miss'}")
    for (who, kind, _), values in growth.items():
        if len(values) > 1:
            print(f"memory over V, {who}, {kind}: {', '.join(f'{v:.0f}' for v in values)} MiB")


def plot(rows: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = ("forward", "backward", "loss")
    figure, axes = plt.subplots(2, 3, figsize=(16, 9))
    for column, kind in enumerate(kinds):
        for axis, key, label in ((axes[0][column], "ms", "ms"), (axes[1][column], "mib", "peak MiB")):
            chosen = [r for r in rows if r["kind"] == kind and "ms" in r]
            shapes = sorted({tuple(r["shape"]) for r in chosen})
            for who in dict.fromkeys(r["who"] for r in chosen):
                values = {tuple(r["shape"]): r[key] for r in chosen if r["who"] == who}
                axis.plot([str(s) for s in shapes], [values.get(s) for s in shapes], "o-", label=who)
            axis.set(title=f"{kind}: {label}", yscale="log")
            axis.tick_params(axis="x", rotation=20, labelsize=7)
            axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def versions() -> dict[str, str]:
    out = {}
    for name in ("torch", "triton", "liger-kernel", "cut-cross-entropy", "quack-kernels", "verl"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "absent"
    return out


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) used"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--shapes", nargs="+", help="T,D,V each")
    parser.add_argument("--seconds", type=float, help="of timing, a shape")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shapes = [tuple(map(int, s.split(","))) for s in args.shapes or []] or SHAPES[
        device + (" quick" if args.quick else "")
    ]
    seconds = args.seconds or (5 if args.quick or device == "cuda" else 12)
    facts = {"machine": machine(device), "dtype": str(dtype), "date": datetime.now(UTC).date().isoformat()}
    facts |= {"versions": versions(), "clock": "events" if device == "cuda" else "CPU seconds of the process"}
    print(facts)
    field, absent = contenders(device)
    wrong = {c.name: problem for c in field if (problem := check(c, device, dtype))}
    for name, problem in (absent | wrong).items():
        print(f"left out: {name}: {problem}")
    field = [c for c in field if c.name not in wrong]
    rows = []
    for shape in shapes:
        rows += measure(shape, device, dtype, field, seconds)
        show(rows[-2 * len(field) :] if len(shapes) == 1 else [r for r in rows if tuple(r["shape"]) == shape])
    targets(rows, device)
    if args.json:
        Path(args.json).write_text(json.dumps(facts | {"left_out": absent | wrong, "rows": rows}, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
