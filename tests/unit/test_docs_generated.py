"""Parts of README.md and docs/ that the code declares stand there as docs/generate.py writes them."""

import re
import runpy
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "generate.py"))
WRITTEN = [
    page for page in TOOL["PAGES"] if re.search("<!-- (generated: |file: recipes/)", page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_a_page_is_what_the_code_declares(page):
    text = page.read_text(encoding="utf-8")
    assert TOOL["generated"](text) == text, "run: python docs/generate.py"


def test_every_part_stands_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in WRITTEN)
    assert sorted(re.findall(r"<!-- generated: ([^>]+) -->", text)) == sorted(TOOL["PARTS"])
    assert sorted(re.findall(r"<!-- end of ([^>]+) -->", text)) == sorted(TOOL["PARTS"])
