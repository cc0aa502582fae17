"""launch/test.sh: in which parts it runs the suite, and its exit code.

The `python` that it calls here is a fake, which writes its arguments down and leaves with the codes that it is told:
the real one would run the suite inside the suite.
"""

import os
import shutil
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pytest

from tests import budget

ROOT = Path(__file__).resolve().parents[2]
FAKE = """#!/usr/bin/env bash
case "$*" in
    *"tests/contract tests/plans"*) part=1 ;;
    "-m pytest tests/sandbox "*) part=2 ;;
    *--ignore=tests/sandbox*) part=3 ;;
    "-m pytest tests/long"*) part=4 ;;
    *) part=1 ;;
esac
echo "$@" >said.$part
code=$(sed -n "${part}p" codes)
[[ $code != hangs ]] || exec sleep 60
exit "$code"
"""
BESIDE = "-m pytest --timeout 1200 tests/contract tests/plans tests/unit"
OTHERS = (
    "-m pytest -n 2 --dist loadfile --no-loadscope-reorder "
    "--ignore=tests/long --ignore=tests/contract --ignore=tests/plans --ignore=tests/unit"
)
ONE = "-m pytest --ignore=tests/long"


def suite(folder: Path, *words: str, codes: tuple = (0, 0, 0, 0), cores: int = 2) -> tuple[int, dict[int, str]]:
    """Returns (exit code, part -> arguments of python): 1 in the background, 2 by the clock, 3 others, 4 long."""
    for name in ("launch", ".venv/bin", "bin", "tests/unit"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "test.sh", folder / "launch")
    (folder / "tests" / "unit" / "test_x.py").touch()
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    for name, text in (
        ("launch/install.sh", "#!/bin/sh\n"),
        (".venv/bin/python", FAKE),
        (".venv/bin/pytest", ""),
        ("bin/nproc", f"#!/bin/sh\necho {cores}\n"),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    command = [str(folder / "launch" / "test.sh"), *words]
    done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, timeout=60)
    return done.returncode, {
        n: file.read_text().strip() for n in range(1, 5) if (file := folder / f"said.{n}").exists()
    }


@pytest.mark.parametrize("words", ["", "-k losses", "-k tests", "-q --durations 20", "--durations=20", "-m slow"])
def test_the_suite_runs_in_three_parts_with_the_same_arguments(tmp_path, words):
    code, said = suite(tmp_path, *words.split())
    assert code == 0 and said.keys() == {1, 2, 3}
    beside, alone, others = (said[part].removesuffix(words).split() for part in (1, 2, 3))
    paths = alone[2:]
    skipped = [f"--ignore={path}" for path in paths]
    assert beside == BESIDE.split() + skipped and others == OTHERS.split() + skipped
    assert all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize("cores, workers", [(1, 2), (2, 2), (8, 4), (64, 8)])
def test_ranks_and_engines_have_two_cores_to_a_worker(tmp_path, cores, workers):
    assert f" -n {workers} " in suite(tmp_path, cores=cores)[1][3]


@pytest.mark.parametrize(
    "words",
    ["tests/unit", "tests/unit/test_x.py::test_y", "-x tests/unit", "--junitxml=out.xml", "--junitxml out.xml", "--lf"]
    + ["--pdb", "-n 2", "-n2", "--co", "-sv", "--sw", "-k losses --last-failed"],
)
def test_paths_and_options_over_all_tests_make_it_one_run(tmp_path, words):
    code, said = suite(tmp_path, *words.split(), codes=(3,))
    assert code == 3 and said == {1: f"{ONE} {words}"}


@pytest.mark.parametrize(
    "codes, words, others, code",
    [
        ((0, 0, 0), "", True, 0),
        ((1, 0, 0), "", True, 1),
        ((0, 1, 0), "", True, 1),
        ((0, 0, 1), "", True, 1),
        ((1, 5, 0), "", True, 1),
        ((5, 0, 5), "", True, 0),
        ((0, 5, 5), "", True, 0),
        ((5, 5, 5), "", True, 5),
        ((5, 5, 1), "", True, 1),
        # A failure where the first is to end it, Ctrl-C, and a mistake in the arguments.
        ((1, 0, 0), "-x", False, 1),
        ((0, 1, 0), "-x", False, 1),
        ((1, 0, 0), "-xq", False, 1),
        ((1, 0, 0), "--maxfail=1", False, 1),
        ((2, 0, 0), "", False, 2),
        ((0, 2, 0), "", False, 2),
        ((0, 4, 0), "", False, 4),
        # The end does not wait for what runs in the background.
        (("hangs", 2, 0), "", False, 2),
    ],
)
def test_a_part_that_fails_fails_the_suite(tmp_path, codes, words, others, code):
    began = time.monotonic()
    got, said = suite(tmp_path, *words.split(), codes=codes)
    assert (got, 3 in said) == (code, others) and time.monotonic() - began < 30


def test_quick_and_long(tmp_path):
    _, said = suite(tmp_path / "quick", "--quick", "-q")
    assert said == {
        1: "-m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder -m not slow tests/unit "
        "tests/ranks/test_training.py::test_two_runs_with_one_seed_are_identical -q"
    }
    _, said = suite(tmp_path / "long", "--long")
    assert said[1].startswith(BESIDE) and said[3].startswith(OTHERS) and said[4] == "-m pytest tests/long"


def test_seconds_of_workers_count_in_full(monkeypatch):
    """Tests that two workers ran at the same time are 2 x 700 s of their level, which is above its budget."""
    monkeypatch.setattr(budget, "seconds", {"unit": 0.0})
    monkeypatch.setattr(budget, "files", defaultdict(float))
    assert budget.BUDGET["unit"] == 1200
    for _ in range(2):
        report = type("Report", (), {"nodeid": "tests/unit/test_x.py::test_y", "duration": 700.0})
        budget.pytest_runtest_logreport(report)
    assert budget.over() == ["tests/unit took 1400 s, its budget is 1200 s: see the slowest tests above"]
