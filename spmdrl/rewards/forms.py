"""Reward functions of users, in the forms that other trainers call them in, as one form.

verl:        compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
verl, batch: compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> list
TRL:         reward(prompts, completions, **columns) -> list, None for a row to which it does not apply

The names of the parameters tell the form. Any may be `async`. Functions of lists get lists of one: responses are graded
as they end, and each by itself, so that a score depends on no other response.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from spmdrl.rewards.base import Reward, RewardInput

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = tuple(f"{name}s" for name in VERL)
TRUTHS = ("ground_truth", "answer", "solution")
"""Columns that hold the truth in data sets of TRL's users: each that a row lacks is its truth."""


def adapted(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Callable[[RewardInput], object]:
    """Return a function of one response. kwargs: further arguments of every call (`--reward.kwargs`).

    Raises:
        ValueError: its parameters have none of the forms; the message says what is wanted.
    """
    named, takes_more = _parameters(function)
    if "completions" in named and not set(VERL) <= named:
        call, result = _trl(function, named, takes_more, kwargs), partial(only, none=True)
    elif set(BATCH) <= named:
        call, result = _batch(function, kwargs), partial(only, none=False)
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


def _parameters(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names of parameters and whether any keyword is taken. Some builtins show none."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return set(), True
    return set(parameters), any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _verl(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Callable[[RewardInput], Any]:
    try:
        inspect.signature(function).bind(**dict.fromkeys(VERL), **kwargs)
    except TypeError as e:
        more = f" and those of --reward.kwargs ({', '.join(kwargs)})" if kwargs else ""
        raise ValueError(
            f"{name} is called with the keywords {', '.join(VERL)}{more}, unless it takes prompts and completions as "
            f"TRL's functions do: {e}"
        ) from e
    except ValueError:
        pass  # some builtins show no signature

    def call(item: RewardInput) -> Any:
        values = (item.data_source, item.solution, item.ground_truth, item.extra)
        return function(**dict(zip(VERL, values, strict=True)), **kwargs)

    return call


def _batch(function: Callable[..., Any], kwargs: dict[str, Any]) -> Callable[[RewardInput], Any]:
    def call(item: RewardInput) -> Any:
        values = ([item.data_source], [item.solution], [item.ground_truth], [item.extra])
        return function(**dict(zip(BATCH, values, strict=True)), **kwargs)

    return call


def _trl(
    function: Callable[..., Any], named: set[str], takes_more: bool, kwargs: dict[str, Any]
) -> Callable[[RewardInput], Any]:
    def call(item: RewardInput) -> Any:
        # A conversation is answered by a message, a text by a text.
        chat = isinstance(item.prompt, list)
        reply: Any = [{"role": "assistant", "content": item.solution}] if chat else item.solution
        columns = dict.fromkeys(TRUTHS, item.ground_truth) | item.extra | {"data_source": item.data_source}
        given = {name: [value] for name, value in columns.items()} | kwargs
        given |= {"prompts": [item.prompt], "completions": [reply]}
        return function(**{k: v for k, v in given.items() if takes_more or k in named})

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
