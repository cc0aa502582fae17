"""Built-in rewards against verl's own graders: they agree but where docs/rewards.md lists a difference and its reason.

tests/golden/rewards_verl.json holds the strings and verl's verdicts.
"""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.load import QUICK
from spmdrl.rewards.math import load
from spmdrl.rewards.route import PREFIXES, ROUTE

REPO = Path(__file__).resolve().parents[2]
GOLDEN = json.loads((REPO / "tests" / "golden" / "rewards_verl.json").read_text())
PAGE = (REPO / "docs" / "rewards.md").read_text()
LONGEST = 44
"""Characters of a text that the page shows."""
FUNCTIONS: dict[str, Callable[[RewardInput], Reward]] = {}


def table(name: str) -> list[list[str]]:
    """Cells of a table of the page, without its head."""
    found = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert found, name
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in found[1].splitlines()[2:]]


def verdict(grader: str, solution: str, truth: object) -> float | str:
    try:
        return FUNCTIONS[grader](RewardInput("", solution, truth)).score
    except ValueError:
        return "error"


def word(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def shown(value: object) -> str:
    """A text as the page shows it: escaped, without its middle where it is long."""
    text = json.dumps(value)
    if isinstance(value, str):
        text = text[1:-1].replace("\\\\", "\\")
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return f"`{text}`" if text.strip() else "(empty)"


@pytest.fixture(scope="module", autouse=True)
def functions():
    level = logging.getLogger("math_verify").level
    FUNCTIONS.update({**QUICK, "math": load("math", {})})
    yield
    logging.getLogger("math_verify").setLevel(level)


def test_parity_verdicts_are_verls_but_for_the_listed_differences():
    """A difference that is not listed fails, and so does a listed one that is none, or has other verdicts."""
    found: dict[tuple[str, ...], list[str]] = {}
    for case in GOLDEN["cases"]:
        for grader, verls in case["verl"].items():
            ours = verdict(grader, case["solution"], case["truth"])
            if ours != verls:
                key = (case["name"], shown(case["solution"]), shown(case["truth"]), word(verls), word(ours))
                found.setdefault(key, []).append(grader)
    rows = table("differences")
    listed = {(name, text, truth, verls, ours): who for name, text, truth, who, verls, ours, _ in rows}
    assert len(listed) == len(rows)
    assert {key: ", ".join(graders) for key, graders in found.items()} == listed
    assert all(why for *_, why in rows), "every difference has a reason"


def test_the_corpus_is_wide():
    cases = GOLDEN["cases"]
    assert len({case["name"] for case in cases}) == len(cases)
    total = sum(len(case["verl"]) for case in cases)
    assert f"{len(cases)} made-up responses" in PAGE and f"{total:,} verdicts" in PAGE
    assert len({case["solution"] for case in cases}) >= 450
    for grader, least in {"gsm8k": 90, "boxed": 350, "math_dapo": 350, "math": 150, "exact_match_qa": 50}.items():
        verdicts = [case["verl"][grader] for case in cases if grader in case["verl"]]
        assert len(verdicts) >= least, grader
        assert min(verdicts.count(1.0), len(verdicts) - verdicts.count(1.0)) >= least // 8, (
            f"{grader}: one verdict alone"
        )


def test_the_page_has_the_route():
    rows = table("route")
    assert {source.strip("`"): reward.strip("`") for source, reward in rows} == {
        **ROUTE,
        **{f"{prefix}...": reward for prefix, reward in PREFIXES.items()},
    }
