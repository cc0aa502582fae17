"""benchmarks/kernels: cases that are not timed, results that are called a miss, and files that a stop leaves."""

import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spmdrl_kernels import linear_logprob, token_logprob

ROOT = Path(__file__).resolve().parents[2]
BARE = partial(sum, range(10**4))


@pytest.fixture
def bench(monkeypatch):
    """Imports the modules of benchmarks/kernels, which are scripts beside each other and no package."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "kernels"), *sys.path])
    names = ("_measure", "_contenders", "_check", "linear", "given")
    yield SimpleNamespace(**{name.strip("_"): importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]


def job(bench, run, who="spmdrl (torch)", **options):
    return bench.measure.Job({"who": who, "kind": "forward", "gives": "both", "shape": (1,)}, run, 1, **options)


def test_kernel_bench_check_passes_ours_and_names_what_is_broken(bench):
    C, plain = bench.contenders.Contender, bench.contenders.plain

    def mixed(h, w, t):
        """Combines a gradient of rounded logits with the logsumexp of exact ones: wrong for certain tokens alone."""
        exact, rounded = (h.float() @ w.float().t()).detach(), (h @ w.t()).float()
        lse = torch.logsumexp(exact, -1, keepdim=True)
        p = (rounded - lse).exp().detach()
        way = rounded.gather(1, t[:, None])[:, 0] - (p * rounded).sum(-1)
        return (exact - lse).gather(1, t[:, None])[:, 0] + way - way.detach(), None

    ours = C("ours", "both", bench.contenders.ours("torch"), 4, certain=2e-2)
    loss = C("loss", "loss", bench.contenders.ours_loss("torch"), 3)
    half = C("half", "both", lambda h, w, t: plain(h, w.detach() / 2 + w / 2, t), 4)
    for dtype in (torch.float32, torch.bfloat16):
        assert bench.check.check(ours, "cpu", dtype) == ""
        assert bench.check.check(loss, "cpu", dtype) == ""
        assert "dweight is off by 5.0e-01 for random" in bench.check.check(half, "cpu", dtype)
    bad = C("mixed", "logp", mixed, 4, certain=2e-2)
    off = bench.check.errors(bad, "cpu", torch.bfloat16, "random")
    assert off["dhidden"] < 2e-2 and off["dweight"] < 2e-2
    off = bench.check.errors(bad, "cpu", torch.bfloat16, "certain")
    assert off["dhidden"] > 0.1 and "for certain tokens" in bench.check.check(bad, "cpu", torch.bfloat16)
    nan = C("nan", "both", lambda h, w, t: tuple(x * torch.nan for x in plain(h, w, t)), 4)
    assert "logp is off by nan" in bench.check.check(nan, "cpu", torch.float32)


def test_kernel_bench_certain_tokens_are_certain(bench):
    for dtype in (torch.float32, torch.bfloat16):
        h, w, t, _ = bench.check.make(bench.check.SHAPE, "cpu", dtype, 7, "certain")
        logits = h.double() @ w.double().t()
        given = bench.given.make((48, 1112), "cpu", dtype, 7, "certain")
        for values, at in ((logits, t), (given[0].double(), given[1])):
            target, p = (x.gather(1, at[:, None]) for x in (values, values.softmax(-1)))
            assert p.min() > 0.99 and p.max() < 0.9995 and target.min() > 28 and target.max() < 32


def test_kernel_bench_given_checks_in_place_gradients(bench):
    C = bench.contenders.Contender
    ours, torches = bench.given.contenders("cpu")
    wrong = C("wrong", "both", lambda x, t: bench.given.plain(x / 2 + x.detach() / 2, t), 0)
    for dtype in (torch.float32, torch.bfloat16):
        assert bench.given.check(ours, "cpu", dtype) == bench.given.check(torches, "cpu", dtype) == ""
        assert "dlogits is off by 5.0e-01" in bench.given.check(wrong, "cpu", dtype)


@pytest.mark.slow
def test_kernel_bench_given_fills_the_logits_again(bench):
    seen = []

    def watch(logits, t):
        seen.append(logits.detach().clone())
        return bench.given.ours("torch")(logits, t)

    field = [bench.contenders.Contender("spmdrl", "both", watch, 0)]
    rows = bench.measure.measure(bench.given.jobs_of((4, 50), "cpu", torch.float32, field), "cpu", 0, BARE)
    assert [row["kind"] for row in rows] == ["forward", "backward"] and all("ms" in row for row in rows)
    want = [bench.given.make((4, 50), "cpu", torch.float32, seed)[0] for seed in (0, 1)]
    assert len(seen) == 12 and all(any(torch.equal(x, w) for w in want) for x in seen)


@pytest.mark.slow
def test_kernel_bench_compiles_every_shape_and_never_times_what_is_not_compiled(bench):
    limit = torch._dynamo.config.recompile_limit
    body = bench.contenders.compiled(bench.contenders.plain, backend="eager")
    inputs = [torch.randn(3, 4), None, torch.zeros(3, dtype=torch.int64)]

    def run(vocab):
        body(inputs[0], torch.ones(vocab, 4), inputs[2])

    for vocab in range(5, 5 + 2 * limit):
        (row,) = bench.measure.measure([job(bench, lambda i, v=vocab: run(v))], "cpu", 0, BARE)
        assert "ms" in row and "error" not in row, row.get("error")
    torch.compiler.reset()
    count = iter(range(5, 1000))
    (row,) = bench.measure.measure([job(bench, lambda i: run(next(count)))], "cpu", 60, BARE)
    assert "RecompileLimit" in row["error"] and "ms" not in row
    torch.compiler.reset()


@pytest.mark.slow
def test_kernel_bench_what_raises_is_a_row_with_an_error(bench):
    calls = []

    def late(i):
        calls.append(i)
        if len(calls) > 4:
            raise MemoryError("full")

    def early(i):
        raise ValueError("no kernel")

    before = os.getpid()
    rows = bench.measure.measure([job(bench, late), job(bench, early), job(bench, lambda i: None)], "cpu", 0, BARE)
    assert os.getpid() == before and len(calls) == 5
    assert rows[0]["error"] == "MemoryError: full" and rows[1]["error"] == "ValueError: no kernel"
    assert "ms" not in rows[0] and "ms" not in rows[1] and "ms" in rows[2]


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux tells the peak of one call")
def test_kernel_bench_peak_is_that_of_the_call(bench):
    def hold(mib):
        torch.ones(mib * 2**18)

    hold(200)
    for mib in (100, 20, 100):
        assert abs(bench.measure.peak_mib("cpu", lambda mib=mib: hold(mib)) - mib) < 3
    with pytest.raises(RuntimeError, match="inside"):
        bench.measure.peak_mib("cpu", lambda: (_ for _ in ()).throw(RuntimeError("inside")))


def test_kernel_bench_bare_work_and_jobs_take_turns(bench, monkeypatch):
    """Medians and ranges are over the rounds, and a ratio is that of one round; rows are kept after each of them."""
    clock, kept, turns = iter(range(1, 1000)), [], []
    monkeypatch.setattr(bench.measure, "clock", lambda device, call: (call(), 4.0 * next(clock))[1])
    monkeypatch.setattr(bench.measure, "peak_mib", lambda device, call: 0.0)
    monkeypatch.setattr(bench.measure, "clock_reader", lambda device: lambda: (1980, 2619))

    def work(name):
        return lambda *i: turns.append(name)

    def keep(rows):
        kept.append([row.get("rounds", 0) for row in rows])

    jobs = [job(bench, work(name), who=name) for name in "ab"]
    rows = bench.measure.measure(jobs, "cpu", 60, work("bare"), keep)
    assert turns[-45:] == ["bare", "a", "b"] * 15 and kept[2:] == [[n, n] for n in range(1, 16)]
    for n, row in enumerate(rows):
        bare = [12.0 * i + 4 for i in range(15)]
        ratios = [(x + 4 * (n + 1)) / x for x in bare]
        assert row["bare_ms"] == bare[7] and row["bare_ms_range"] == [bare[0], bare[-1]]
        assert row["ms"] == bare[7] + 4 * (n + 1) and row["ratio"] == sorted(ratios)[7]
        assert row["ratio_range"] == [min(ratios), max(ratios)]
        assert row["clocks"]["before"] == {"sm_mhz": [1980] * 15, "memory_mhz": [2619] * 15} == row["clocks"]["after"]


def rows_of(bench, **changes):
    V, D = 151936, 4096
    base = {
        "forward": ("spmdrl (triton)", "both", 1.05, 14.7, 500.0),
        "backward": ("spmdrl (triton)", "both", 1.03, 57.7, 600.0),
        "loss": ("spmdrl (triton), loss in chunks", "loss", 1.1, 47.0, 600 + 4 * V * D / 2**20),
    } | changes
    rows = [
        {"who": who, "kind": kind, "gives": gives, "shape": (8192, D, V), "ratio": ratio, "ms": ms, "mib": mib}
        for kind, (who, gives, ratio, ms, mib) in base.items()
    ]
    return rows


def test_kernel_bench_targets_on_a_gpu(bench, capsys):
    bench.linear.targets_gpu(rows_of(bench))
    good = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("target ")]
    assert len(good) == 6 and all(line[-1] == "ok" for line in good)
    assert good[0][1:3] == ["kernel-forward-over-bare-matmuls", "1.050"]
    assert good[-1][1:4] == ["kernel-loss-extra-mib-without-fp32-sum-of-dw", "600", "614"]
    slow = rows_of(bench, forward=("spmdrl (triton)", "both", 1.07, 14.0, 615.0), loss=("verl", "loss", 1.0, 1.0, 1.0))
    bench.linear.targets_gpu(slow)
    bad = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("target ")]
    assert [line[-1] for line in bad] == ["miss", "miss", "ok", "ok", "miss", "miss"] and bad[-1][2] == "none"
    row = {"who": "spmdrl (triton)", "kind": "forward", "gives": "both", "shape": (8192, 151936)}
    for ratio, met in ((1.14, "1.140 1.15 ok"), (1.16, "1.160 1.15 miss"), (float("nan"), "nan 1.15 miss")):
        bench.given.targets([row | {"ratio": ratio}], "cuda")
        assert capsys.readouterr().out == f"target kernel-given-forward-over-reading {met}\n"
    others = [row | {"who": who, "ms": ms} for who, ms in (("spmdrl (triton)", 3.0), ("torch", 2.0))]
    bench.linear.targets_narrow(others)
    assert capsys.readouterr().out == "target kernel-narrow-forward-both-worst-ratio 1.50 1 miss\n"


def test_kernel_bench_targets_on_a_cpu(bench, capsys):
    def row(who, kind, V, ms, mib):
        return {"who": who, "kind": kind, "gives": "both", "shape": (256, 64, V), "ms": ms, "mib": mib}

    rows = [row(who, "forward", V, ms, mib) for V, ms, mib in ((32768, 1.0, 4.0), (151936, 5.0, 5.2)) for who in "ts"]
    for r in rows:
        r["who"], r["ms"] = {"t": ("torch", 4.0), "s": ("spmdrl (torch)", r["ms"])}[r["who"]]
    bench.linear.targets_cpu(rows)
    assert capsys.readouterr().out.splitlines() == [
        "target kernel-cpu-forward-both-worst-ratio 1.25 1 miss",
        "target kernel-cpu-forward-memory-over-v 1.30 1.25 miss",
    ]
    bench.linear.targets_cpu([row("spmdrl (torch), loss in chunks", "loss", V, 1.0, V / 1e3) for V in (32768, 151936)])
    out = capsys.readouterr().out
    assert "target" not in out and "33 MiB at V=32768, 152 at 151936" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "given"])
def test_kernel_bench_leaves_the_rounds_it_has_done(bench, name, monkeypatch, tmp_path):
    module = getattr(bench, name)
    shapes = {"linear": ["8,16,64", "8,16,72"], "given": ["8,64", "8,72"]}[name]
    real, calls = bench.measure.measure, []

    def stops(jobs, device, seconds, bare, keep):
        calls.append(len(jobs))

        def kept(rows):
            keep(rows)
            if len(calls) == 2 and "ms" in rows[-1]:
                raise KeyboardInterrupt

        return real(jobs, device, seconds, bare, kept)

    monkeypatch.setattr(bench.measure, "measure", stops)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    path = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [name, "--seconds", "0.01", "--json", str(path), "--shapes", *shapes])
    with pytest.raises(KeyboardInterrupt):
        module.main()
    got = json.loads(path.read_text())
    rounds = {",".join(map(str, row["shape"])): row["rounds"] for row in got["rows"]}
    assert list(rounds) == shapes and rounds[shapes[0]] >= 3 and rounds[shapes[1]] == 1
    assert got["about"]["versions"]["torch"] and "left_out" in got["about"] and os.listdir(tmp_path) == ["out.json"]


def test_kernel_forward_of_given_logits_is_two_launches(bench):
    """Torch is asked for nothing but memory beside them. Each further block of products adds one launch."""
    pytest.importorskip("triton")
    launches_of = importlib.import_module("_launches")
    operations: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view and "empty" not in str(func) and "detach" not in str(func):
                operations.append(str(func))
            return func(*args, **(kwargs or {}))

    hidden, weight, targets = (launches_of.make(*shape, dtype=torch.bfloat16) for shape in ((8, 4), (900, 4), (8,)))
    targets = targets.detach().long()
    with torch.no_grad(), launches_of.recording(True) as launches, Watch():
        token_logprob(launches_of.make(8, 900, dtype=torch.bfloat16), targets, backend="triton")
        assert [launch.kernel for launch in launches] == ["stats", "results"]
        linear_logprob(hidden, weight, targets, backend="triton", chunk_vocab=300)
        assert [launch.kernel for launch in launches[2:]] == ["stats"] * 3 + ["results"]
    assert operations == []
    del sys.modules["_launches"]


def test_kernel_bench_gpu_script_asks_for_plots():
    command = [str(ROOT / "benchmarks" / "gpu.sh"), "--dry-run", "--only", "kernels", "--results", "there"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = {line.split(":")[0]: line for line in out.splitlines() if not line.startswith(" ")}
    for name in ("kernels_linear", "kernels_given"):
        assert f"--json there/{name}_gpu.json" in lines[name] and f"--plot there/{name}_gpu.png" in lines[name]
    assert "--plot" not in lines["kernels_step_memory"]
