"""docs/slurm.md is right: variables, defaults, files and lines; and its commands that a CPU can run do run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.tools.doctor_machine import OWN
from tests.e2e import fake_slurm
from tests.unit.test_docs_algorithms import parts, table

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
CHAPTERS = parts(DOC, 2)
SCRIPTS = {path.name: path.read_text() for path in [*(ROOT / "slurm").glob("*.sh"), ROOT / "launch" / "node.sh"]}
JOBS = sorted(name for name in SCRIPTS if name not in ("job.sh", "container.sh", "node.sh"))
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```\n(.*?)```", DOC, re.DOTALL)
    for line in block.splitlines()
    if re.match(r"(python|torchrun|sbatch) ", line)
]


def test_variables_are_those_of_the_scripts():
    told = {row[0].strip("`"): row[2].strip("`") for row in table(CHAPTERS["Variables"])}
    tools = [ROOT / "spmdrl" / "tools" / f"{name}.py" for name in ("hosts", "ssh_start")]
    text = "\n".join([*SCRIPTS.values(), *(file.read_text() for file in tools)])
    assert len(told) > 10 and all(f"${{{name}:-" in text or f"${{{name}:+" in text for name in told)
    for name, default in told.items():
        if default not in ("by script", "none") and name not in ("NPROC", "RUN_DIR", "ROOT"):
            assert f"${{{name}:-{default}}}" in text, name
        if default == "by script":
            assert all(f"{name}=${{{name}:-" in SCRIPTS[job] for job in JOBS), name


def test_jobs_are_those_of_the_table():
    rows = table(CHAPTERS["Start"])
    assert sorted(row[0].strip("`").removeprefix("slurm/") for row in rows) == JOBS
    for name, about, nodes in rows:
        text = SCRIPTS[name.strip("`").removeprefix("slurm/")]
        (config,) = re.findall(r"`(configs/\w+\.yaml)`", about)
        allotted = int(re.search(r"#SBATCH --nodes=(\d+)", text)[1])  # type: ignore[index]
        need, *spares = map(int, re.findall(r"\d+", nodes))
        assert f"slurm/job.sh {config} " in text and (ROOT / config).exists()
        assert f"NODES:-{need}}}" in text and allotted == need + sum(spares)
        assert f"sbatch {name.strip('`')}" in (ROOT / config).read_text()


LINES = {name.strip() for row in table(CHAPTERS["The doctor"]) for name in row[0].split(",")}
OF_SETTINGS = {"device", "models", "prompts", "files of functions"}
ELSEWHERE = {"torchvision", "NCCL", "GPU memory", "all ranks", "clocks", "network", *OF_SETTINGS}
"""Lines that a machine like this one, or one process, does not print."""


def test_commands_are_found():
    assert len(COMMANDS) == 7, COMMANDS


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in COMMANDS if "68" not in line and "sbatch" not in line])
def test_command_of_the_doctor_runs(command, tmp_path):
    command = command.replace("report.json", str(tmp_path / "report.json")).replace("--dir runs", f"--dir {tmp_path}")
    kept = {k: v for k, v in os.environ.items() if k not in OWN and not k.startswith(("TORCHELASTIC_", "PET_"))}
    env = kept | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    env["HF_HOME"] = str(tmp_path / "hub")
    words = command.split()
    if words[0] == "torchrun":
        words[1:1] = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    ended = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    bad = re.findall(r"^fail (\S+)", ended.stdout, re.MULTILINE)
    # An empty cache of a hub that is not asked: the settings name a model and prompts that are not here.
    wanted = ["--model.path", "--data.train", "--data.eval"] if "--config" in words else []
    assert bad == wanted and ended.returncode == bool(wanted), ended.stdout + ended.stderr
    assert re.search(r"^\d+ ok", ended.stdout, re.MULTILINE), ended.stdout + ended.stderr
    if command == "python -m spmdrl.tools.doctor":
        printed = {line[5:].split("  ")[0] for line in ended.stdout.splitlines() if re.match("ok|warn|fail", line)}
        assert printed == LINES - ELSEWHERE, "the page's table has every line"
    if words[0] == "torchrun":
        assert "over gloo, 2 ranks, results correct" in ended.stdout and "ok   clocks" in ended.stdout


@pytest.mark.slow
def test_command_of_a_job_on_paper_runs(tmp_path):
    """A fake SLURM takes it (tests/e2e/fake_slurm.py)."""
    (command,) = [line for line in COMMANDS if line.endswith("--dry-run")]
    env = os.environ | fake_slurm.install(tmp_path / "slurm", nodes=["127.0.0.1"])
    ended = subprocess.run(command.split(), cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "ranks    8 = dp_shard 8" in ended.stdout, ended.stdout + ended.stderr
