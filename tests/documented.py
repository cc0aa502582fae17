"""Names of metrics that docs/metrics.md explains, for comparison with the code and with what runs write."""

import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


@cache
def documented() -> dict[str, re.Pattern]:
    """Returns the names in the first column of the tables -> their patterns; `<name>` matches one or two path parts."""
    names = ["eval_before/<name>"]
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `") and not line.startswith("| `tests/"):
            names += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    return {name: re.compile(re.sub(r"<\w+>", "[^/]+(/[^/]+)?", name)) for name in names}


def undocumented(names) -> list[str]:
    """Returns the names of metrics of a step that the page lacks."""
    return sorted(n for n in set(names) - {"step"} if not any(p.fullmatch(n) for p in documented().values()))


def check_documented(rows: list[dict]) -> list[dict]:
    """Fails if the page lacks a metric in the rows; returns the rows.

    Names without a slash are not checked, because losses that tests define give such names.
    """
    lacking = undocumented(name for row in rows for name in row if "/" in name)
    assert not lacking, f"docs/metrics.md lacks {', '.join(lacking)}"
    return rows
