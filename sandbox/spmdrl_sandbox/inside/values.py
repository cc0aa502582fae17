"""Encodes values exchanged between a program and its caller as JSON, not as pickles.

None, bools, ints, strings and lists of them are unchanged. Values of other types become an object with one key, a
letter for the type. NumPy scalars and arrays become numbers and lists, and iterators become lists. This module needs
only the standard library.
"""

from __future__ import annotations

import base64
from itertools import islice

TYPE_CHECKING = False
"""Replaces `typing.TYPE_CHECKING`, because importing `typing` would take longer than importing this whole module."""
if TYPE_CHECKING:
    from typing import Any

MOST = 1_000_000
"""Maximum number of items that are taken from an iterator."""


class NotPlainError(TypeError):
    """A value has a type that cannot be encoded, so it is not plain data."""


def encode(value: Any) -> Any:
    """Return the value, encoded in the types of JSON.

    Raises:
        NotPlainError: the value or a value inside it is not plain data. The message names the type.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"f": repr(value)}
    if kind is list:
        return [encode(x) for x in value]
    if kind in (tuple, set, frozenset):
        return {{tuple: "t", set: "s", frozenset: "z"}[kind]: [encode(x) for x in value]}
    if kind is dict:
        return {"d": [[encode(k), encode(v)] for k, v in value.items()]}
    if kind in (bytes, bytearray):
        return {"b": base64.b64encode(value).decode()}
    if kind is complex:
        return {"c": [repr(value.real), repr(value.imag)]}
    bases: tuple[Any, ...] = (bool, int, str, float, list, tuple, dict, set)
    for base in bases:
        # Encode subclasses such as namedtuple, Counter, defaultdict and IntEnum as their base type.
        if isinstance(value, base):
            return encode(base(value))
    if hasattr(value, "tolist"):
        return encode(value.tolist())
    if hasattr(value, "__next__"):
        return [encode(x) for x in islice(value, MOST)]
    raise NotPlainError(f"a value of type {kind.__name__}, which is not plain data")


def decode(data: Any) -> Any:
    """Return the value that `encode` has encoded.

    Raises:
        NotPlainError: the data does not have a form that `encode` produces.
    """
    if data is None or isinstance(data, (bool, int, str)):
        return data
    if isinstance(data, list):
        return [decode(x) for x in data]
    try:
        ((letter, body),) = data.items()
        if letter == "f":
            return float(body)
        if letter == "d":
            return {decode(k): decode(v) for k, v in body}
        if letter == "b":
            return base64.b64decode(body)
        if letter == "c":
            return complex(*map(float, body))
        return {"t": tuple, "s": set, "z": frozenset}[letter](decode(x) for x in body)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise NotPlainError(f"not an encoded value: {str(data)[:80]}") from error
