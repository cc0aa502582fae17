"""Reward functions of users, in the forms that other trainers call them in, as one form.

verl:        compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
verl, batch: compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> list
TRL:         reward(prompts, completions, **columns) -> list, None for a row to which it does not apply

The names of the parameters tell the form. Any may be `async`. Functions of lists get lists of one: responses are graded
as they end, and each by itself, so that a score depends on no other response.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from spmdrl.rewards.base import Reward, RewardInput

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = tuple(f"{name}s" for name in VERL)
TRUTHS = ("ground_truth", "answer", "solution")
"""Columns that hold the truth in data sets of TRL's users: each that a row lacks is its truth."""
OF_TRL = ("prompts", "completions", "data_source", *TRUTHS)
"""Arguments that a function in TRL's form gets of every row."""


def adapted(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Callable[[RewardInput], object]:
    """Return a function of one response. kwargs: further arguments of every call (`--reward.kwargs`).

    Raises:
        ValueError: its parameters have none of the forms, or do not take `kwargs`; the message says what is wanted.
    """
    parameters = _parameters(function)
    named = set(parameters)
    if "completions" in named and not set(VERL) <= named:
        call, result = _trl(function, name, parameters, kwargs), partial(only, none=True)
    elif named & set(BATCH):
        call, result = _batch(function, name, kwargs), partial(only, none=False)
    else:
        call, result = _verl(function, name, kwargs), _itself
    # One loop for all gradings, since clients that a function keeps belong to it; made for the first that is awaited.
    runners: list[asyncio.Runner] = []

    def grade(item: RewardInput) -> object:
        value = call(item)
        if inspect.isawaitable(value):
            runners[:] = runners or [asyncio.Runner()]
            value = runners[0].run(_awaited(value))
        return result(value)

    return grade


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _itself(value: Any) -> Any:
    return value


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters by name; some builtins show none."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


def _check(function: Callable[..., Any], name: str, keywords: tuple[str, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a function that cannot be called with these keywords and `kwargs`."""
    if both := [key for key in kwargs if key in keywords]:
        raise ValueError(f"--reward.kwargs {both[0]}: {name} gets {both[0]} of each response; give it another name")
    try:
        inspect.signature(function).bind(**dict.fromkeys(keywords), **kwargs)
    except TypeError as e:
        more = f" and those of --reward.kwargs ({', '.join(kwargs)})" if kwargs else ""
        raise ValueError(
            f"{name} is called with the keywords {', '.join(keywords)}{more}, unless it takes prompts and completions "
            f"as TRL's functions do: {e}. Change its parameters; **kwargs takes all that it does not read"
        ) from e
    except ValueError:
        pass  # some builtins show no signature


def _verl(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Callable[[RewardInput], Any]:
    _check(function, name, VERL, kwargs)

    def call(item: RewardInput) -> Any:
        values = (item.data_source, item.reply, item.ground_truth, item.extra)
        return function(**dict(zip(VERL, values, strict=True)), **kwargs)

    return call


def _batch(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Callable[[RewardInput], Any]:
    _check(function, name, BATCH, kwargs)

    def call(item: RewardInput) -> Any:
        values = ([item.data_source], [item.reply], [item.ground_truth], [item.extra])
        return function(**dict(zip(BATCH, values, strict=True)), **kwargs)

    return call


def _trl(
    function: Callable[..., Any], name: str, parameters: Mapping[str, inspect.Parameter], kwargs: dict[str, Any]
) -> Callable[[RewardInput], Any]:
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    nameless = [key for key, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
    if nameless:
        raise ValueError(f"{name} is called with keywords, and takes {', '.join(nameless)} by position: remove the /")
    if both := [key for key in kwargs if key in OF_TRL]:
        raise ValueError(f"--reward.kwargs {both[0]}: {name} gets {both[0]} of each response; give it another name")
    if unknown := [key for key in kwargs if not takes_more and key not in parameters]:
        raise ValueError(
            f"--reward.kwargs {unknown[0]}: {name} has no such parameter (it has: {', '.join(parameters)}); **kwargs "
            "takes all that it does not read"
        )
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    wanted = [key for key, p in parameters.items() if p.default is p.empty and p.kind not in kinds]

    def call(item: RewardInput) -> Any:
        # A conversation is answered by a message, a text by a text.
        chat = isinstance(item.prompt, list)
        reply: Any = [{"role": "assistant", "content": item.reply}] if chat else item.reply
        columns = dict.fromkeys(TRUTHS, item.ground_truth) | item.extra | {"data_source": item.data_source}
        if both := sorted(kwargs.keys() & columns.keys()):
            raise ValueError(f"--reward.kwargs {both[0]}: the row has a column of this name; give it another one")
        given = {key: [value] for key, value in columns.items()} | kwargs
        given |= {"prompts": [item.prompt], "completions": [reply]}
        if lacking := [key for key in wanted if key not in given]:
            raise TypeError(
                f"it wants {', '.join(lacking)}, and the row has {', '.join(map(str, given))}: give that parameter a "
                "default, the row a column, or --reward.kwargs a value"
            )
        return function(**{key: value for key, value in given.items() if takes_more or key in parameters})

    return call


def only(value: Any, none: bool) -> object:
    """Return the one score of a list. none: None stands for a row to which the function does not apply."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or len(value) != 1:
        what = f"{len(value)} scores" if isinstance(value, (list, tuple)) else f"{type(value).__name__}"
        raise TypeError(f"it returned {what} where a list of one score is wanted, as it got one response")
    if value[0] is None and none:
        return Reward(0.0, applies=False)
    return value[0]
