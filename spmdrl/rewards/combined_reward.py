"""Several rewards as one: a weighted sum of scores, and gates that must hold for any of it to count."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from spmdrl.data.keys import describe
from spmdrl.rewards.base import Grader, Reward, RewardError, RewardInput, left_out

TURN = 0.02
"""Seconds between two looks at rewards that are waited for."""


@dataclass(frozen=True)
class Term:
    """One of several rewards."""

    name: str
    """Its score is the part of this name; its own parts are `name/part`, those of the first reward `part`."""
    grader: Grader
    weight: float


class CombinedReward:
    """Grader that asks several. The score is sum(weight * score) of those that apply to the row."""

    def __init__(self, terms: list[Term], gates: tuple[str, ...] = ()):
        """gates: parts that must be above 0, or the score is 0 at most."""
        self.terms, self.gates = terms, gates
        self.name = " + ".join(term.name for term in terms)
        self._open: dict[object, dict[str, Reward]] = {}
        self._without = 0  # responses to which none applies

    @property
    def wants_groups(self) -> bool:
        """True where one of the rewards wants whole groups."""
        return any(term.grader.wants_groups for term in self.terms)

    @property
    def on_engine(self) -> bool:
        """True where one of the rewards asks the run's engine."""
        return any(term.grader.on_engine for term in self.terms)

    @property
    def timeouts(self) -> int:
        """Gradings that ran out of time and were scored 0."""
        return sum(term.grader.timeouts for term in self.terms)

    @property
    def ungraded(self) -> int:
        """Gradings without a score."""
        return self._without + sum(term.grader.ungraded for term in self.terms)

    @property
    def pending(self) -> int:
        """Responses submitted and not yet answered."""
        return len(self._open)

    def submit(self, key: object, item: RewardInput) -> None:
        """Have a response graded by each. Raises RewardError."""
        self._open[key] = {}
        for term in self.terms:
            term.grader.submit(key, item)

    def poll(self) -> list[tuple[object, Reward]]:
        """Results since the last call, without waiting. Raises RewardError."""
        return [each for term in self.terms for each in self._hear(term, term.grader.poll())]

    def _hear(self, term: Term, results: list[tuple[object, Reward]]) -> list[tuple[object, Reward]]:
        """Take what one of them found; results that are whole with it."""
        done = []
        for key, reward in results:
            rewards = self._open[key]
            rewards[term.name] = reward
            if len(rewards) == len(self.terms):
                del self._open[key]
                done.append((key, self._combined(key, rewards)))
        return done

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Reward]]:
        """Wait for all that was submitted, or until `stop()`; results since the last call. Raises RewardError."""
        done = self.poll()

        def others() -> bool:
            done.extend(self.poll())
            return False

        # The engine works for one at a time, and whatever the others do: all of its ranks come here.
        for term in self.terms:
            if term.grader.on_engine:
                done += self._hear(term, term.grader.drain(others))
                if term.grader.pending:
                    # The rollout was abandoned, by all ranks of the engine: none waits for anything else.
                    return done
        # All in turn: to wait for one of them would keep the others from their work.
        while self._open and not (stop and stop()):
            time.sleep(TURN)
            done += self.poll()
        return done

    def close(self) -> None:
        """End every process. May be called twice."""
        for term in self.terms:
            term.grader.close()

    def _combined(self, key: object, rewards: dict[str, Reward]) -> Reward:
        for name, reward in rewards.items():
            if reward.ungraded:
                return Reward(math.nan, ungraded=f"{name}: {reward.ungraded}")
        applies = [term for term in self.terms if rewards[term.name].applies]
        if not any(term.weight for term in applies):
            # Rewards of weight 0 are there to be looked at: they give no score.
            self._without += 1
            return left_out(self.name, key, "none of the rewards applies to the row", self._without)
        score, parts = 0.0, {}
        for term in applies:
            reward, first = rewards[term.name], term is self.terms[0]
            named = {part if first else f"{term.name}/{part}": x for part, x in reward.parts.items()}
            if twice := sorted(named.keys() & (rewards.keys() | parts.keys())):
                whose = "the name of a reward" if twice[0] in rewards else "a part of another reward"
                raise RewardError(
                    f"the reward {term.name} has a part {twice[0]}, which is {whose}, too: rename one (--reward.more)"
                )
            score += term.weight * reward.score
            parts |= named | {term.name: reward.score}
        timed_out = any(reward.timed_out for reward in rewards.values())
        holds = all([self._holds(gate, parts, rewards, key) for gate in self.gates])
        # What is below 0 stays, with the rewards of turns that it is made of.
        shut = not holds and score >= 0.0
        return Reward(0.0 if shut else score, parts, timed_out=timed_out, shut=shut)

    def _holds(self, gate: str, parts: dict[str, float], rewards: dict[str, Reward], key: object) -> bool:
        """True for a gate that holds, or whose reward does not apply to the row."""
        if gate in parts:
            return parts[gate] > 0.0
        names = [term.name for term in self.terms]
        reward = rewards[next((name for name in names if f"{gate}/".startswith(f"{name}/")), names[0])]
        if reward.timed_out:
            # A grading that was stopped has no parts, and shuts its gates.
            return False
        if not reward.applies:
            return True
        raise RewardError(
            f"--reward.gate {gate}: the rewards {self.name} gave no such part for {describe(key)}; there are "
            f"{', '.join(sorted(parts))}"
        )
