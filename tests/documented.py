"""Names of metrics that docs/metrics.md explains, for comparison with the code and with what runs write."""

import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


@cache
def documented() -> dict[str, re.Pattern]:
    """Returns the names in the first column of the tables, `<name>` in them standing for anything."""
    names = ["eval_before/<name>"]
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `") and not line.startswith("| `tests/"):
            names += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    return {name: re.compile(re.sub(r"<\w+>", "[^/]+(/[^/]+)?", name)) for name in names}


def undocumented(names) -> list[str]:
    """Returns those of the names of a step's numbers that the page lacks."""
    return sorted(n for n in set(names) - {"step"} if not any(p.fullmatch(n) for p in documented().values()))


def check_documented(rows: list[dict]) -> list[dict]:
    """Fails for numbers of steps that the page lacks; returns the rows. A loss of a test's own gives plain names."""
    lacking = undocumented(name for row in rows for name in row if "/" in name)
    assert not lacking, f"docs/metrics.md lacks {', '.join(lacking)}"
    return rows
