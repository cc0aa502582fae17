"""Wraps environments from Gymnasium, old Gym, skyrl-gym, TextArena and reasoning-gym, named by a prefix or a class.

reasoning_gym:TASK   a reasoning-gym puzzle with several attempts (settings: attempts, keep, and the task's own)
gymnasium:ID         an environment in Gymnasium's registry; the settings are keyword arguments for `gymnasium.make`
skyrl_gym:ID         an environment in skyrl-gym's registry (settings: env_config, max_turns)
textarena:ID         a single-player game in TextArena's registry; the settings are the game's keyword arguments
file.py:Class        a class of one of these libraries, or a class with the methods of Gymnasium or Gym
"""

import importlib
import inspect
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from spmdrl.config.user_code import error_text
from spmdrl.env.attempts import Attempts
from spmdrl.env.messages import opening, prompt_of, seed_of
from spmdrl.env.pictures import parts_of

PACKAGES = {
    "reasoning_gym": "reasoning-gym",
    "gymnasium": "gymnasium",
    "skyrl_gym": "skyrl-gym",
    "textarena": "textarena",
}
"""Package names for `pip install`, by environment-name prefix. The prefix is the module name."""
HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
WHOLE = re.compile(r"-?\d+")
Step = tuple[list[dict] | str | None, float | None, bool]


def is_mine(target: object, name: str) -> bool:
    """Return whether this module can wrap an environment.

    target: a class, a partial of one, or None to check only whether `name` has a known prefix.
    """
    if target is None:
        return _prefix(name) in PACKAGES
    kind = target.func if isinstance(target, partial) else target
    return isinstance(kind, type) and _kind(kind) != ""


def wrap(target: object, settings: dict[str, Any]) -> "Attempts | Gym | Skyrl | TextArena":
    """Make an environment from a name with a prefix, or from a class or partial that `is_mine` accepts.

    Raises:
        ValueError: the package or the environment is missing, or the environment rejects the settings.
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
                f"{name} needs the package: pip install {PACKAGES[kind]} ({e}); if its requirements conflict with the "
                "run's, install it into a separate virtual environment, and name that one's interpreter as `python` in "
                "the file for --env"
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
    except Exception as e:  # the libraries raise errors of many types
        raise ValueError(f"{name} cannot be made with the settings {settings} ({error_text(e)})") from e


def _prefix(name: str) -> str:
    return name.partition(":")[0].replace("-", "_")


def _kind(target: type) -> str:
    """Return the name of the library whose interface a class has, or "" if there is none.

    A subclass of a library's class has that library's interface; old Gym counts as Gymnasium. Any other class with
    `step` and `reset` has Gymnasium's interface if it has `action_space`, or if `reset` has no parameters other than
    `seed` and `options` and `step` takes something other than `message`. The second condition excludes TRL's classes,
    whose `reset` takes a row's columns, and this project's classes, whose `step` takes `message`.
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


class Gym:
    """A text environment from Gymnasium (https://gymnasium.farama.org/api/env), or from Gym before 0.26.

    Observations and actions are text. With a Discrete action space, the action is the last integer in a message. If the
    integer is missing or out of range, the model is asked for a valid one, and the environment takes no step. With
    `render_mode="ansi"`, the model sees the rendered text, with highlighted characters in brackets. An observation that
    is a uint8 array [H, W, 3] or [H, W, 4] is shown as an image. The seed is the
    row's `seed` column if present (shared by all samples of a prompt), otherwise the sample's own seed. The row's
    `options` column, a mapping, is passed to `reset`.
    """

    def __init__(self, env: Any, name: str):
        """Wrap the environment `env`. Raises ValueError if its actions are neither text nor integers."""
        self._env = env
        space: Any = getattr(env, "action_space", None)
        self._range: range | None = None
        if type(space).__name__ == "Discrete":
            first = int(getattr(space, "start", 0))
            self._range = range(first, first + int(space.n))
        elif space is not None and type(space).__name__ != "Text":
            raise ValueError(
                f"{name} takes actions of {type(space).__name__}; only texts and whole numbers (Text, Discrete) can be "
                "read from a message: wrap the environment so that its step reads the action from text"
            )

    def reset(self, row: dict, seed: int) -> list[dict]:
        """Return the row's prompt and the first observation."""
        seed = seed_of(row, seed)
        known = inspect.signature(self._env.reset).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        wanted = {"seed": seed, "options": row.get("options")}
        given = {key: each for key, each in wanted.items() if each is not None and (takes_any or key in known)}
        if "seed" not in given and callable(getattr(self._env, "seed", None)):
            self._env.seed(seed)
        result = self._env.reset(**given)
        both = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        seen = self._seen(result[0] if both else result)
        return opening(row, seen) if isinstance(seen, str) or "role" not in seen[0] else [*prompt_of(row), *seen]

    def step(self, message: dict) -> Step:
        """Run the action that a message contains. Return (observation, reward, whether the episode is over)."""
        action: Any = message.get("content") or ""
        if self._range is not None:
            numbers = [int(each) for each in WHOLE.findall(action)]
            if not numbers or numbers[-1] not in self._range:
                return f"Answer with a whole number from {self._range[0]} to {self._range[-1]}.", 0.0, False
            action = numbers[-1]
        result = self._env.step(action)
        if not isinstance(result, tuple) or len(result) not in (4, 5):
            raise TypeError(
                f"step returned {type(result).__name__}; it must return (observation, reward, terminated, truncated, "
                "info) or, as in older versions, (observation, reward, done, info)"
            )
        return self._seen(result[0]), result[1], any(map(bool, result[2:-1]))

    def close(self) -> None:
        """Close the environment."""
        if hasattr(self._env, "close"):
            self._env.close()

    def _seen(self, observation: Any) -> list[dict] | str:
        """Return an observation as text, as messages, or as a list of one part with an image."""
        if getattr(self._env, "render_mode", None) == "ansi":
            return HIGHLIGHT.sub(r"[\1]", str(self._env.render())).strip("\n")
        if parts := parts_of(observation):
            return parts
        if (
            str(getattr(observation, "dtype", "")) == "uint8"
            and observation.ndim == 3
            and observation.shape[2] in (3, 4)
        ):
            return [{"type": "image", "image": observation}]
        messages = observation if isinstance(observation, list) else []
        are_messages = bool(messages) and all(isinstance(m, dict) and "role" in m for m in messages)
        return messages if are_messages else str(observation)


