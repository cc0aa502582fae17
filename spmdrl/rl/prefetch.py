"""Experience of one step after the other, sampled when it is asked for or some steps ahead."""

from collections import deque
from dataclasses import replace

from spmdrl.rl.quota import Experience
from spmdrl.rl.rollout_plan import PromptGroup
from spmdrl.rl.sampler import Sampler


class RolloutPrefetcher:
    """Counts the prompts drawn and holds what was cut short, which is as far as `staleness` steps ahead of learning.

    So the experience of step k comes from the weights that step max(k - staleness, first) began with.
    """

    def __init__(self, sampler: Sampler | None, staleness: int, first: int, steps: int, draws: int):
        """sampler: None on a rank that does not sample, and then never asked. steps: of the run; draws: before."""
        self.sampler, self.staleness, self.step, self.steps, self.draws = sampler, staleness, first, steps, draws
        self.carried: list[PromptGroup] = []
        self.ready: deque[Experience] = deque()

    def take(self, step: int, version: int) -> Experience:
        """Experience of this step, sampled by the weights of `version` unless it is ready. Collective over samplers."""
        if not self.ready:
            self._next(version)
        assert self.step - len(self.ready) == step, "one step after the other"
        return self.ready.popleft()

    def look_ahead(self, step: int, version: int) -> None:
        """Sample what may be sampled by the weights of this step. Collective over those who sample."""
        while self.step <= step + self.staleness and self.step < self.steps:
            self._next(version)

    def _next(self, version: int) -> None:
        assert self.sampler, "this rank samples"
        # A copy: sampling that is abandoned leaves them as they were.
        done = self.sampler.collect_step(self.step, self.draws, version, copies(self.carried))
        self.step += 1
        self.draws += done.drawn
        self.carried = done.carried
        self.ready.append(done)


def copies(groups: list[PromptGroup]) -> list[PromptGroup]:
    """Groups to go on with, apart from what they were; segments are never written into."""
    return [replace(g, episodes=[replace(e, segments=list(e.segments)) for e in g.episodes]) for g in groups]
