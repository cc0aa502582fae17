"""benchmarks/first_gpu_run.py: its stages in small on a CPU, with the real engines; its order, limits and report.

No GPU is here. The machines with GPUs are made-up facts, and stages on them small programs.
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import _gpu_facts, _vllm_loads, first_gpu_run
from benchmarks._gpu_judge import judge
from benchmarks._gpu_stages import BEFORE, ROOT, STAGES, TOTAL, Command, Form, Stage, Training, chosen, example
from tests.builds import no_sglang, no_vllm

NAMES = {stage.name: stage for stage in STAGES}
KEPT = (
    *("HF_HUB_OFFLINE", "PYTHONPATH", "TOKENIZERS_PARALLELISM", "PYTHONUNBUFFERED", "SPMDRL_TESTS_GIVEN"),
    *("SPMDRL_BENCHMARK_DEVICE", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
)
"""Variables that the program sets, or takes away, for everything that it starts."""
GPU = {"name": "H200", "capability": "9.0", "gib": 139.0}
MACHINE = {"host": "h", "cpu": "c", "gpus": [GPU], "versions": {"torch": "2"}, "modules": [], "topology": "GPU0 X"}
MACHINE |= {"large_model": ""}


@pytest.fixture
def run_of(monkeypatch, tmp_path):
    """Returns a function that runs the program with some stages on a made-up machine: its exit code, its report."""
    for name in KEPT:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(signal, "signal", lambda *args: None)

    def run(stages: list[Stage], *words: str, facts: dict = MACHINE, grace: float = 1.0) -> tuple[int, dict]:
        monkeypatch.setattr(first_gpu_run, "chosen", lambda names, short=False: stages)
        monkeypatch.setattr(first_gpu_run, "look", lambda python, work, seconds: facts)
        monkeypatch.setattr(first_gpu_run, "GRACE", grace)
        code = first_gpu_run.main(["--results", str(tmp_path / "out"), *words])
        kind = "cpu" if "--small" in words else "gpu"
        return code, json.loads((tmp_path / "out" / f"first_run_{kind}.json").read_text())

    return run


def form(folder: Path, **values) -> Form:
    modules = set(_gpu_facts.modules())
    modules -= {name for name, why in (("vllm", no_vllm()), ("sglang", no_sglang())) if why}
    return replace(Form(True, 0, tuple(modules), sys.executable, folder, folder, log=folder / "log"), **values)


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
    for each in stage.short.runs if stage.short else ():
        words = each.words(stage.name, form(Path("work")))[1:]
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
    if isinstance(part, Training):
        from tests.engines.test_vllm_tp import LAYOUTS, STAGE_OF

        layout = name.split("[")[1].rstrip("]")
        assert STAGE_OF[layout] == stage.name and f"--rollout.tp {LAYOUTS[layout][1]}" in part.flags + " --rollout.tp 2"
        assert part.split is ("--parallel.placement split" in LAYOUTS[layout][2])
    elif stage.benchmark:
        script = part.full.split()[0]
        folder, stem = str(Path(script).parent), Path(script).stem
        assert f"import {stem} as bench" in text or script in text or (folder == "benchmarks/kernels" and stem in text)
    else:
        assert any(place in small for place in (file, "kernels/tests")) and (file in small or "kernels/tests" in text)
    for other in part.words(stage.name, example(Path("work"), Path("results")))[1:]:
        if other.endswith(".py"):
            assert (ROOT / other).is_file(), other


@pytest.mark.parametrize("stage", [stage.shortened() for stage in STAGES if stage.short], ids=lambda stage: stage.name)
def test_flags_of_short_forms_are_those_of_the_programs(stage, tmp_path):
    """Trainings are read as the program reads them, and every other flag stands in the source of its script."""
    for small in (False, True):
        for part in stage.runs:
            words = part.words(stage.name, form(tmp_path, small=small, gpus=1, quick=True, short=True))
            if isinstance(part, Training):
                from spmdrl.config.load import from_command_line

                config = from_command_line(words[words.index("spmdrl.train") + 1 :]).config
                assert config.rollout.enforce_eager and config.rollout.sleep_level == 2
            elif words[1].endswith(".py"):
                source = (ROOT / words[1]).read_text() + (ROOT / "benchmarks/kernels/_measure.py").read_text()
                assert all(f'"{word}"' in source for word in words if word.startswith("--")), words


# ── what the stages are ──────────────────────────────────────────────────────


def test_limits_add_up_to_half_an_hour_and_to_560_seconds():
    short = chosen("", True)
    last = [stage.name for stage in short if stage.spare]
    assert last == ["kernel_tests", "program_tests", "cumem", "memory"] == [stage.name for stage in short[-4:]]
    short = short[:-4]
    assert TOTAL == {False: 30 * 60, True: 560} and len(NAMES) == len(STAGES)
    for kind, stages in ((False, STAGES), (True, short)):
        assert BEFORE[kind] + sum(stage.limit for stage in stages) <= TOTAL[kind]
        benchmarks = [stage.benchmark for stage in stages]
        assert benchmarks == sorted(benchmarks), "benchmarks come last and share what time is left"
        spare = 100.0
        shares = [first_gpu_run.share(stages, i, spare) for i in range(len(stages))]
        first = benchmarks.index(True)
        assert sum(shares[:first]) == sum(s.limit for s in stages if not s.benchmark)
        assert shares[first] == stages[first].limit + spare / sum(benchmarks)
        assert shares[-1] == stages[-1].limit + spare
    assert [stage.name for stage in short[:4]] == ["vllm_loads", "vllm_tests", "vllm_sleep", "colocated"]


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
    benchmarks = {s.name for s in STAGES if s.benchmark}
    assert able == {"devices", "kernel_tests", "program_tests"} | benchmarks - {"cumem"}
    assert "--engine hf" in " ".join(NAMES["colocated"].runs[0].words("colocated", lent))
    told = replace(lent, why={"vllm": "does not load: no such library"})
    assert NAMES["vllm_tests"].lacks(told, 139.0) == "vllm does not load: no such library"
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
    assert first_gpu_run.main(["--dry-run", "--short"]) == 0
    out = capsys.readouterr().out
    assert "13 stages, at most 560 s" in out and "\nmfu: " in out and "\ndevices: " not in out
    assert "--rollout.enforce-eager" in out and "mfu_gpu.json --quick" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--limit -1", "--limit -1: give more than 5 seconds, in which a stopped stage ends"),
        ("--limit 5", "--limit 5: give more than 5 seconds"),
        ("--limit nan --dry-run", "--limit nan: give more than 5 seconds"),
        ("--limit inf", "--limit inf: give more than 5 seconds"),
        ("--results /proc/x", "--results /proc/x: nothing can be written there: "),
        ("--results README.md", "--results README.md: nothing can be written there: File exists"),
        ("--only nothing", "the stages are devices, vllm_loads, kernel_tests"),
        ("--only devices --short", "the short stages are vllm_loads, vllm_tests"),
    ],
)
def test_bad_options_end_before_the_machine_is_looked_at(words, told, monkeypatch, capsys):
    monkeypatch.setattr(first_gpu_run, "look", lambda *args: pytest.fail("it went on"))
    monkeypatch.chdir(ROOT)
    for more in ([], ["--small"]):
        with pytest.raises(SystemExit) as end:
            first_gpu_run.main([*words.split(), *more])
        assert end.value.code == 2 and told in capsys.readouterr().err


def test_report_of_the_small_form_goes_where_git_does_not_look(monkeypatch, tmp_path):
    """The recorded figures of a CPU stay as they are."""
    recorded = {p: p.stat().st_mtime_ns for p in (ROOT / "benchmarks" / "results").iterdir()}
    shutil.copy(ROOT / ".gitignore", tmp_path)
    works = Stage("works", "something", 30, (Command('-c \'open("{json}", "w").write("[7]")\''),), benchmark=True)
    nothing = MACHINE | {"gpus": [], "topology": ""}
    monkeypatch.setattr(first_gpu_run, "chosen", lambda names, short: [works])
    monkeypatch.setattr(first_gpu_run, "look", lambda *args: nothing)
    monkeypatch.setattr(first_gpu_run, "ROOT", tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    for name in KEPT:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    assert first_gpu_run.main(["--small"]) == 0
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    seen = subprocess.run(["git", "-C", str(tmp_path), "status", "--porcelain"], capture_output=True, text=True).stdout
    assert seen == "?? .gitignore\n"
    names = {path.name for path in tmp_path.rglob("*_cpu.*")}
    assert names == {"first_run_cpu.md", "first_run_cpu.json"}
    report = json.loads(next(tmp_path.rglob("first_run_cpu.json")).read_text())
    assert report["stages"][0]["results"] == [7], "the benchmark's file is in the report"
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


def test_a_report_of_stages_that_fail_hang_and_cannot_run(tmp_path, monkeypatch, capsys, run_of):
    hangs = tmp_path / "hangs.py"
    hangs.write_text(HANGS)
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
    began = time.monotonic()
    code, told = run_of(stages)
    assert code == 1 and time.monotonic() - began < 60
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
    assert got["hangs"]["reason"] == "hangs: stopped after 6 s" and len(got["hangs"]["commands"]) == 1
    assert got["many"]["reason"] == "needs 2 GPUs, the machine has 1"
    assert got["trains"]["reason"] == "run: metrics.jsonl has steps [], not 1 to 4"
    assert got["works"]["targets"] == ["target speed 2 1 ok"]
    assert got["works"]["limit"] > 100, "a benchmark has what the others left over"
    child = int(got["hangs"]["targets"][0].split()[-1])
    assert not alive(child), "a process in a session of its own, which ignores SIGINT"
    report = (tmp_path / "out" / "first_run_gpu.md").read_text()
    assert "1 ok, 3 failed, 2 skipped" in report and "H200 (139.0 GiB, 9.0)" in report and "GPU0 X" in report
    assert "| hangs | failed | " in report and "why it | failed" in report
    log = (tmp_path / "out" / "first_run_gpu.log").read_text()
    assert log.index("=== fails") < log.index("why it | failed") < log.index("=== hangs")
    assert "works: ok" in capsys.readouterr().out
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {f"first_run_gpu.{end}" for end in ("json", "md", "log")}


def test_a_library_that_raises_at_import_leaves_its_time_to_the_others(tmp_path, run_of, monkeypatch):
    """The stages that need it are skipped with the reason, and benchmarks with another form take that."""
    broken = "-c 'import sys; sys.exit(\"ImportError: libcudart.so.13: no such file\")'"
    stages = [
        Stage("loads", "nothing", 100, (Command(broken),), modules=("vllm",), loads="vllm"),
        Stage("tests", "nothing", 200, (), modules=("vllm",)),
        Stage("steps", "nothing", 50, (Command("-c 'print(\"figure engine {engine}\")'"),), benchmark=True),
        Stage("speed", "nothing", 50, (Command("-c pass"),), benchmark=True),
    ]
    more = Stage("more", "nothing", 60, (Command("-c pass"),), spare=True)
    code, told = run_of([*stages, more], "--short", facts=MACHINE | {"modules": ["vllm"]})
    loads, tests, steps, speed, more = told["stages"]
    assert more["status"] == "ok" and more["limit"] == 60
    assert code == 1 and loads["status"] == "failed"
    assert tests["status"] == "skipped"
    assert tests["reason"] == "vllm does not load: loads: exit code 1; ImportError: libcudart.so.13: no such file"
    assert steps["targets"] == ["figure engine hf"] and speed["status"] == "ok"
    assert steps["limit"] > 50 + 300 / 2 and speed["limit"] > 50 + 250, "they share what the others left"
    monkeypatch.setenv("SPMDRL_NO_VLLM", "is not installed, and there is no folder .vllm")
    _, told = run_of(stages[1:], "--short")
    assert told["stages"][0]["reason"] == "vllm is not installed, and there is no folder .vllm"


def test_a_short_run_ends_in_time_whatever_was_used_before(run_of, monkeypatch):
    monkeypatch.setenv("SPMDRL_SETUP_SECONDS", "525")
    stages = [Stage(name, "nothing", 100, (Command("-c pass"),), benchmark=True) for name in ("first", "second")]
    _, told = run_of(stages, "--short")
    assert 30 < told["stages"][0]["limit"] <= 35 and told["seconds"] >= 525
    monkeypatch.setenv("SPMDRL_SETUP_SECONDS", "555")
    code, told = run_of(stages, "--short")
    assert code == 0 and {stage["status"] for stage in told["stages"]} == {"skipped"}
    assert told["stages"][0]["reason"] == "no time was left: 555 s are used"


def test_what_comes_back_stays_small(tmp_path, run_of, monkeypatch):
    """A stage that prints without end is stopped and its output is cut; results that are too large stay a file."""
    monkeypatch.setattr(first_gpu_run, "LOG", 300_000)
    monkeypatch.setattr(first_gpu_run, "KEPT", 4000)
    monkeypatch.setattr("benchmarks._gpu_report.MOST", 100)
    endless = "-c 'while True: print(\"a line of a warning that comes again and again\")'"
    large = '-c \'open("{json}", "w").write("[" + "1," * 100 + "1]"); print("figure the end 1")\''
    half = '-c \'open("{json}", "w").write("[1,")\''
    programs = {"e": endless, "l": large, "h": half}
    _, told = run_of([Stage(name, "nothing", 30, (Command(code),)) for name, code in programs.items()], grace=5.0)
    prints, large, half = told["stages"]
    assert prints["reason"] == "e: stopped after 0 MiB of output" and len(prints["tail"]) == first_gpu_run.TAIL
    assert large["results"] is None and half["results"] is None and large["targets"] == ["figure the end 1"]
    folder = tmp_path / "out"
    assert {file.name for file in folder.iterdir()} == {
        *(f"first_run_gpu.{end}" for end in ("json", "md", "log")),
        *("l_gpu.json", "h_gpu.json"),
    }
    log = (folder / "first_run_gpu.log").read_text()
    assert len(log) < 8000 and "bytes are left out" in log and "=== l" in log


KILLED = """
import json, sys
from benchmarks import first_gpu_run
from benchmarks._gpu_stages import Command, Stage

