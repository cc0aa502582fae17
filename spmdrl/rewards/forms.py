"""Adapts built-in reward functions, and user functions written for other trainers, to functions of one response.

verl:        compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
verl, batch: compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> list
TRL:         reward(prompts, completions, **columns) -> list, with None for a row that the function does not apply to

The signature is detected from the parameter names. Functions can be `async`. Batch functions are called with lists of
one item, because each response is graded on its own as soon as it is finished.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from spmdrl.config.builtin import REWARDS
from spmdrl.config.user_code import function_of
from spmdrl.rewards.base import Reward, RewardInput

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = tuple(f"{name}s" for name in VERL)
TRUTHS = ("ground_truth", "answer", "solution")
"""Column names for the ground truth in TRL data sets. A function receives the row's ground truth under each of these
names unless the row has a column with that name."""
OF_TRL = ("prompts", "completions", "data_source", *TRUTHS)
"""Arguments that are available to a TRL-style function for every row."""


def load_builtin(name: str, settings: dict[str, Any]) -> Callable[[RewardInput], Any]:
    """Return a built-in reward function. Raises ValueError if it cannot be loaded."""
    row = REWARDS[name]
    module = import_module(f"spmdrl.rewards.{row.module}")
    return module.load(name, settings) if row.pooled else getattr(module, name)


def load_function(spec: str, settings: dict[str, Any]) -> Callable[[RewardInput], object]:
    """Return the reward function `builtin:name` or `/path/file.py:name`. Raises ValueError if it cannot be loaded."""
    if spec.startswith("builtin:"):
        return load_builtin(spec.removeprefix("builtin:"), settings)
    path, _, name = spec.rpartition(":")
    return adapted(function_of(Path(path), name, ahead=True), f"{name} in {path}", settings)


def adapted(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Callable[[RewardInput], object]:
    """Wrap a user function as a function that grades one response.

    name: the function's name in messages. kwargs: additional arguments for every call (`--reward.kwargs`). Raises
    ValueError if the parameters match none of these signatures or do not accept `kwargs`.
    """
    parameters = _parameters(function)
    trl = "completions" in parameters and not set(VERL) <= parameters.keys()
    batch = not trl and bool(parameters.keys() & set(BATCH))
    call = _trl(function, name, parameters, kwargs) if trl else _verl(function, name, batch, kwargs)
    # All calls share one event loop, because HTTP clients kept by a user function work only in the loop that created
    # them. The runner is created when the function first returns an awaitable.
    runners: list[asyncio.Runner] = []

    def grade(item: RewardInput) -> object:
        value = call(item)
        if inspect.isawaitable(value):
            runners[:] = runners or [asyncio.Runner()]
            value = runners[0].run(_awaited(value))
        return _only(value, none=trl) if trl or batch else value

    return grade


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name, or an empty mapping for C functions without a signature."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


def _verl(function: Callable[..., Any], name: str, batch: bool, kwargs: dict[str, Any]) -> Callable[[RewardInput], Any]:
    keywords = BATCH if batch else VERL
    _check_names(name, keywords, kwargs)
    try:
        inspect.signature(function).bind(**dict.fromkeys(keywords), **kwargs)
    except TypeError as e:
        more = f" and those of --reward.kwargs ({', '.join(kwargs)})" if kwargs else ""
        raise ValueError(
            f"{name} is called with the keywords {', '.join(keywords)}{more}, unless it takes prompts and completions "
            f"as TRL's functions do: {e}. Change its parameters; add **kwargs to accept arguments that it does not use"
        ) from e
    except ValueError:
        pass  # C functions may not have a signature to check

    def call(item: RewardInput) -> Any:
        values = (item.data_source, item.reply, item.ground_truth, item.extra)
        return function(**{key: [x] if batch else x for key, x in zip(keywords, values, strict=True)}, **kwargs)

    return call


def _check_names(name: str, keywords: tuple[str, ...], kwargs: dict[str, Any]) -> None:
    if both := [key for key in kwargs if key in keywords]:
        raise ValueError(
            f"--reward.kwargs {both[0]}: {name} already receives an argument {both[0]} for each response; rename yours"
        )


def _trl(
    function: Callable[..., Any], name: str, parameters: Mapping[str, inspect.Parameter], kwargs: dict[str, Any]
) -> Callable[[RewardInput], Any]:
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    nameless = [key for key, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
    if nameless:
        raise ValueError(f"{name} is called with keywords but takes {', '.join(nameless)} by position: remove the /")
    _check_names(name, OF_TRL, kwargs)
    if unknown := [key for key in kwargs if not takes_more and key not in parameters]:
        raise ValueError(
            f"--reward.kwargs {unknown[0]}: {name} has no such parameter (it has: {', '.join(parameters)}); add "
            "**kwargs to accept arguments that it does not use"
        )
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    wanted = [key for key, p in parameters.items() if p.default is p.empty and p.kind not in kinds]

    def call(item: RewardInput) -> Any:
        # If the prompt is a list of chat messages, so is the completion, as in TRL.
        chat = isinstance(item.prompt, list)
        reply: Any = [{"role": "assistant", "content": item.reply}] if chat else item.reply
        columns = dict.fromkeys(TRUTHS, item.ground_truth) | item.extra | {"data_source": item.data_source}
        if both := sorted(kwargs.keys() & columns.keys()):
            raise ValueError(f"--reward.kwargs {both[0]}: the row has a column of this name; rename the argument")
        given = {key: [value] for key, value in columns.items()} | kwargs
        given |= {"prompts": [item.prompt], "completions": [reply]}
        if lacking := [key for key in wanted if key not in given]:
            raise TypeError(
                f"it requires {', '.join(lacking)}, but the arguments for this row are {', '.join(map(str, given))}: "
                "give the parameter a default, add a column to the row, or set a value in --reward.kwargs"
            )
        return function(**{key: value for key, value in given.items() if takes_more or key in parameters})

    return call


def _only(value: Any, none: bool) -> object:
    """Return the only score in a list. none: True to accept None, for a row that the function does not apply to."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or len(value) != 1:
        what = f"{len(value)} scores" if isinstance(value, (list, tuple)) else f"{type(value).__name__}"
        raise TypeError(f"it returned {what} for one response: return a list of one score")
    if value[0] is None and none:
        return Reward(0.0, applies=False)
    return value[0]
