"""Typed functions as tools: schemas against transformers' own, and arguments as models write them."""

import contextlib
import enum
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from spmdrl.env.arguments import ArgumentsError, fitted
from spmdrl.env.operations import Tool, by_name, checked_schema, methods_of, tool_of


def add(a: int, b: float = 0.5) -> float:
    """Add two numbers.

    They may be large.

    Args:
        a: The first number.
        b: The second number,
            which may have digits
            after the point.

    Returns:
        The sum.
    """
    return a + b


def search(
    query: str,
    kinds: list[str] | None = None,
    limits: dict[str, int] | None = None,
    mode: Literal["fast", "slow"] = "fast",
    pair: tuple[int, str] = (1, ""),
    anything: Any = None,
    number: int | str = 1,
    several: list[int] | dict[str, str] | None = None,
    flag: bool = False,
) -> dict:
    """Search.

    Args:
        query: The words: as a person would say them.
        kinds: Kinds of pages
        limits: The most of each
        mode: The way
        pair: A pair
        anything: Whatever
        number: A number
        several: Several
        flag: Yes or no (choices: [true, false])
    """
    return {}


async def later(seconds: Optional[float] = None, tags: list = [], plain: dict = {}, both: "int | None" = 1) -> str:  # noqa: UP045, B006
    """Wait.

    Args:
        seconds: How long
        tags: Words
        plain: Things
        both: A number (choices: [1, 2])

    Raises:
        ValueError: never
    """
    return ""


@pytest.mark.parametrize("function", [add, search, later])
def test_schema_equals_that_of_transformers(function):
    wanted = get_json_schema(function)
    wanted["function"].pop("return", None)
    assert tool_of(function).schema == wanted


class Page(TypedDict):
    title: str


def test_schema_of_types_that_transformers_does_not_take():
    def read(pages: Sequence[Page], row: tuple[int, ...], text: Annotated[str, "not shown"], **more: Any):
        """Read.

        Args:
            text (str): With its type.
        """

    tool = tool_of(read)
    assert tool.schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "pages": {"type": "array", "items": {"type": "object"}},
            "row": {"type": "array", "items": {"type": "integer"}},
            "text": {"type": "string", "description": "With its type."},
        },
        "required": ["pages", "row", "text"],
    }
    assert not tool.closed


def test_functions_that_are_no_tools_are_refused():
    class Colour(enum.Enum):
        RED = 1

    def bare(x: int):
        pass

    def untyped(x):
        """Has a docstring."""

    def odd(x: Colour):
        """Has a docstring."""

    def inside(x: list[set[int]]):
        """Has a docstring."""

    def by_position(x: int, /):
        """Has a docstring."""

    def star(*x: int):
        """Has a docstring."""

    def unknown(x: "Nowhere"):  # noqa: F821  # pyright: ignore
        """Has a docstring."""

    def choices(x: int):
        """Choose.

        Args:
            x: One (choices: [1, 2)
        """

    for function, says in [
        (bare, "bare is not a tool: .*docstring"),
        (lambda x: x, "is not a tool"),
        (len, None),
        (untyped, "the argument x of tool untyped has no type: annotate it, as in `x: str`"),
        (odd, "x of tool odd has the type Colour, which JSON cannot express"),
        (inside, "x of tool inside has the type set"),
        (by_position, "takes x by position"),
        (star, "takes x by position"),
        (unknown, "types of tool unknown cannot be read: NameError"),
        (choices, "choices of x of tool choices are not a JSON list"),
        (5, "int is not a tool"),
    ]:
        with pytest.raises(ValueError, match=says):
            tool_of(function)  # type: ignore[arg-type]


def test_two_tools_of_one_name_are_refused():
    def other():
        """Add."""

    other.__name__ = "add"
    with pytest.raises(ValueError, match="it has two tools named add: rename one"):
        by_name([tool_of(add), tool_of(other)], "it")


def test_methods_with_a_docstring_are_tools():
    class Base:
        def first(self, x: int) -> int:
            """First."""
            return x

        def second(self) -> int:
            """Second."""
            return 2

    class Own(Base):
        @property
        def dear(self):
            """It must not be evaluated."""
            raise RuntimeError

        def undocumented(self):
            return 3

        def _hidden(self):
            """Hidden."""

        def reset(self):
            """Reset."""

        @staticmethod
        def fixed(y: str) -> str:
            """Fixed."""
            return y

        def second(self) -> int:
            return 22

    methods = methods_of(Own(), ("reset",))
    assert [method.__name__ for method in methods] == ["first", "second", "fixed"]
    assert [tool_of(m).bound(a)() for m, a in zip(methods, [{"x": "4"}, {}, {"y": "z"}], strict=True)] == [4, 22, "z"]


