"""Reward functions as functions of one response: built-in ones, and those of users in the forms of other trainers.

verl:        compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
verl, batch: compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> list
TRL:         reward(prompts, completions, **columns) -> list, None for a row to which it does not apply

The names of the parameters show the form. Any function may be `async`. Functions of lists get lists of one: each
response is graded by itself when it ends, so that a score depends on no other response.
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
"""Columns of the truth in data sets of TRL's users; a row's truth stands in those that it lacks."""
OF_TRL = ("prompts", "completions", "data_source", *TRUTHS)
"""Arguments that a function in TRL's form gets of every row."""


def load_builtin(name: str, settings: dict[str, Any]) -> Callable[[RewardInput], Any]:
    """Return the function of a built-in reward. Raises ValueError where it cannot be loaded."""
    row = REWARDS[name]
    module = import_module(f"spmdrl.rewards.{row.module}")
    return module.load(name, settings) if row.pooled else getattr(module, name)


def load_function(spec: str, settings: dict[str, Any]) -> Callable[[RewardInput], object]:
    """Return the function that is named by `builtin:name` or `/path/file.py:name`. Raises ValueError."""
    if spec.startswith("builtin:"):
        return load_builtin(spec.removeprefix("builtin:"), settings)
    path, _, name = spec.rpartition(":")
    return adapted(function_of(Path(path), name, ahead=True), f"{name} in {path}", settings)


def adapted(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Callable[[RewardInput], object]:
    """Return a function of one response. kwargs: further arguments of every call (`--reward.kwargs`).

    Raises ValueError if its parameters have none of the forms, or do not take `kwargs`.
    """
    parameters = _parameters(function)
    trl = "completions" in parameters and not set(VERL) <= parameters.keys()
    batch = not trl and bool(parameters.keys() & set(BATCH))
    call = _trl(function, name, parameters, kwargs) if trl else _verl(function, name, batch, kwargs)
    # One loop for all gradings, since clients that a function keeps belong to it; opened for the first that is awaited.
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
    """Return the parameters by name; some builtins show none."""
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some builtins show no signature
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
            f"as TRL's functions do: {e}. Change its parameters; **kwargs takes all that it does not read"
        ) from e
    except ValueError:
        pass  # some builtins show no signature

    def call(item: RewardInput) -> Any:
        values = (item.data_source, item.reply, item.ground_truth, item.extra)
        return function(**{key: [x] if batch else x for key, x in zip(keywords, values, strict=True)}, **kwargs)

    return call


def _check_names(name: str, keywords: tuple[str, ...], kwargs: dict[str, Any]) -> None:
    if both := [key for key in kwargs if key in keywords]:
        raise ValueError(f"--reward.kwargs {both[0]}: {name} gets {both[0]} of each response; give it another name")


def _trl(
    function: Callable[..., Any], name: str, parameters: Mapping[str, inspect.Parameter], kwargs: dict[str, Any]
) -> Callable[[RewardInput], Any]:
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    nameless = [key for key, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
    if nameless:
        raise ValueError(f"{name} is called with keywords, and takes {', '.join(nameless)} by position: remove the /")
    _check_names(name, OF_TRL, kwargs)
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


def _only(value: Any, none: bool) -> object:
    """Return the one score of a list. none: None stands for a row to which the function does not apply."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or len(value) != 1:
        what = f"{len(value)} scores" if isinstance(value, (list, tuple)) else f"{type(value).__name__}"
        raise TypeError(f"it returned {what} where a list of one score is wanted, as it got one response")
    if value[0] is None and none:
        return Reward(0.0, applies=False)
    return value[0]
