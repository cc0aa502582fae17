"""The pages on engines, placement and reliability, and CONTRIBUTING.md's rooms, agree with the code."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from spmdrl.config.checks import check
from spmdrl.config.fields import leaves
from spmdrl.config.load import from_command_line
from spmdrl.config.plan import plan_lines
from spmdrl.config.schema import Config
from spmdrl.config.use import check_use
from tests.unit.test_docs_algorithms import anchors, functions_of, load, parts, table

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "spmdrl"
PAGES = [ROOT / "docs" / name for name in ("engines.md", "placement.md", "reliability.md")]
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ENGINES, PLACEMENT, RELIABILITY = TEXT.values()
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def modules() -> dict[Path, ast.Module]:
    return {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "assets" not in path.parts
    }


@cache
def literals() -> list[str]:
    """Returns every string of the package, implicit concatenations joined; \0 stands for the values of an f-string."""
    found = []
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(x.value) if isinstance(x, ast.Constant) else "\0" for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@cache
def timed() -> set[str]:
    """Returns phases that are timed: `timer("push")`."""
    return {
        str(node.args[0].value)
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == "timer"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }


def known_metric(name: str) -> bool:
    """True for a string of the package, a timed phase, or an f-string's beginning with a word that is in one."""
    section, _, rest = name.partition("/")
    strings, words = literals(), {word for text in literals() for word in re.findall(r"\w+", text)}
    if name in strings or (section == "time" and rest in timed()):
        return True
    filled = any(text.startswith(f"{section}/\0") for text in strings)
    return filled and set(rest.removesuffix("_gib").split("_")) <= {part for word in words for part in word.split("_")}


def said(message: str) -> bool:
    """True if a string of the package holds this message; `...` stands for anything."""
    pattern = ".*".join(map(re.escape, message.replace("\\|", "|").split("...")))
    return any(re.search(pattern, text, re.DOTALL) for text in literals())


def commands(text: str) -> list[tuple[int, list[str]]]:
    """Returns ranks and flags of every torchrun line; one that ends in a backslash goes on."""
    found = []
    for line in re.findall(r"^(torchrun .*)$", text.replace("\\\n", " "), re.MULTILINE):
        words = shlex.split(line, comments=True)
        at = words.index("spmdrl.train")
        found.append((int(words[words.index("--nproc-per-node") + 1]), words[at + 1 :]))
    return found


COMMANDS = [
    pytest.param(ranks, flags, id=f"{page.name}:{i}")
    for page in (*PAGES, ROOT / "docs" / "policy.md")
    for i, (ranks, flags) in enumerate(commands(page.read_text(encoding="utf-8")))
]


@pytest.mark.slow
def test_readers_find_what_they_look_for():
    assert len(COMMANDS) >= 9 and {"push", "wake", "rollout", "exchange"} <= timed()
    for name in (
        "rollout/staleness",
        "rollout/cut_tokens",
        "time/outside_model",
        "memory/KV_cache_gib",
        "mismatch/ess",
    ):
        assert known_metric(name), name
    for name in ("rollout/freshness", "time/dreaming", "memory/elephants_gib", "mismatches/ess"):
        assert not known_metric(name), name
    assert said("vLLM could not start for ...") and not said("vLLM could not stop for ...")


@each_page
def test_named_settings_exist(page):
    known = set(leaves(Config))
    named = re.findall(r"--([a-z_]+(?:-[a-z]+)*\.[a-z][a-z0-9_-]*[a-z0-9])", TEXT[page])
    assert len(set(named)) > 10
    for flag in named:
        name = flag.replace("-", "_")
        assert name in known or name.replace(".no_", ".") in known, f"--{flag}"


@pytest.mark.parametrize(("ranks", "flags"), COMMANDS)
def test_commands_pass_the_checks_on_their_number_of_ranks(ranks, flags, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(load(*flags), ranks)
    check_use(from_command_line(flags))


@pytest.mark.slow
@each_page
def test_flags_in_the_text_parse(page):
    """A backticked `--rollout.oversample 1.5` is a setting and a value of its type."""
    for words in re.findall(r"`(--[a-z_.-]+\.[a-z_-]+ [\w./-]+)`", TEXT[page]):
        if not re.search(r" [A-Z]$", words):
            load(*words.split())


@each_page
def test_named_files_and_tests_exist(page):
    text = re.sub(r"runs/<name>\S*|logs/rank_<r>\S*", "", TEXT[page])
    # "tests/unit/test_x.py::test_y" and "python -m tests.long.test_x" alike.
    text = re.sub(r"python -m (tests[\w.]+)", lambda m: m[1].replace(".", "/") + ".py", text)
    for path in re.findall(r"(?<![\w/.-])((?:spmdrl|tests|docs|configs|launch|benchmarks)/[\w/.-]*\w)", text):
        assert (ROOT / path).exists(), path
    tests = re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)
    assert len(tests) >= 7
    for file, test in tests:
        assert test in functions_of(ROOT / file), f"{file}::{test}"


