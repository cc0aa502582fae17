"""launch/test.sh: in which parts it runs the suite, and its exit code.

The `python` that it calls here is a fake, which writes its arguments down and leaves with the codes that it is told:
the real one would run the suite inside the suite.
"""

import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from tests import budget

ROOT = Path(__file__).resolve().parents[2]
FAKE = """#!/usr/bin/env bash
echo "$@" >>said
exit "$(sed -n "$(wc -l <said)p" codes)"
"""
SPREAD = "-m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder"
FIRST = f"{SPREAD} tests/contract tests/plans tests/unit"
BESIDE = (
    "-m pytest -n 2 --dist loadfile --no-loadscope-reorder "
    "--ignore=tests/long --ignore=tests/contract --ignore=tests/plans --ignore=tests/unit"
)
ONE = "-m pytest --ignore=tests/long"


def suite(folder: Path, *words: str, codes: tuple[int, ...] = (0, 0, 0), cores: int = 2) -> tuple[int, list[str]]:
    """Returns (exit code, arguments of each call of python)."""
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
    return done.returncode, (folder / "said").read_text().splitlines()


@pytest.mark.parametrize("words", ["", "-k losses", "-k tests", "-q --durations 20", "--durations=20", "-m slow"])
def test_the_suite_runs_in_three_parts_with_the_same_arguments(tmp_path, words):
    code, (first, beside, alone) = suite(tmp_path, *words.split())
    assert code == 0 and first == f"{FIRST} {words}".strip()
    assert beside.startswith(BESIDE) and alone.startswith("-m pytest tests/")
    paths = alone.removesuffix(words).split()[2:]
    assert beside.removesuffix(words).split() == BESIDE.split() + [f"--ignore={path}" for path in paths]
    assert all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize("cores, workers", [(1, 2), (2, 2), (8, 4), (64, 8)])
def test_ranks_and_engines_have_two_cores_to_a_worker(tmp_path, cores, workers):
    assert f" -n {workers} " in suite(tmp_path, cores=cores)[1][1]


@pytest.mark.parametrize(
    "words",
    ["tests/unit", "tests/unit/test_x.py::test_y", "-x tests/unit", "--junitxml=out.xml", "--junitxml out.xml", "--lf"]
    + ["--pdb", "-n 2", "-n2", "--co", "-sv", "--sw", "-k losses --last-failed"],
)
def test_paths_and_options_over_all_tests_make_it_one_run(tmp_path, words):
    code, said = suite(tmp_path, *words.split(), codes=(3,))
    assert code == 3 and said == [f"{ONE} {words}"]


@pytest.mark.parametrize(
    "codes, words, calls, code",
    [
        ((0, 0, 0), "", 3, 0),
        ((1, 0, 0), "", 3, 1),
        ((0, 1, 0), "", 3, 1),
        ((0, 0, 1), "", 3, 1),
        ((1, 5, 0), "", 3, 1),
        ((5, 0, 5), "", 3, 0),
        ((0, 5, 5), "", 3, 0),
        ((5, 5, 5), "", 3, 5),
        ((5, 5, 1), "", 3, 1),
        # A failure where the first is to end it, Ctrl-C, and a mistake in the arguments.
        ((1, 0, 0), "-x", 1, 1),
        ((0, 1, 0), "-x", 2, 1),
        ((1, 0, 0), "-xq", 1, 1),
        ((1, 0, 0), "--maxfail=1", 1, 1),
        ((2, 0, 0), "", 1, 2),
        ((0, 2, 0), "", 2, 2),
        ((4, 0, 0), "", 1, 4),
    ],
)
def test_a_part_that_fails_fails_the_suite(tmp_path, codes, words, calls, code):
    got, said = suite(tmp_path, *words.split(), codes=codes)
    assert (got, len(said)) == (code, calls)


def test_quick_and_long(tmp_path):
    _, said = suite(tmp_path / "quick", "--quick", "-q")
    assert said == [
        f"{SPREAD} -m not slow tests/unit tests/ranks/test_training.py::test_two_runs_with_one_seed_are_identical -q"
    ]
    _, said = suite(tmp_path / "long", "--long")
    assert said[0] == FIRST and said[1].startswith(BESIDE) and said[2].endswith(" tests/long")


def test_seconds_of_workers_count_in_full(monkeypatch):
    """Tests that two workers ran at the same time are 2 x 500 s of their level, which is above its budget."""
    monkeypatch.setattr(budget, "seconds", {"unit": 0.0})
    monkeypatch.setattr(budget, "files", defaultdict(float))
    assert budget.BUDGET["unit"] == 900
    for _ in range(2):
        report = type("Report", (), {"nodeid": "tests/unit/test_x.py::test_y", "duration": 500.0})
        budget.pytest_runtest_logreport(report)
    assert budget.over() == ["tests/unit took 1000 s, its budget is 900 s: see the slowest tests above"]