def fit(kind: dict, value: Any) -> Any:
    return fitted({"name": "tool", "parameters": {"properties": {"x": kind}, "required": ["x"]}}, {"x": value}, True)[
        "x"
    ]


INTEGER, NUMBER, TEXT, BOOL = ({"type": kind} for kind in ("integer", "number", "string", "boolean"))


@pytest.mark.parametrize(
    ("kind", "value", "fits"),
    [
        (INTEGER, 4, 4),
        (INTEGER, " -4 ", -4),
        (INTEGER, 4.0, 4),
        (INTEGER, 10**30, 10**30),
        (NUMBER, 4, 4),
        (NUMBER, "4e-3", 0.004),
        (NUMBER, ".5", 0.5),
        (TEXT, 4.5, "4.5"),
        (TEXT, True, "true"),
        (BOOL, " True", True),
        ({"type": ["integer", "string"]}, "4", "4"),
        ({"type": ["integer", "string"]}, 4, 4),
        ({"anyOf": [INTEGER, {"type": "null"}]}, None, None),
        ({"type": "integer", "nullable": True}, None, None),
        ({"type": "array", "items": INTEGER}, ["1", 2.0], [1, 2]),
        ({"type": "array", "prefixItems": [INTEGER, TEXT]}, ["1", 2], [1, "2"]),
        ({"type": "object", "additionalProperties": INTEGER}, {"a": "1"}, {"a": 1}),
        ({"type": "object", "properties": {"a": INTEGER}}, {"a": "1", "b": "2"}, {"a": 1, "b": "2"}),
        ({"type": "integer", "enum": [1, 2]}, "2", 2),
        ({"$ref": "#/nowhere"}, {"a": 1}, {"a": 1}),
        ({"type": "date"}, "today", "today"),
        ({}, None, None),
        (True, 5, 5),
    ],
)
def test_arguments_become_the_types_of_the_schema(kind, value, fits):
    got = fit(kind, value)
    assert got == fits and type(got) is type(fits)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (INTEGER, "four", 'the argument x of tool must be an integer, but it is "four"'),
        (INTEGER, 4.5, "must be an integer, but it is 4.5"),
        (INTEGER, math.nan, "must be an integer"),
        (INTEGER, math.inf, "must be an integer"),
        (INTEGER, True, "must be an integer, but it is true"),
        (INTEGER, "9" * 5000, "must be an integer"),
        (INTEGER, None, "must be an integer, but it is null"),
        (NUMBER, "1e", "must be a number"),
        (BOOL, 1, "must be a boolean"),
        (TEXT, {"a": 1}, "must be a string"),
        (TEXT, ["\ud800"], "must be a string"),
        ({"type": "string", "enum": ["a"]}, "b", r'must be one of \["a"\], but it is "b"'),
        ({"type": "array", "items": INTEGER}, [1, "b"], "item 1 of the argument x of tool must be an integer"),
        ({"type": "object", "required": ["a"]}, {}, "lacks a"),
        ({"anyOf": [INTEGER, BOOL]}, "b", "has none of the allowed types"),
    ],
)
def test_arguments_that_do_not_fit_are_told(kind, value, says):
    with pytest.raises(ArgumentsError, match=says):
        fit(kind, value)


def test_names_of_arguments():
    tool = tool_of(add)
    assert tool.bound({"a": "1"})() == 1.5
    assert tool.bound({"a": 1, "b": None})() == 1.5, "models write null for what they leave out"
    with pytest.raises(ArgumentsError, match="the call of add lacks the argument a"):
        tool.bound({})
    with pytest.raises(ArgumentsError, match='add has no argument "c": its arguments are a, b'):
        tool.bound({"a": 1, "c": 2})
    own = Tool(checked_schema({"name": "own"}, "it"), lambda arguments: arguments, by_keyword=False, closed=False)
    assert own.name == "own" and own.bound({"c": 2})() == {"c": 2}
    for bad in (5, {}, {"function": {"name": ""}}, {"name": "x", "parameters": 5}):
        with pytest.raises(ValueError, match="schema"):
            checked_schema(bad, "it")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(JSON, st.dictionaries(st.sampled_from(["a", "b", "query", "mode", "kinds", "limits", "flag"]), JSON))
def test_any_arguments_fit_or_are_refused(value, arguments):
    for function in (add, search):
        try:
            tool_of(function).bound(arguments)
        except ArgumentsError as e:
            assert len(str(e)) < 500
    for kind in (INTEGER, NUMBER, TEXT, BOOL, {"type": ["array", "null"]}, {"anyOf": [INTEGER, {"type": "object"}]}):
        with contextlib.suppress(ArgumentsError):
            fit(kind, value)


def test_a_worker_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'numpy'} & set(sys.modules)"
    code = f"import sys, spmdrl.env.worker, spmdrl.env.builtin; print({heavy})"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "set()"
