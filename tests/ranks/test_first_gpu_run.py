"""benchmarks/first_gpu_run.py: its stages in small on a CPU, with the real engines; its order, limits and report.

No GPU is here. The machines with GPUs are made-up facts, and stages on them small programs.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import _gpu_facts, first_gpu_run
from benchmarks._gpu_judge import judge
from benchmarks._gpu_stages import FACTS, ROOT, STAGES, TOTAL, Command, Form, Stage, Training, chosen, example
from tests.builds import no_sglang, no_vllm

NAMES = {stage.name: stage for stage in STAGES}
KEPT = ("HF_HUB_OFFLINE", "PYTHONPATH", "TOKENIZERS_PARALLELISM", "PYTHONUNBUFFERED", "SPMDRL_TESTS_GIVEN")
"""Variables that the program sets, or takes away, for everything that it starts."""
GPU = {"name": "H200", "capability": "9.0", "gib": 139.0}


def form(folder: Path, **values) -> Form:
    modules = set(_gpu_facts.modules())
    modules -= {name for name, why in (("vllm", no_vllm()), ("sglang", no_sglang())) if why}
    return replace(Form(True, 0, tuple(modules), sys.executable, folder, folder), **values)


# ── every stage, in small ────────────────────────────────────────────────────


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [stage.name for stage in STAGES if not stage.tested])
def test_stage_in_small(name, tmp_path):
    """The runs and the judgement are the same as on GPUs."""
    result = first_gpu_run.run_stage(NAMES[name], form(tmp_path), 280)
    if result.status == "skipped":
        pytest.skip(result.reason)
    assert result.status == "ok", result.reason + "\n" + "\n".join(result.tail)
    trainings = [part for part in NAMES[name].runs if isinstance(part, Training)]
    assert set(result.figures) == {part.name for part in trainings}
    for figures in result.figures.values():
        assert figures["logp_diff/mean after the second wake"] < 1e-5 and figures["grad_norm"] > 0, figures


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage.tested], ids=lambda stage: stage.name)
def test_other_stages_are_run_by_the_test_that_they_name(stage):
    file, name = stage.tested.split("::")
    text, function = (ROOT / file).read_text(), name.split("[")[0]
    assert function in {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    part, small = stage.runs[0], " ".join(stage.runs[0].words(stage.name, form(Path("work"))))
    if isinstance(part, Training):
        from tests.engines.test_vllm_tp import LAYOUTS, STAGE_OF

        layout = name.split("[")[1].rstrip("]")
        assert STAGE_OF[layout] == stage.name and f"--rollout.tp {LAYOUTS[layout][1]}" in part.flags + " --rollout.tp 2"
        assert part.split is ("--parallel.placement split" in LAYOUTS[layout][2])
    elif stage.benchmark:
        script = part.full.split()[0]
        folder, stem = str(Path(script).parent), Path(script).stem
        assert f"import {stem} as bench" in text or script in text or (folder == "kernels/bench" and stem in text)
    else:
        assert any(place in small for place in (file, "kernels/tests")) and (file in small or "kernels/tests" in text)
    for other in part.words(stage.name, example(Path("work"), Path("results")))[1:]:
        if other.endswith(".py"):
            assert (ROOT / other).is_file(), other


# ── what the stages are ──────────────────────────────────────────────────────


def test_limits_add_up_to_half_an_hour():
    assert FACTS + sum(stage.limit for stage in STAGES) <= TOTAL == 30 * 60
    assert len(NAMES) == len(STAGES)
    benchmarks = [stage.benchmark for stage in STAGES]
    assert benchmarks == sorted(benchmarks), "benchmarks come last and share what time is left"
    spare = 100.0
    shares = [first_gpu_run.share(STAGES, i, spare) for i in range(len(STAGES))]
    assert sum(shares[: benchmarks.index(True)]) == sum(s.limit for s in STAGES if not s.benchmark)
    first = benchmarks.index(True)
    assert shares[first] == STAGES[first].limit + spare / sum(benchmarks) and shares[-1] == STAGES[-1].limit + spare


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)])
def test_ranks_of_a_machine(gpus, ranks, tmp_path):
    here = form(tmp_path, small=False, gpus=gpus)
    assert here.ranks == ranks
    split = NAMES["ranks_split"].runs[0]
    words = split.words("ranks_split", here)
    if gpus > 1:
        assert words[words.index("--nproc-per-node") + 1] == str(ranks)
        assert words[words.index("--parallel.rollout-ranks") + 1] == str(ranks // 2)
        assert split.samplers(here) == list(range(ranks // 2, ranks))


def test_one_gpu_without_engines_runs_what_it_can_and_says_why_not(tmp_path):
    lent = form(tmp_path, small=False, gpus=1, modules=("pytest",))
    why = {stage.name: stage.lacks(lent, 139.0) for stage in STAGES}
    able = {name for name, reason in why.items() if not reason}
    assert able == {"devices", "kernel_tests", "program_tests"} | {s.name for s in STAGES if s.benchmark}
    assert why["vllm_sleep"] == "vllm is not installed for this device" and "megatron" in why["megatron"]
    whole = replace(lent, modules=example(tmp_path, tmp_path).modules)
    assert NAMES["ranks_tp1"].lacks(whole, 139.0) == "needs 2 GPUs, the machine has 1"
    eight = replace(whole, gpus=8)
    assert not any(stage.lacks(eight, 139.0) for stage in STAGES)
    assert NAMES["qwen3_30b"].lacks(eight, 40.0) == "needs GPUs of 75 GiB, the smallest here has 40"
    assert "QWEN3_30B=FOLDER" in NAMES["qwen3_30b"].lacks(replace(eight, large_model=""), 139.0)


def test_dry_run_and_names(capsys):
    assert first_gpu_run.main(["--dry-run"]) == 0
    out = capsys.readouterr().out
    for stage in STAGES:
        assert f"\n{stage.name}: " in "\n" + out and stage.proves in out
    assert [s.group for s in chosen("ranks,devices")] == ["", *["ranks"] * 4]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--limit -1", "--limit -1: seconds above 5, which a stage is given to end in"),
        ("--limit 5", "--limit 5: seconds above 5"),
        ("--limit nan --dry-run", "--limit nan: seconds above 5"),
        ("--limit inf", "--limit inf: seconds above 5"),
        ("--results /proc/x", "--results /proc/x: nothing can be written there: "),
        ("--results README.md", "--results README.md: nothing can be written there: File exists"),
        ("--only nothing", "the stages are devices, kernel_tests"),
    ],
)
def test_bad_options_end_before_the_machine_is_looked_at(words, told, monkeypatch, capsys):
    monkeypatch.setattr(first_gpu_run, "look", lambda python, work: pytest.fail("it went on"))
    monkeypatch.chdir(ROOT)
    for more in ([], ["--small"]):
        with pytest.raises(SystemExit) as end:
            first_gpu_run.main([*words.split(), *more])
        assert end.value.code == 2 and told in capsys.readouterr().err


def test_report_of_the_small_form_goes_where_git_does_not_look(monkeypatch, tmp_path):
    """The recorded figures of a CPU stay as they are."""
    recorded = {p: p.stat().st_mtime_ns for p in (ROOT / "benchmarks" / "results").iterdir()}
    shutil.copy(ROOT / ".gitignore", tmp_path)
    works = Stage("works", "something", 30, (Command('-c \'open("{json}", "w")\''),), benchmark=True)
    nothing = {"host": "h", "cpu": "c", "gpus": [], "versions": {}, "modules": [], "topology": "", "large_model": ""}
    monkeypatch.setattr(first_gpu_run, "chosen", lambda names: [works])
    monkeypatch.setattr(first_gpu_run, "look", lambda python, work: nothing)
    monkeypatch.setattr(first_gpu_run, "ROOT", tmp_path)
    for name in (*KEPT, "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    assert first_gpu_run.main(["--small"]) == 0
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    seen = subprocess.run(["git", "-C", str(tmp_path), "status", "--porcelain"], capture_output=True, text=True).stdout
    assert seen == "?? .gitignore\n"
    names = {path.name for path in tmp_path.rglob("*_cpu.*")}
    assert names == {"first_run_cpu.md", "first_run_cpu.json", "works_cpu.json"}
    assert recorded == {p: p.stat().st_mtime_ns for p in (ROOT / "benchmarks" / "results").iterdir()}


# ── stages that fail, hang, or cannot run; the report ────────────────────────

HANGS = """
import os, signal, subprocess, sys, time
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
    print("target before_the_end 1 1 ok", child.pid, flush=True)
signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(100)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_report_of_stages_that_fail_hang_and_cannot_run(tmp_path, monkeypatch, capsys):
    hangs = tmp_path / "hangs.py"
    hangs.write_text(HANGS)
    facts = {"host": "h", "cpu": "c", "gpus": [GPU], "versions": {"torch": "2"}, "modules": [], "topology": "GPU0 X"}
    stages = [
        Stage("fails", "nothing", 30, (Command("-c 'print(\"why it | failed\"); raise SystemExit(3)'"),)),
        Stage("hangs", "nothing", 7, (Command(str(hangs)), Command("-c 'print(\"too late\")'"))),
        Stage("many", "nothing", 5, (), gpus=2),
        Stage("lacks", "nothing", 5, (), modules=("vllm",)),
        Stage("trains", "nothing", 30, (Training("run", "hf"),)),
        Stage("works", "something", 30, (Command("-c 'print(\"target speed 2 1 ok\")'"),), benchmark=True),
    ]
    # A run of the program that leaves no metrics.
    monkeypatch.setattr(Training, "words", lambda part, stage, form: [sys.executable, "-c", "pass"])
    monkeypatch.setattr(first_gpu_run, "chosen", lambda names: stages)
    monkeypatch.setattr(first_gpu_run, "look", lambda python, work: facts | {"large_model": ""})
    monkeypatch.setattr(first_gpu_run, "GRACE", 1.0)
    for name in KEPT:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    began = time.monotonic()
    assert first_gpu_run.main(["--results", str(tmp_path / "out")]) == 1
    assert time.monotonic() - began < 60
    told = json.loads((tmp_path / "out" / "first_run_gpu.json").read_text())
    got = {stage["name"]: stage for stage in told["stages"]}
    assert {name: stage["status"] for name, stage in got.items()} == {
        "fails": "failed",
        "hangs": "failed",
        "many": "skipped",
        "lacks": "skipped",
        "trains": "failed",
        "works": "ok",
    }
    assert got["fails"]["reason"] == "fails: exit code 3" and got["fails"]["tail"][-1] == "why it | failed"
    assert got["hangs"]["reason"] == "hangs: stopped after 7 s" and len(got["hangs"]["commands"]) == 1
    assert got["many"]["reason"] == "needs 2 GPUs, the machine has 1"
    assert got["trains"]["reason"] == "run: metrics.jsonl has steps [], not 1 to 4"
    assert got["works"]["targets"] == ["target speed 2 1 ok"]
    assert got["works"]["limit"] > 100, "a benchmark has what the others left over"
    child = int(got["hangs"]["targets"][0].split()[-1])
    assert not alive(child), "a process in a session of its own, which ignores SIGINT"
    report = (tmp_path / "out" / "first_run_gpu.md").read_text()
    assert "1 ok, 3 failed, 2 skipped" in report and "H200 (139.0 GiB, 9.0)" in report and "GPU0 X" in report
    assert "| hangs | failed | " in report and "why it | failed" in report
    assert (tmp_path / "out" / "fails_gpu.log").is_file() and "works: ok" in capsys.readouterr().out


