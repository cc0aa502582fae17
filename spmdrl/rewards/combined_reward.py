"""A grader that returns the weighted sum of several graders' scores.

A gate (`--reward.gate`) names a reward part. If that part is not above 0, a positive sum is set to 0.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from spmdrl.data.scores import describe
from spmdrl.rewards.base import Grader, Reward, RewardError, RewardInput, left_out

TURN = 0.02
"""Polling interval in seconds while waiting for results."""


@dataclass(frozen=True)
class Term:
    """One of the combined rewards and its weight."""

    name: str
    """Name of the part that holds this reward's score. Parts of the first reward keep their names. Parts of all other
    rewards are named `name/part`."""
    grader: Grader
    weight: float


class CombinedReward(Grader):
    """Grader whose score is the weighted sum of the scores of all combined rewards that apply to the row."""

    def __init__(self, terms: list[Term], gates: tuple[str, ...] = ()):
        """gates: names of reward parts (see the module docstring)."""
        super().__init__(" + ".join(term.name for term in terms))
        self.terms, self.gates = terms, gates
        self.wants_groups = any(term.grader.wants_groups for term in terms)
        self.on_engine = any(term.grader.on_engine for term in terms)
        self._open: dict[object, dict[str, Reward]] = {}
        self._without = 0  # number of responses without any reward that applies

    def submit(self, key: object, item: RewardInput) -> None:
        """Submit a response to each grader. Raises RewardError."""
        self._open[key] = {}
        self.pending += 1
        for term in self.terms:
            term.grader.submit(key, item)

    def _turn(self, wait: float) -> None:
        for term in self.terms:
            self._take(term, term.grader.poll())

    def _take(self, term: Term, results: list[tuple[object, Reward]]) -> None:
        for key, reward in results:
            rewards = self._open[key]
            rewards[term.name] = reward
            if len(rewards) == len(self.terms):
                del self._open[key]
                self._answer(key, self._combined(key, rewards))
        self.timeouts = sum(each.grader.timeouts for each in self.terms)
        self.ungraded = self._without + sum(each.grader.ungraded for each in self.terms)

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Reward]]:
        """Implement `Grader.drain`."""
        self._turn(0.0)

        def others() -> bool:
            self._turn(0.0)
            return False

        # A grader that runs on the engine needs all of the engine's ranks at once, so all ranks drain these graders
        # first, in the same order.
        for term in self.terms:
            if term.grader.on_engine:
                self._take(term, term.grader.drain(others))
                if term.grader.pending:
                    # All ranks of the engine abandoned the rollout, so there is no need to wait for the other graders.
                    return self._results()
        # Poll all graders in turn, because blocking on one of them would delay the others.
        while self._open and not (stop and stop()):
            time.sleep(TURN)
            self._turn(0.0)
        return self._results()

    def close(self) -> None:
        """Implement `Grader.close`."""
        for term in self.terms:
            term.grader.close()

    def _combined(self, key: object, rewards: dict[str, Reward]) -> Reward:
        for name, reward in rewards.items():
            if reward.ungraded:
                return Reward(math.nan, ungraded=f"{name}: {reward.ungraded}")
        applies = [term for term in self.terms if rewards[term.name].applies]
        if not any(term.weight for term in applies):
            # Rewards with weight 0 are only logged. If no other reward applies, the response has no score.
            self._without += 1
            return left_out(self.name, key, "none of the rewards applies to the row", self._without)
        score, parts = 0.0, {}
        for term in applies:
            reward, first = rewards[term.name], term is self.terms[0]
            named = {part if first else f"{term.name}/{part}": x for part, x in reward.parts.items()}
            if twice := sorted(named.keys() & (rewards.keys() | parts.keys())):
                whose = "the name of a reward" if twice[0] in rewards else "a part of another reward"
                raise RewardError(
                    f"the reward {term.name} has a part {twice[0]}, which is also {whose}: rename one (--reward.more)"
                )
            score += term.weight * reward.score
            parts |= named | {term.name: reward.score}
        timed_out = any(reward.timed_out for reward in rewards.values())
        holds = all([self._holds(gate, parts, rewards, key) for gate in self.gates])
        # A failed gate does not change a negative score or the turn rewards that add up to it.
        shut = not holds and score >= 0.0
        return Reward(0.0 if shut else score, parts, timed_out=timed_out, shut=shut)

    def _holds(self, gate: str, parts: dict[str, float], rewards: dict[str, Reward], key: object) -> bool:
        """Return True if a gate's part is above 0, or if the reward with this part does not apply to the row."""
        if gate in parts:
            return parts[gate] > 0.0
        names = [term.name for term in self.terms]
        reward = rewards[next((name for name in names if f"{gate}/".startswith(f"{name}/")), names[0])]
        if reward.timed_out:
            # A timed-out reward has no parts, so its gates fail.
            return False
        if not reward.applies:
            return True
        raise RewardError(
            f"--reward.gate {gate}: {self.name} gave no such part for {describe(key)}; the parts are "
            f"{', '.join(sorted(parts))}"
        )
