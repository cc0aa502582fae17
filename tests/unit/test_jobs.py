"""The rows of the kinds of jobs: they name what there is, and the docs name them."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import spmdrl
from spmdrl.config.resume import entry_point
from spmdrl.session.job import jobs

ROOT = Path(spmdrl.__file__).parents[1]
JOBS = jobs()


def test_every_entry_point_is_found():
    files = {path.stem for path in (ROOT / "spmdrl").glob("*.py") if "JOB = " in path.read_text()}
    assert {f"spmdrl.{name}" for name in files} == set(JOBS) and len(JOBS) == 7


@pytest.mark.parametrize("module", JOBS)
def test_a_row_names_what_there_is(module):
    job, source = JOBS[module], (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert job.module == module
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "late":
            name, _, attribute = ast.literal_eval(call.args[0]).partition(":")
            assert callable(getattr(import_module(name), attribute))


@pytest.mark.parametrize("module", JOBS)
def test_the_page_of_a_job_shows_its_command(module):
    assert f"-m {module}" in (ROOT / JOBS[module].page).read_text()


@pytest.mark.parametrize("module", [module for module, job in JOBS.items() if job.keeps(job.settings())])
def test_a_run_folder_tells_whose_it_is(module):
    kinds = {name: job.settings for name, job in JOBS.items()}
    sections = list(vars(kinds[module]()))
    assert entry_point(sections, kinds) == module
    assert entry_point(["run", "model"], kinds) == ""