def test_without_a_gpu_it_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr(first_gpu_run, "look", lambda python, work: {"gpus": [], "modules": [], "large_model": ""})
    for name in KEPT:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    assert first_gpu_run.main([]) == 2
    told = capsys.readouterr().err
    assert "torch sees no CUDA device" in told and "--small" in told


# ── what is wrong with a run ─────────────────────────────────────────────────


def left(folder: Path, rows: list[dict], logs: dict[int, str]) -> Path:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rank, text in logs.items():
        (folder / "logs" / f"rank_{rank}.log").write_text(text)
    return folder


def test_judge_names_what_is_wrong(tmp_path):
    good = [
        {
            "step": i,
            "logp_diff/mean": 0.01 * i,
            "grad_norm": 1.0,
            "loss": 0.0,
            "memory/unaccounted_gib": 2.0 + (i > 1),
        }
        for i in (1, 2, 3)
    ]
    said = "x vllm: 272 parameters and KV caches, all on cuda:{}\nx after a push the engine's own memory is summed\n"
    logs = {rank: said.format(rank) for rank in (2, 3)}

    def wrong(rows, logs=logs, limit=0.05, device="cuda") -> str:
        return "; ".join(judge(left(tmp_path, rows, logs), 3, [2, 3], "vllm", device, limit)[0])

    assert wrong(good) == "", "between the first two steps buffers are made"
    figures = judge(left(tmp_path, good, logs), 3, [2, 3], "vllm", "cuda", 0.05)[1]
    assert figures["logp_diff/mean after the second wake"] == 0.02 and figures["memory/unaccounted_gib"] == 3.0
    assert wrong(good, limit=0.025) == "step 3: logp_diff/mean is 0.03, not below 0.025"
    assert "steps [1, 2], not 1 to 3" in wrong(good[:2])
    assert "logp_diff/mean is nan" in wrong([*good[:2], good[2] | {"logp_diff/mean": float("nan")}])
    assert "logp_diff/mean is None" in wrong([good[0], {k: v for k, v in good[1].items() if "logp" not in k}, good[2]])
    assert "no gradient" in wrong([row | {"grad_norm": 0.0} for row in good])
    assert "a loss is missing" in wrong([*good[:2], good[2] | {"loss": float("inf")}])
    assert "grew from 3.00 to 3.60 GiB" in wrong([*good[:2], good[2] | {"memory/unaccounted_gib": 3.6}])
    assert "the log of rank 3 has no line that its engine is on cuda:3" in wrong(good, logs | {3: said.format(0)})
    assert "the log of rank 2 has no line about checksums" in wrong(
        good, logs | {2: said.format(2).replace("is summed", "is not summed")}
    )
    assert "logp_diff/max is None, not below 0.0001" in wrong(good, device="cpu")
