"""Reads tests of programming tasks in the formats of common data sets, and compares program outputs with them.

    {"inputs": [...], "outputs": [...], "fn_name": name}     APPS, TACO, PRIME and verl (`fn_name`: tests are calls)
    [{"input": ..., "output": ..., "testtype": "stdin" or "functional"}, ...]     LiveCodeBench
    {"test": "def check(candidate): ...", "entry_point": name, "prompt": text}     HumanEval
    {"test_list": ["assert ...", ...], "test_setup_code": text}     MBPP
    {"assert_case": ["assert ...", ...]}     SandboxFusion, as verl passes it

A row's ground truth has one of these formats, as a value or as JSON text, or is the Python code of `test` itself.
Keys missing from the ground truth are taken from the row's other columns. Keys that hold tests (FORM_KEYS) are taken
from other columns only if the ground truth itself has no tests. Sources: https://arxiv.org/abs/2105.09938 (APPS),
https://arxiv.org/abs/2403.07974 (LiveCodeBench), https://arxiv.org/abs/2107.03374 (HumanEval),
https://arxiv.org/abs/2108.07732 (MBPP), https://github.com/volcengine/verl (verl/utils/reward_score).
"""

import ast
import json
import math
import re
import sys
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from spmdrl.rewards.base import UngradedError
from spmdrl.rewards.programs import before_function, defines
from spmdrl_sandbox.tests import Suite