quoted = "-c '{}'".format
first = Command(quoted('open("{json}", "w").write("[7]"); print("figure first 7")'))
waits = 'import time, os; open("{json}", "w").write("[8]"); print(os.getpid(), flush=True); time.sleep(60)'
second = Command(quoted(waits))
stages = [Stage(name, "all", 30, (run,)) for name, run in (("first", first), ("second", second), ("third", first))]
first_gpu_run.chosen = lambda names, short=False: stages
first_gpu_run.look = lambda *args: json.loads(sys.argv[2])
sys.exit(first_gpu_run.main(["--results", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_that_is_killed_leaves_a_report_of_what_it_had(tmp_path, number):
    """A machine that goes away in the middle of a stage; SIGTERM also ends the processes of the stage."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), json.dumps(MACHINE)], cwd=ROOT, env=environment
    )
    deadline = time.monotonic() + 30
    log, child = tmp_path / "first_run_gpu.log", ""
    while not child and time.monotonic() < deadline:
        time.sleep(0.05)
        second = log.read_text().partition("=== second")[2] if log.exists() else ""
        child = "".join(line for line in second.splitlines(keepends=True) if re.fullmatch(r"\d+\n", line))
    process.send_signal(number)
    assert process.wait(20) == (-9 if number == signal.SIGKILL else 143)
    told = json.loads((tmp_path / "first_run_gpu.json").read_text())
    first, second, third = told["stages"]
    assert first["status"] == "ok" and first["results"] == [7] and first["targets"] == ["figure first 7"]
    assert second["status"] == "running" and second["reason"].startswith("began after ")
    assert third["status"] == "not run" and third["reason"] == "the program ended before"
    assert "1 ok, 0 failed, 0 skipped, 1 running, 1 not run" in (tmp_path / "first_run_gpu.md").read_text()
    assert json.loads((tmp_path / "second_gpu.json").read_text()) == [8], "results of the stage that was cut"
    if number == signal.SIGTERM:
        assert not alive(int(child))
    while alive(int(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(child)), "the kernel ends it with its parent"


def test_processes_that_outlived_their_program_are_ended_and_no_others():
    own = first_gpu_run.identity(os.getpid())
    space, _, began = own.split("-")
    marks = {"ours": f"{own}-1", "dead": f"{space}-{os.getpid()}-{int(began) - 1}-2", "elsewhere": "pid:[1]-1-1-3"}
    sleepers = {
        name: subprocess.Popen(["sleep", "60"], env=os.environ | {first_gpu_run.MARK: mark})
        for name, mark in marks.items()
    }
    try:
        found = first_gpu_run.orphans()
        assert {name for name, process in sleepers.items() if process.pid in found} == {"dead"}
    finally:
        for process in sleepers.values():
            process.kill()
            process.wait()
    assert not first_gpu_run.identity(sleepers["dead"].pid)


def test_a_library_that_is_only_tried_leaves_a_warning(tmp_path, monkeypatch, capsys):
    def load(name: str) -> None:
        if name in broken:
            raise ImportError("no such symbol")

    monkeypatch.setattr(_vllm_loads, "available", lambda: "cuda")
    monkeypatch.setattr(_vllm_loads, "measured_on", lambda *args, **named: {"device": "H200"})
    names = ["vllm._C_stable_libtorch", "vllm.spinloop", "vllm.vllm_flash_attn._vllm_fa3_C"]
    monkeypatch.setattr(_vllm_loads, "libraries", lambda: names)
    monkeypatch.setattr(_vllm_loads.importlib, "import_module", load)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "loads.json")])
    broken = ["vllm.spinloop"]
    _vllm_loads.main()
    assert "warning: vllm.spinloop does not load: ImportError: no such symbol" in capsys.readouterr().out
    seconds = json.loads((tmp_path / "loads.json").read_text())["seconds"]
    assert set(seconds) == {*_vllm_loads.PYTHON, *_vllm_loads.WORKER, *names} - {"vllm.spinloop"}
    broken = [names[2]]
    with pytest.raises(ImportError):
        _vllm_loads.main()


def test_a_library_whose_stage_is_stopped_is_not_called_missing(run_of):
    slow = Stage("loads", "nothing", 3, (Command("-c 'import time; time.sleep(30)'"),), modules=("vllm",), loads="vllm")
    needs = Stage("needs", "nothing", 30, (Command("-c pass"),), modules=("vllm",))
    _, told = run_of([slow, needs], facts=MACHINE | {"modules": ["vllm"]}, grace=2.0)
    assert [stage["status"] for stage in told["stages"]] == ["failed", "ok"]
    assert told["stages"][0]["reason"] == "loads: stopped after 1 s"


STUB = """#!/bin/bash
case "$1 $2" in
"benchmarks/pack_vllm.py --unpack")
    [[ $3 == */first || $3 == */empty ]] && exit
    echo "one line"; echo "the library is corrupt"; exit 1 ;;
"benchmarks/first_gpu_run.py "*) echo "without vLLM: $SPMDRL_NO_VLLM; after $SPMDRL_SETUP_SECONDS s; $*" ;;
esac
"""


def test_the_script_goes_on_without_a_vllm_that_cannot_be_unpacked(tmp_path):
    python = tmp_path / "python"
    python.write_text(STUB)
    python.chmod(0o755)
    for name in ("packed", "first", "first-2", "empty"):
        (tmp_path / name).mkdir()
    given = {"PYTHON": str(python), "WHEELS": str(tmp_path / "none")}
    for folder, why in (
        ("packed", f"could not be unpacked from {tmp_path}/packed: the library is corrupt"),
        ("first", f"could not be unpacked from {tmp_path}/first-2: the library is corrupt"),
        ("empty", "could not be put into TEMP/site: cp: cannot stat 'TEMP/vllm/.': No such file or directory"),
        ("absent", f"is not installed for this device, and there is no folder {tmp_path}/absent with a packed one"),
    ):
        environment = os.environ | given | {"PACKED_VLLM": str(tmp_path / folder), "TMPDIR": "/tmp", "LC_ALL": "C"}
        command = [str(ROOT / "benchmarks" / "gpu.sh"), "--short", "--results", "there"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        last = re.sub(r"/tmp/tmp\.\w+", "TEMP", done.stdout.splitlines()[-1])
        assert done.returncode == 0 and last.startswith(f"without vLLM: {why}; after "), done.stdout + done.stderr
        assert last.endswith(" s; benchmarks/first_gpu_run.py --short --results there")


def test_the_page_names_what_is_carried_and_a_command_that_fits():
    text = (ROOT / "docs" / "gpu.md").read_text()
    packs, runs = (block for block in text.split("```")[1::2] if "gpu.sh" in block or "pip download" in block)
    assert len(runs) < 2000 and "benchmarks/gpu.sh --short --results" in runs
    locked = (ROOT / "launch" / "locks" / "cpu.txt").read_text()
    wheels = re.findall(r"(\S+)==(\S+)", packs)
    assert {name for name, _ in wheels} >= {"tyro", "docstring-parser", "typeguard", "liger-kernel", "megatron-core"}
    for name, version in wheels:
        assert name == "liger-kernel" or f"{name.replace('-', '_')}=={version}" in locked.replace("-", "_"), name


def test_without_a_gpu_it_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr(first_gpu_run, "look", lambda *args: {"gpus": [], "modules": [], "large_model": ""})
    monkeypatch.setattr(signal, "signal", lambda *args: None)
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
    killed = left(tmp_path, good[:2], logs)
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    stopped = judge(killed, 3, [2, 3], "vllm", "cuda", 0.05)[1]
    assert stopped["logp_diff/mean"] == 0.02, "a run that was stopped keeps its figures"
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
