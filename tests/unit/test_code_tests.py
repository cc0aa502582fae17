"""Tests of programming tasks in the forms of data sets, and the comparisons of what programs give."""

import itertools
import json
import time

import pytest

from spmdrl.rewards.base import UngradedError
from spmdrl.rewards.code_tests import Case, read_tests, same_answer, same_text
from spmdrl.rewards.programs import completed, program_of

STDIN = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
LIVE = [
    {"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"},
    {"input": "[]\n1", "output": "[]", "testtype": "functional"},
]


@pytest.mark.parametrize("form", [lambda x: x, json.dumps], ids=["values", "JSON"])
def test_forms_are_read(form):
    assert read_tests(form(STDIN), {}).cases == (Case("1 2\n", "3\n"), Case("3 4", "7"))
    lines = {"inputs": [["1", "2"]], "outputs": [["3", "4"]]}
    assert read_tests(form(lines), {}).cases == (Case("1\n2", "3\n4"),)
    calls = read_tests(form(CALLS), {})
    assert (calls.name, calls.cases) == ("add", (Case([1, 2], 3), Case([3, 4], 7)))
    texts = read_tests(form({"fn_name": "add", "inputs": ['[1]\n"a"'], "outputs": ["[3]"]}), {})
    assert texts.cases == (Case([[1], "a"], [3]),)
    keys = read_tests(form({"fn_name": "add", "inputs": [[{"1": 2}, {"a": 1}]], "outputs": [3]}), {})
    assert keys.cases == (Case([{1: 2}, {"a": 1}], 3),)
    live = read_tests(form(LIVE), {"metadata": '{"func_name": "shift"}'})
    assert (live.name, live.cases) == ("shift", (Case([[1, 2], 3], [4, 5]), Case([[], 1], [])))
    typed = read_tests(form([{"input": "1", "output": "2", "testtype": "stdin"}]), {})
    assert (typed.name, typed.cases) == ("", (Case("1", "2"),))
    human = read_tests(form({"test": "def check(f): assert f()", "entry_point": "f", "prompt": "def f():\n"}), {})
    assert human.suite and (human.suite.entry, len(human.suite.tests), human.start) == ("f", 1, "def f():\n")
    mbpp = read_tests(form({"test_list": ["assert f(1)", "assert f(2)"], "test_setup_code": "import re"}), {})
    assert mbpp.suite and (len(mbpp.suite.tests), mbpp.suite.prelude) == (2, "import re")
    assert len(read_tests(form({"assert_case": ["assert f(1)"]}), {}).suite.tests) == 1
    assert len(read_tests(form(["assert f(1)", "assert f(2)"]), {}).suite.tests) == 2


def test_what_a_truth_lacks_may_stand_in_other_columns():
    columns = {"entry_point": "f", "prompt": [{"role": "user", "content": "..."}], "index": 3}
    found = read_tests({"test": "def check(f): pass"}, columns)
    assert found.suite and (found.suite.entry, found.start) == ("f", "")
    assert read_tests(LIVE, {"fn_name": "shift"}).name == "shift"


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        ("{'inputs': []}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("", "not valid JSON"),
        (7, "tests are int"),
        ("7", "tests are int"),
        ({}, "none"),
        ({"answer": "7"}, "have an unknown form (keys: answer)"),
        ({"inputs": ["1"]}, "are a list of 1 and the outputs of the type NoneType:"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "are a list of 2 and the outputs a list of 1:"),
        ({"inputs": [], "outputs": []}, "are a list of 0 and the outputs a list of 0:"),
        ({"inputs": "1", "outputs": "1"}, "are of the type str"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "a list of arguments"),
        ([], "empty"),
        ([{"input": "1"}], 'without "input" or "output"'),
        ([{"input": "1", "output": "1", "testtype": "gpu"}], "testtype gpu"),
        (LIVE, "names it"),
        ({"test_list": "assert f()"}, "must be a list of Python texts"),
        ({"test_list": []}, "must be a list of Python texts"),
        ({"test_list": ["assert f( == 1"]}, "not valid Python"),
        ({"test_list": ["assert f()"], "test_setup_code": "import"}, "not valid Python"),
        ({"test": 3}, "must be a list of Python texts"),
        ({"test": "def check(candidate): assert candidate(1)"}, "asserts nothing when it runs"),
        ({"test": "def test_a():\n    assert f(1)", "entry_point": "f"}, "asserts nothing when it runs"),
        ({"test": "class TestCases:\n    def test(self): assert f(1)", "entry_point": "f"}, "asserts nothing"),
        ({"test_list": ["assert f(1)", "f(2)"]}, "asserts nothing when it runs"),
    ],
)
def test_a_row_without_tests_is_named(truth, words):
    with pytest.raises(UngradedError) as caught:
        read_tests(truth, {})
    assert words in str(caught.value)
    if not isinstance(truth, str):
        with pytest.raises(UngradedError):
            read_tests(json.dumps(truth), {})


