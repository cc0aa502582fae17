"""Makes a grader from `--reward.function`."""

from collections.abc import Callable
from pathlib import Path

from spmdrl.config.schema import RewardConfig
from spmdrl.data.builtin import nearest
from spmdrl.rewards.base import Grader, Reward, RewardError, RewardInput, as_reward, describe
from spmdrl.rewards.pool import Pool
from spmdrl.rewards.quick import QUICK
from spmdrl.rewards.worker import POOLED

DEFAULT_FUNCTION = "compute_score"


class Direct:
    """Grader that calls a trusted, quick function at submit."""

    def __init__(self, name: str, function: Callable[[RewardInput], object], finite: bool = True):
        self.name, self._function, self._finite = name, function, finite
        self.timeouts = self.pending = 0
        self._done: list[tuple[object, Reward]] = []

    def submit(self, key: object, item: RewardInput) -> None:
        """Grade one response. Raises RewardError."""
        try:
            self._done.append((key, as_reward(self._function(item), self._finite)))
        except Exception as e:
            raise RewardError(f"reward function {self.name} failed on {describe(key)}: {type(e).__name__}: {e}") from e

    def poll(self) -> list[tuple[object, Reward]]:
        """Results since the last call."""
        done, self._done = self._done, []
        return done

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Reward]]:
        """Results since the last call; every response was graded at submit."""
        return self.poll()

    def close(self) -> None:
        """Do nothing: there is no process to end."""


def load_reward(cfg: RewardConfig, finite: bool = True) -> Grader:
    """The grader that a run's settings name, ready to take work.

    finite: False lets scores pass that are not finite, for a caller that leaves such samples out.

    Raises ValueError naming `--reward.function` for an unknown built-in, a missing file or function, and a file that
    does not import.
    """
    name = cfg.function
    if name in QUICK:
        return Direct(name, QUICK[name], finite)
    is_file = name not in POOLED
    on_timeout = "zero" if scores_timeouts(cfg) else "error"
    function = _file_function(name) if is_file else f"builtin:{name}"
    return Pool(function, cfg.workers, cfg.timeout, on_timeout, name, finite)


def scores_timeouts(cfg: RewardConfig) -> bool:
    """True where a grading that takes too long scores 0; else it ends the job, or no grading can take long."""
    if cfg.function in QUICK:
        return False
    return cfg.on_timeout == "zero" or (cfg.on_timeout == "auto" and cfg.function in POOLED)


def check_cost(cfg: RewardConfig, cost: str) -> None:
    """Refuse a cost (`--safety.cost`) from the parts of a reward whose stopped gradings have 0 in every part."""
    if cost and scores_timeouts(cfg):
        raise ValueError(
            f"--reward.on-timeout {cfg.on_timeout}: a grading by {cfg.function} that is stopped has 0 in every part, so"
            f" --safety.cost {cost} would be free of charge there; take error"
        )


def _file_function(spec: str) -> str:
    """Complete `file.py[:name]` to `/absolute/file.py:name`."""
    if spec.endswith(".py"):
        file, name = spec, DEFAULT_FUNCTION
    elif ".py:" in spec:
        file, _, name = spec.rpartition(":")
    elif "/" in spec or ":" in spec:
        raise ValueError(f"--reward.function {spec!r}: a file is given as path/to/file.py[:function]")
    else:
        raise ValueError(
            f"unknown --reward.function {spec!r}: {nearest(spec, {**QUICK, **POOLED})}, or a file.py[:function]"
        )
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"--reward.function {spec!r}: there is no file {path}")
    if not name.isidentifier():
        raise ValueError(
            f"--reward.function {spec!r}: {name!r} is no function name; the form is path/to/file.py[:function]"
        )
    return f"{path}:{name}"
