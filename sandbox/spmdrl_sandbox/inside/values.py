"""Values that travel between a program and its caller: plain data as JSON, never pickles. Standard library only.

None, bools, ints, strings and lists are themselves; other types are an object with one key, the letter of the type.
Scalars and arrays of numpy become numbers and lists, iterators lists.
"""

from __future__ import annotations

import base64
from itertools import islice

TYPE_CHECKING = False
"""As that of `typing`, whose import would take longer than all else here."""
if TYPE_CHECKING:
    from typing import Any

MOST = 1_000_000
"""Most items of an iterator."""


class NotPlainError(TypeError):
    """A value is no plain data."""


def encode(value: Any) -> Any:
    """Return a value in types of JSON.

    Raises:
        NotPlainError: it, or something in it, is no plain data. The message names the type.
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
        # namedtuple, Counter, defaultdict, an enum of numbers: as what they are made of.
        if isinstance(value, base):
            return encode(base(value))
    if hasattr(value, "tolist"):
        return encode(value.tolist())
    if hasattr(value, "__next__"):
        return [encode(x) for x in islice(value, MOST)]
    raise NotPlainError(f"a value of type {kind.__name__}, where plain data is wanted")


def decode(data: Any) -> Any:
    """Undo `encode`.

    Raises:
        NotPlainError: the data has none of its forms.
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
        raise NotPlainError(f"no value: {str(data)[:80]}") from error