@pytest.mark.parametrize(
    ("text", "program", "fenced"),
    [
        ("print(1)", "print(1)", False),
        ("So:\n```python\nprint(1)\n```\nDone.", "print(1)\n", True),
        ("```python\na\n```\nbetter:\n```py\nb\n```", "b\n", True),
        ("```python\na\n```\nIt prints\n```\n3\n```", "a\n", True),
        ("```\na\n```", "a\n", True),
        ("```python\ncut short", "cut short", True),
        ("```cpp\nint main() {}\n```", "", False),
        ("- in a list\n  ```python\n  x = 1\n  ```", "x = 1\n", True),
        ("1. first\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n", True),
        ("- ```python\n  if x:\n      y\n  ```\nDone.", "if x:\n    y\n", True),
        ("  ```python\nx\n  ```", "x\n", True),
        ("~~~python\na\n~~~\nDone.", "a\n", True),
        ('~~~~python\na = """\n```\n~~~\n"""\n~~~~\nDone.', 'a = """\n```\n~~~\n"""\n', True),
        ("````py\nb\n```\nc\n````", "b\n```\nc\n", True),
        ("> So:\n>\n> ```python\n> if x:\n>     y\n>\n> z\n> ```\n> Done.", "if x:\n    y\n\nz\n", True),
        (">> ```py\n>> x\nno quote\n```\ny\n```", "x\n", True),
        ("```py\n>>> 1\n> ```\n```", ">>> 1\n> ```\n", True),
        ("", "", False),
    ],
)
def test_the_program_in_a_response(text, program, fenced):
    assert program_of(text) == (program, fenced)


def test_a_long_response_is_searched_in_time():
    began = time.monotonic()
    program_of("```" * 200_000)
    program_of("```python\n" * 50_000)
    program_of(" " * 1_000_000 + "```")
    program_of("```" + " " * 1_000_000)
    same_text("1" * 250_000 + "x", "5")
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        ("3\n", "3", True),
        ("\n 1  2 \n3\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("1\n\n2", "1\n2", False),
        ("0.3333333", "0.33333333", True),
        ("0.333", "0.33333333", False),
        ("2.0", "2", True),
        ("1e3", "1000.0", True),
        ("007", "7", True),
        ("-0", "0", True),
        ("1_0", "10", False),
        ("1e9", "1000000007", False),
        ("1e9", "1000000000", True),
        ("1e9999", "2e9999", False),
        ("999999999.9999999", "1000000000", False),
        ("1000000000000001", "1000000000000000", False),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("yes", "YES", False),
        ("nan", "nan", True),
        ("nan", "1", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_outputs_compare_by_words_and_numbers(printed, wanted, same):
    assert same_text(printed, wanted) is same


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        (3, 3, True),
        (3, 4, False),
        (3, "3", False),
        (True, 1, True),
        (2.0, 2, True),
        (123456700.0, 123456789, False),
        (123456789, 123456789.0, True),
        (0.1 + 0.2, 0.3, True),
        (float("nan"), 1.0, False),
        (10**400, 1.5, False),
        ((1, 2), [1, 2], True),
        ([[1], [2, 3]], [[1], [2, 3]], True),
        ([1], [1, 2], False),
        ({1: "a"}, {"1": "a"}, True),
        ({"1": "a"}, {"1": "b"}, False),
        (10**5000, 10**5000 + 1, False),
        ({10**5000: 1}, {"1": 1}, False),
        (3, [3], True),
        (3, [3, 4], False),
        ([3], [[3]], True),
        (None, None, True),
        (None, [], False),
        ({1, 2}, [1, 2], False),
    ],
    ids=itertools.count(),
)
def test_values_of_calls_compare(found, wanted, same):
    assert same_answer(found, wanted) is same


PROMPT = "from typing import List\n\ndef half(x): return x / 2\n\ndef f(xs: List[int]):\n    "


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("return xs", PROMPT + "return xs"),
        ("return xs\n```\nIt works.", PROMPT + "return xs\n"),
        ("return xs\n\ndef f(xs):\n    return None", PROMPT + "return xs\n\n"),
        ("return xs\n\nThis is why.\n", PROMPT + "return xs\n\n"),
        ("```python\n    return xs\n```", PROMPT + "    return xs\n"),
        (
            "```python\ndef f(xs): return xs\n```",
            "from typing import List\n\ndef half(x): return x / 2\n\n\ndef f(xs): return xs\n",
        ),
        ("def f(xs): return xs", "from typing import List\n\ndef half(x): return x / 2\n\n\ndef f(xs): return xs"),
    ],
)
def test_a_completion_and_its_prompt_make_a_program(text, program):
    assert completed(PROMPT, "f", text) == program