class Skyrl:
    """An environment from skyrl-gym (https://github.com/NovaSky-AI/SkyRL), a subclass of its BaseTextEnv.

    As in skyrl-gym's generator, each episode creates a new environment. The environment gets `env_config` from the
    settings, and the row's columns except `prompt` and `env_class` as `extras`. Its `postprocessed_action` is ignored,
    since sampled tokens are never changed. The numbers in `get_metrics()` become parts of the reward.
    """

    def __init__(self, make: Callable[..., Any], settings: dict[str, Any]):
        """Store the constructor `make` and its `settings`: `env_config`, `max_turns`, and other arguments of `make`."""
        self._make, self._settings, self._env = make, settings, None

    def reset(self, row: dict, seed: int) -> list[dict]:
        """Make the environment and return its first messages."""
        settings = dict(self._settings)
        extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
        if "max_turns" in settings:
            extras["max_turns"] = settings.pop("max_turns")
        config = _Config(settings.pop("env_config", None) or {})
        self._env = self._make(env_config=config, extras=extras, **settings)
        messages, _ = self._env.init(prompt_of(row))
        return [dict(each) for each in messages]

    def step(self, message: dict) -> Step:
        """Use the text of a message as the action. Return (observations, reward, whether the episode is done)."""
        assert self._env is not None, "reset must be called first"
        out = self._env.step(message.get("content") or "")
        if lacking := [key for key in ("observations", "reward", "done") if key not in out]:
            raise TypeError(f"the result of step lacks {lacking[0]}: return a dict with observations, reward and done")
        return [dict(each) for each in out["observations"] or ()] or None, out["reward"], bool(out["done"])

    def reward(self) -> dict[str, float]:
        """Return the environment's metrics as parts of the reward. The score is 0: `step` returned the rewards."""
        found = self._env.get_metrics() if hasattr(self._env, "get_metrics") else {}  # type: ignore[union-attr]
        numbers = {key: float(value) for key, value in found.items() if isinstance(value, (bool, int, float))}
        return {**numbers, "score": 0.0}

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()


class _Config(dict):
    """A dict whose items can also be read as attributes, as in OmegaConf."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(f"env_config has no {name}: give it in the environment's settings") from None
        return _Config(value) if isinstance(value, dict) else value


class TextArena:
    """A single-player game from TextArena (https://github.com/LeonGuertler/TextArena).

    At each turn, a game's observation wrappers return earlier observations again, usually the whole history. Therefore
    only new observations are read, from the unwrapped game and without the player's moves, which the conversation
    already contains. The game's action wrappers are still used. The game gives its reward when it ends. Games draw from
    Python's global random generator, so each game gets its own generator state, seeded with the row's `seed` column if
    present (shared by all samples of a prompt), otherwise with the sample's own seed.
    """

    _one_at_a_time = threading.Lock()

    def __init__(self, make: Callable[[], Any]):
        """Make the game. make: constructor of the game, which may draw random numbers."""
        self._random = random.Random(0).getstate()
        with self._own_random():
            self._env = make()

    def reset(self, row: dict, seed: int) -> list[dict]:
        """Start a single-player game. Return the row's prompt with the game's first observation."""
        seed = seed_of(row, seed)
        self._random = random.Random(seed).getstate()
        with self._own_random():
            try:
                self._env.reset(num_players=1, seed=seed)
            except AssertionError as e:
                raise ValueError(f"only games of one player are supported ({e}): choose another game") from e
            return opening(row, self._seen())

    def step(self, message: dict) -> Step:
        """Make a move. Return (new observations, reward, whether the game ended); the reward is 0 until the end."""
        with self._own_random():
            done, _ = self._env.step(message.get("content") or "")
            seen = self._seen()
            if not done:
                return seen, 0.0, False
            rewards, info = self._env.close()
        reason = str((info or {}).get(0, {}).get("reason") or "")
        return "\n".join(part for part in (seen, reason) if part) or None, (rewards or {}).get(0, 0.0), True

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Let the game draw from its own random state in this context, which only one game can enter at a time."""
        with self._one_at_a_time:
            before = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(before)

    def _seen(self) -> str:
        game = self._env
        while "env" in vars(game):  # `game` is a wrapper
            game = game.env
        player, seen = game.get_observation()
        if isinstance(seen, str):
            return seen
        new = [text for sender, text, kind in seen if sender != player and getattr(kind, "name", "") != "PLAYER_ACTION"]
        return "\n".join(map(str, new))
