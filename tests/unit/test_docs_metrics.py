"""docs/metrics.md and the code name the same metrics. What runs write is compared where tests read metrics.jsonl."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.documented import documented, undocumented

SPMDRL = Path(__file__).parents[2] / "spmdrl"
ROOMS = ("algos", "checkpoint", "policy", "rl", "session", "supervised", "tracking")
NO_METRIC = re.compile(
    r"(tok|token|seq|matched|part|model|state|application|docs|train|eval/\\d|mismatch/.*ratio.*|moment|calibration/(count|\\d+)"
    r"|tokens/most_on_a_rank|eval/measured|reward_models)(/.*)?"
)
"""Columns of batches, paths, and numbers that are turned into others before they are logged."""
NAME = re.compile(r"[a-z_\x00]+(/[a-z_0-9@\x00]+)+")
"""A metric with a group; \\0 stands for a value of an f-string."""


def texts(tree: ast.AST) -> set[str]:
    """Returns the strings of a module without those of docstrings, values of f-strings as \\0."""
    out, inside = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            inside |= {id(value) for value in node.values}
            out.add("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
    constants = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return out | {n.value for n in constants if id(n) not in inside}


def as_pattern(text: str) -> str:
    """Returns an expression for the texts that an f-string makes."""
    return ".+".join(map(re.escape, text.split("\0")))


@cache
def in_code() -> tuple[frozenset[str], frozenset[str]]:
    """Returns all strings of the rooms that compute metrics, and the names of phases of their clocks."""
    found, phases = set(), set()
    for files in (*((SPMDRL / room).rglob("*.py") for room in ROOMS), SPMDRL.glob("*.py")):
        for path in files:
            tree = ast.parse(path.read_text())
            found |= texts(tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("timer") and node.args:
                    phases |= {f"time/{value}" for value in texts(node.args[0])}
    return frozenset(found), frozenset(phases)


def test_the_page_has_every_metric_of_the_code():
    found, phases = in_code()
    # A name may have a prefix of its own in front (`eval/`, `critic/`).
    found = {re.sub("^\0/?", "", x) for x in found}
    names = {x for x in found if NAME.fullmatch(x) and not NO_METRIC.fullmatch(x)} | phases
    assert len(names) > 80, "they are found"
    whole = {name for name in names if "\0" not in name}
    parts = [as_pattern(name) for name in names - whole]
    lacking = [part for part in parts if not any(re.fullmatch(part, name) for name in documented())]
    assert not undocumented(whole) + lacking, "add these to docs/metrics.md"


def test_the_code_has_every_metric_of_the_page():
    found, phases = in_code()
    patterns = [re.compile(as_pattern(x)) for x in found if re.search("[a-z]/|/[a-z]", x)]
    for name in documented():
        plain = name.removeprefix("critic/")
        prefix, group = name.rpartition("<")[0], name.partition("/")[0]
        assert (
            plain in found | phases
            or (prefix and (prefix in found or group in found or f"{prefix}\0" in found))
            or any(p.fullmatch(name) for p in patterns if p.pattern.strip(".+/"))
        ), f"docs/metrics.md explains {name}, which no code gives"