KEYS = ("inputs", "outputs", "fn_name", "test", "tests", "entry_point", "prompt", "test_list", "test_setup_code")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
FORM_KEYS = ("inputs", "outputs", "test_list", "test", "tests")
BAD_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Exceptions that `ast.parse` raises for text that it cannot parse."""
FORMS = 'inputs and outputs, test_list, assert_case, test with entry_point, or a list of {"input", "output"}'
TOLERANCE = 1e-6
"""Maximum difference between a number a and an expected non-integer b, relative to max(|a|, |b|, 1)."""
_DIGITS = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
LONGEST_NUMBER = 400
"""Maximum length of a non-integer number in characters."""


@dataclass(frozen=True)
class Case:
    """One test."""

    given: Any
    """Standard input text, or the list of call arguments."""
    wanted: Any
    """Expected standard output text, or expected return value of the call."""


@dataclass(frozen=True)
class Tests:
    """Tests for one task: program inputs and outputs, function calls, or Python code."""

    cases: tuple[Case, ...] = ()
    """Function calls if `name` is set, otherwise standard input/output tests."""
    name: str = ""
    """Name of the function, or of the method of a class `Solution`, to call."""
    suite: Suite | None = None
    """Tests as Python code, instead of `cases`."""
    start: str = ""
    """Start of the program given in the prompt, which the response may continue."""


def read_tests(truth: object, extra: dict[str, Any]) -> Tests:
    """Return the tests of a row.

    truth: the tests in one of the formats listed in the module docstring. extra: the row's other columns. Raises
    UngradedError if the row has no readable tests.
    """
    if isinstance(truth, str):
        truth = {"test": truth} if _asserts(truth) else _parsed(truth)
    if isinstance(truth, list):
        return _from_list(truth, extra)
    if not isinstance(truth, dict):
        raise UngradedError(f"tests are {type(truth).__name__}: give {FORMS}, or their JSON text")
    # If the ground truth itself has one of the formats, ignore columns that merely share a name with one of its keys.
    forms = set(truth) & {"inputs", "outputs", "test_list", "assert_case", "tests", "test"}
    row = {k: extra[k] for k in KEYS if k in extra and not (forms and k in FORM_KEYS)} | truth
    start = row.get("prompt", "")
    start = start if isinstance(start, str) else ""
    if "inputs" in row or "outputs" in row:
        return _from_pairs(row)
    for key in ("test_list", "assert_case", "tests", "test"):
        if key in row:
            tests = _texts([row[key]] if key == "test" else row[key], key)
            return Tests(suite=_suite(tests, row.get("entry_point"), row.get("test_setup_code"), start), start=start)
    raise UngradedError(f"tests have an unknown form (keys: {', '.join(map(str, truth)) or 'none'}): give {FORMS}")


def _asserts(text: str) -> bool:
    if "assert" not in text:
        return False
    try:
        return any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(text)))
    except BAD_PYTHON:
        return False


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UngradedError(f"tests are not valid JSON ({error}): {text[:60]!r}") from None


def _from_pairs(row: dict[str, Any]) -> Tests:
    given, wanted, name = row.get("inputs"), row.get("outputs"), row.get("fn_name") or ""
    if not isinstance(given, list) or not isinstance(wanted, list) or len(given) != len(wanted) or not given:
        sizes = [
            f"a list of {len(x)}" if isinstance(x, list) else f"of the type {type(x).__name__}" for x in (given, wanted)
        ]
        raise UngradedError(
            f"the inputs of tests are {sizes[0]} and the outputs {sizes[1]}: give two lists of equal length above 0"
        )
    if not name:
        return Tests(tuple(Case(_lines(x), _lines(y)) for x, y in zip(given, wanted, strict=True)))
    pairs = zip(given, wanted, strict=True)
    return Tests(tuple(Case(_arguments(x), _json_or_text(y) if isinstance(x, str) else y) for x, y in pairs), str(name))


def _from_list(rows: list, extra: dict[str, Any]) -> Tests:
    if not rows:
        raise UngradedError(f"the list of tests is empty: give {FORMS}")
    if all(isinstance(row, str) for row in rows):
        return Tests(suite=_suite(_texts(rows, "tests"), extra.get("entry_point"), extra.get("test_setup_code")))
    if not all(isinstance(row, dict) and {"input", "output"} <= row.keys() for row in rows):
        raise UngradedError('a list of tests has entries without "input" or "output"')
    kinds = {row.get("testtype", "stdin") for row in rows}
    if kinds == {"stdin"}:
        return Tests(tuple(Case(_lines(row["input"]), _lines(row["output"])) for row in rows))
    if kinds != {"functional"}:
        raise UngradedError(f"tests have testtype {', '.join(sorted(map(str, kinds)))}: use either stdin or functional")
    about = extra.get("metadata", {})
    about = _parsed(about) if isinstance(about, str) else about
    name = about.get("func_name") if isinstance(about, dict) else None
    name = name or extra.get("func_name") or extra.get("fn_name")
    if not isinstance(name, str) or not name:
        raise UngradedError("tests call a function, but no column (func_name, fn_name, metadata) names it")
    return Tests(tuple(Case(_json_lines(row["input"]), _json_or_text(row["output"])) for row in rows), name)


def _suite(tests: tuple[str, ...], entry: object, setup: object, start: str = "") -> Suite:
    before = _texts([setup], "test_setup_code")[0] if setup else ""
    name = entry if isinstance(entry, str) else ""
    if defines(start, name):
        # Tests must call the prompt's helper functions, not same-named functions from the graded program.
        helpers = before_function(start, name)
        try:
            ast.parse(helpers)
        except BAD_PYTHON:
            helpers = ""
        before = f"{helpers}\n{before}"
    for text in tests:
        if not _runs(text, name):
            raise UngradedError(
                "a test asserts nothing when it runs: write assertions outside of functions and classes, or both a "
                f"function check(candidate) and the name of the candidate (entry_point): {text[:60]!r}"
            )
    return Suite(tests, name, before)


def _runs(text: str, entry: str) -> bool:
    """Return whether a test asserts something when executed, or defines a `check` function to call."""
    silent = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)
    body = ast.parse(text).body
    if entry and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body):
        return True
    loud = [node for node in body if not isinstance(node, silent)]
    return any(isinstance(node, (ast.Assert, ast.Raise)) for each in loud for node in ast.walk(each))


def _texts(value: object, key: str) -> tuple[str, ...]:
    """Return the source code of tests. Raises UngradedError for text that is not valid Python."""
    if not isinstance(value, list) or not value or not all(isinstance(x, str) for x in value):
        raise UngradedError(f"{key} must be a list of Python texts")
    for text in value:
        try:
            ast.parse(text)
        except BAD_PYTHON as error:
            raise UngradedError(f"a test of {key} is not valid Python ({error}): {text[:60]!r}") from None
    return tuple(value)


def _lines(value: object) -> str:
    """Return text unchanged, or join a list of lines (as found in some APPS rows)."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else str(value)


