"""Wraps environments and tools that were written for TRL (https://huggingface.co/docs/trl/openenv).

A class for TRL's `environment_factory` has `reset(**columns)`, which returns None, or a text or a list of parts that is
appended to the last message of the row's prompt. Its other public methods are tools. The reward is the result of
`get_reward()`, or the attribute `reward`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from spmdrl.env.base import BrokenError, Stateless
from spmdrl.env.messages import added, prompt_of
from spmdrl.env.operations import methods_of

_OF_TRL = ("reset", "get_reward")


class Functions(Stateless):
    """An environment whose tools are typed functions."""

    def __init__(self, tools: list[Callable[..., Any]]):
        self.tools = tools


def is_trl(kind: type) -> bool:
    """Return whether a class was written for TRL's `environment_factory`.

    The `reset` method of such a class takes the columns of a dataset row as separate arguments instead of one argument
    `row`.
    """
    reset = inspect.getattr_static(kind, "reset", None)
    if not inspect.isfunction(reset) or "row" in inspect.signature(reset).parameters:
        return False
    if list(inspect.signature(reset).parameters)[2:] == ["seed"] and inspect.isfunction(getattr(kind, "reward", None)):
        return False  # TRL's classes have no method `reward`, so this is a class of ours that names `row` differently
    step = getattr(kind, "step", None)
    takes_message = step is not None and "message" in inspect.signature(step).parameters
    return not takes_message and not hasattr(kind, "restore")


class FromTRL:
    """An environment that wraps an instance of a class written for TRL."""

    def __init__(self, environment: Any):
        self.environment = environment
        self.tools = methods_of(environment, _OF_TRL)
        self.timeout_s = getattr(environment, "timeout_s", None)
        # TRL calls plain (not async) methods one after another, and the environment's code may rely on that.
        self.parallel_calls = all(map(inspect.iscoroutinefunction, self.tools))

    def reset(self, row: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        """Call `reset` with the columns that it takes, and append what it returns to the prompt."""
        parameters = inspect.signature(self.environment.reset).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        columns = {key: value for key, value in row.items() if takes_all or key in parameters}
        starred = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        needed = [key for key, each in parameters.items() if each.default is each.empty and each.kind not in starred]
        if lacking := [key for key in needed if key not in row]:
            raise BrokenError(
                f"its reset({', '.join(parameters)}) looks like TRL's, whose arguments are columns of the row, but the "
                f"row has no column {lacking[0]} (it has {', '.join(row) or 'none'}); if the class is not written for "
                "TRL, write reset(self, row, seed)"
            )
        observation = self.environment.reset(**columns)
        if not isinstance(observation, str | list | None):
            raise TypeError(f"reset must return a text, parts or None, and returned {type(observation).__name__}")
        messages = prompt_of(row) or [{"role": "user", "content": ""}]
        messages[-1]["content"] = added(messages[-1].get("content") or "", observation or "")
        return messages

    def reward(self) -> Any:
        """Call `get_reward` or read the attribute `reward`; return None if the environment has neither."""
        if hasattr(self.environment, "get_reward"):
            return self.environment.get_reward()
        return None if callable(value := getattr(self.environment, "reward", None)) else value
