"""Recognises environments of other libraries, by prefix or by class, and makes them.

reasoning_gym:TASK   a puzzle of reasoning-gym with several attempts (settings: attempts, keep, and the task's own)
gymnasium:ID         an environment that Gymnasium's registry names; the settings are keywords of `gymnasium.make`
skyrl_gym:ID         one that skyrl-gym's registry names (settings: env_config, max_turns)
textarena:ID         a game of one player that TextArena's registry names; the settings are keywords of the game
file.py:Class        a class of one of these libraries, or one with the methods of Gymnasium or Gym
"""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from spmdrl.config.user_code import error_text
from spmdrl.env.attempts import Attempts
from spmdrl.env.gym_envs import Gym, Skyrl, TextArena

PACKAGES = {
    "reasoning_gym": "reasoning-gym",
    "gymnasium": "gymnasium",
    "skyrl_gym": "skyrl-gym",
    "textarena": "textarena",
}
"""Prefix, which is the name of the module -> name of the package."""


def is_mine(target: object, name: str) -> bool:
    """Return whether a name has one of the prefixes (target is None), or its class has the form of a library."""
    if target is None:
        return _prefix(name) in PACKAGES
    kind = target.func if isinstance(target, partial) else target
    return isinstance(kind, type) and _kind(kind) != ""


def wrap(target: object, settings: dict[str, Any]) -> Attempts | Gym | Skyrl | TextArena:
    """Make an environment of a name with a prefix, or of a class or a partial of one that `is_mine` recognised.

    Raises:
        ValueError: the package or its environment is missing, or the environment refuses the settings.
    """
    if isinstance(target, str):
        kind, name = _prefix(target), target
        which = target.partition(":")[2]
        if kind == "reasoning_gym":
            return Attempts(which, **settings)
        try:
            package: Any = importlib.import_module(kind)
        except ImportError as e:
            raise ValueError(
                f"{name} needs the package: pip install {PACKAGES[kind]} ({e}); one whose requirements conflict with "
                "the run's goes into an environment of its own, which `python` in the file for --env names"
            ) from e
        if kind == "skyrl_gym":
            _made(package.spec, name, {"env_id": which})
        make = partial(package.make, which, **({"disable_env_checker": True} if kind == "gymnasium" else {}))
    else:
        known = target.func if isinstance(target, partial) else target
        assert isinstance(known, type) and callable(target)
        kind, name, make = _kind(known), known.__name__, target
    if kind == "skyrl_gym":
        return Skyrl(make, settings)
    if kind == "textarena":
        return TextArena(partial(_made, make, name, settings))
    return Gym(_made(make, name, settings), name)


def _made(make: Callable[..., Any], name: str, settings: dict[str, Any]) -> Any:
    try:
        return make(**settings)
    except Exception as e:  # the libraries have many of their own
        raise ValueError(f"{name} cannot be made with the settings {settings} ({error_text(e)})") from e


def _prefix(name: str) -> str:
    return name.partition(":")[0].replace("-", "_")


def _kind(target: type) -> str:
    """Return the library whose form a class has, or "".

    A subclass of a library's own class has the form of that library. Another class has Gymnasium's form if it has
    `step` and either `action_space` or a `reset` that takes nothing but `seed` and `options`. TRL's classes, whose
    `reset` takes the columns of a row, and this project's, whose `step` takes `message`, do not.
    """
    roots = {base.__module__.partition(".")[0] for base in target.__mro__}
    for kind in ("skyrl_gym", "textarena", "gymnasium"):
        if kind in roots:
            return kind
    if not callable(getattr(target, "step", None)) or not callable(getattr(target, "reset", None)):
        return ""
    if "gym" in roots or hasattr(target, "action_space"):
        return "gymnasium"
    try:
        takes = list(inspect.signature(target.step).parameters)[1:]  # type: ignore[attr-defined]
        wants = list(inspect.signature(target.reset).parameters)[1:]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return ""
    return "gymnasium" if takes != ["message"] and set(wants) <= {"seed", "options"} else ""