def _arguments(value: object) -> list:
    """Return call arguments given as a list or as text with one JSON value per line."""
    if isinstance(value, str):
        return _json_lines(value)
    if not isinstance(value, list):
        raise UngradedError(f"the input of a call is {type(value).__name__}: give a list of arguments")
    return [_whole_keys(each) for each in value]


def _whole_keys(value: Any) -> Any:
    """Convert dict keys to integers if all of them look like integers, because JSON keys are always strings."""
    if isinstance(value, dict) and value and all(isinstance(key, str) and _WHOLE.fullmatch(key) for key in value):
        return {int(key): each for key, each in value.items()}
    return value


def _json_lines(text: object) -> list:
    return [_whole_keys(_json_or_text(line)) for line in str(text).splitlines() if line.strip()]


def _json_or_text(text: object) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def same_text(printed: str, wanted: str) -> bool:
    """Return whether two outputs have the same words on the same lines.

    Numbers are compared by value, within TOLERANCE if the expected number is not an integer. Leading and trailing blank
    lines and whitespace around words are ignored.
    """
    mine, theirs = ([line.split() for line in text.strip().splitlines()] for text in (printed, wanted))
    if [len(line) for line in mine] != [len(line) for line in theirs]:
        return False
    return all(a == b or _near(a, b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True))


def _near(a: str, b: str) -> bool:
    if _DIGITS.fullmatch(a) and _DIGITS.fullmatch(b):
        return _without_zeros(a) == _without_zeros(b)
    if max(len(a), len(b)) > LONGEST_NUMBER or not (_NUMBER.fullmatch(a) and _NUMBER.fullmatch(b)):
        return False
    x, y = float(a), float(b)
    return Decimal(a) == Decimal(b) if _DIGITS.fullmatch(b) or math.isinf(x) or math.isinf(y) else _close(x, y)


def _without_zeros(text: str) -> str:
    digits = text.lstrip("+-").lstrip("0")
    return f"-{digits}" if digits and text[0] == "-" else digits


def _close(a: float, b: float) -> bool:
    try:
        return a == b or abs(a - b) <= TOLERANCE * min(max(1.0, abs(a), abs(b)), sys.float_info.max)
    except OverflowError:
        return False


def same_answer(found: Any, wanted: Any) -> bool:
    """Return whether a call returned the expected value, or the sole item of an expected list (as in APPS)."""
    return _same_value(found, wanted) or (
        isinstance(wanted, list) and len(wanted) == 1 and _same_value(found, wanted[0])
    )


def _same_value(found: Any, wanted: Any) -> bool:
    """Return whether two values are equal.

    A tuple equals a list with the same items. Numbers match an expected float within TOLERANCE.
    """
    if isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(_same_value, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        # Compare integer keys as text, because JSON keys are always strings.
        mine, theirs = ({_key(key): value for key, value in x.items()} for x in (found, wanted))
        return mine.keys() == theirs.keys() and all(_same_value(mine[key], theirs[key]) for key in mine)
    if isinstance(found, (int, float)) and isinstance(wanted, (int, float)):
        return _close(found, wanted) if isinstance(wanted, float) else found == wanted
    return type(found) is type(wanted) and found == wanted


def _key(key: Any) -> Any:
    return str(key) if type(key) is int and abs(key) < 1 << 64 else key
