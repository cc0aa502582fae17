"""A language model as a judge of one response at a time: `--reward.function judge.yaml` (docs/judge.md)."""

import math
from collections.abc import Callable

from spmdrl.config.judge import JudgeConfig
from spmdrl.rewards.base import Reward, RewardInput, left_out
from spmdrl.rewards.judge_asker import Answer, Asker, Counters
from spmdrl.rewards.judge_verdict import question


class Judge:
    """Grader that asks a judge for grades. Use it from one thread.

    The score is the mean of the votes' grades over the highest grade. After a RewardError nothing but `close` has a
    meaning.
    """

    wants_groups = False

    def __init__(self, cfg: JudgeConfig, name: str, asker: Asker):
        """name: what messages call it."""
        self.name, self.asker = name, asker
        self.timeouts = self.ungraded = 0
        self._cfg = cfg

    @property
    def on_engine(self) -> bool:
        """True: the run's engine judges, in `drain` alone."""
        return self.asker.on_engine

    @property
    def spent(self) -> Counters:
        """Costs so far."""
        return self.asker.spent

    @property
    def pending(self) -> int:
        """Responses submitted and not yet answered."""
        return self.asker.pending

    def submit(self, key: object, item: RewardInput) -> None:
        """Take one response to grade, without waiting."""
        cfg = self._cfg
        model = cfg.model or cfg.engine
        self.asker.submit(key, question(item, model, cfg.temperature, cfg.rubric, cfg.scale, cfg.max_chars))

    def poll(self) -> list[tuple[object, Reward]]:
        """Results since the last call, without waiting. Raises RewardError."""
        return self._graded(self.asker.poll())

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Reward]]:
        """Wait for all that was submitted, or until `stop()`; results since the last call. Raises RewardError."""
        return self._graded(self.asker.drain(stop))

    def close(self) -> None:
        """End all requests. May be called twice."""
        self.asker.close()

    def _graded(self, answers: list[tuple[object, Answer]]) -> list[tuple[object, Reward]]:
        done = []
        for key, answer in answers:
            if isinstance(answer, str):
                self.ungraded += 1
                done.append((key, left_out(self.name, key, answer, self.ungraded)))
            else:
                done.append((key, reward_of(answer[0], self._cfg.scale)))
        return done


def reward_of(grades: list[float], scale: int) -> Reward:
    """Return the reward of a sample from the grades of its votes.

    The score is their mean over the highest grade. Parts: `grade`, the mean, and `agreement`, 1 less the distance
    between the highest and the lowest vote over the highest grade.
    """
    mean = math.fsum(grades) / len(grades)
    return Reward(mean / scale, {"grade": mean, "agreement": 1.0 - (max(grades) - min(grades)) / scale})