@pytest.mark.slow
@each_page
def test_named_metrics_exist(page):
    sections = "rollout|logp_diff|mismatch|memory|time|filter|eval|entropy|kl"
    found = set(re.findall(rf"`((?:{sections})/\w+)`", TEXT[page]))
    assert len(found) >= 5
    for name in found:
        assert known_metric(name), name


@each_page
def test_local_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", TEXT[page], flags=re.DOTALL)):
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists() and (not anchor or anchor in anchors(path)), target


@each_page
def test_lines_are_short(page):
    long = [line for line in TEXT[page].splitlines() if len(line) > 130]
    # A row of a table cannot be broken.
    assert [line for line in long if page.name != "reliability.md" or not line.startswith("| ")] == []


def test_messages_are_those_of_the_code():
    rows = table(parts(ENGINES, 2)["When it complains"])
    assert len(rows) > 15
    for row in rows:
        assert said(row[0].strip("`")), row[0]


def test_engines_of_the_table_are_those_of_the_setting():
    (choices,) = [
        {x.value for x in ast.walk(node.annotation) if isinstance(x, ast.Constant)}
        for node in ast.walk(modules()[PACKAGE / "config" / "schema.py"])
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "engine"
    ]
    head = next(line for line in ENGINES.splitlines() if line.startswith("| | hf"))
    assert {cell.strip() for cell in head.split("|")} - {""} == choices - {"auto"}


def test_contract_is_told_whole():
    tree = modules()[PACKAGE / "engines" / "engine.py"]
    (contract,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Engine"]
    chapter = parts(ENGINES, 2)["Adding an engine"]
    for node in contract.body:
        name = node.name if isinstance(node, ast.FunctionDef) else getattr(getattr(node, "target", None), "id", "")
        assert f"`{name}`" in chapter or not name, name


def test_plan_on_the_page_is_what_is_printed(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert plan_lines(load("--config", "configs/gsm8k_grpo_split.yaml"), 8)[0] in PLACEMENT


def test_every_room_lists_its_files_and_the_table_of_rooms_every_room():
    rooms = parts(CONTRIBUTING, 2)["Where things live"]
    for path in modules():
        inside = path.relative_to(PACKAGE)
        if inside.name == "__init__.py":
            continue
        if len(inside.parts) == 1:
            assert f"`{inside}`" in rooms, f"{inside} is not in CONTRIBUTING.md"
            continue
        assert f"`{inside.parts[0]}/`" in rooms, f"{inside.parts[0]}/ is not in CONTRIBUTING.md"
        listed = ast.get_docstring(ast.parse((path.parent / "__init__.py").read_text())) or ""
        assert inside.name in listed, f"{path.parent / '__init__.py'} says nothing of {inside.name}"


def test_rooms_list_no_file_that_is_gone():
    for init in PACKAGE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        for name in re.findall(r"^(\w+\.py|\w+/)  ", text, re.MULTILINE):
            assert (init.parent / name).exists(), f"{init} lists {name}"


def test_every_fault_is_in_the_tables():
    """The rows of measurements are those of the code, and every row of promises has a test and a figure."""
    from tests.e2e.faults import FAULTS

    measured = table(parts(RELIABILITY, 2)["The fault matrix"])
    assert [row[0] for row in measured] == list(FAULTS)
    for row in measured:
        assert set(re.findall(r"(\w+) [\d.]+", row[2])) == set(FAULTS[row[0]].phases), row[0]
    promises = table(parts(RELIABILITY, 2)["Evidence"])
    assert len(promises) > 35
    for row in promises:
        assert len(row) == 4 and ("tests/" in row[2] or "launch/" in row[2] or row[2] == "the same"), row[0]
        assert row[3] not in ("", "-", "to be run"), row[0]
