"""The learning method of a run: the pieces of a step in `train.py` between experience and the next policy."""

from typing import TYPE_CHECKING

from spmdrl.data.batch import Batch
from spmdrl.data.episode import Episode
from spmdrl.rl.score import score, serve
from spmdrl.rl.update import update
from spmdrl.tracking.metrics import Metrics

if TYPE_CHECKING:
    from spmdrl.rl.run import Run


class PolicyGradient:
    """Learns from advantages of the policy's own samples. Other methods replace the pieces in which they differ."""

    replays = True
    """`spmdrl.tools.replay` can run an optimizer step again."""

    def __init__(self, run: "Run"):
        self.run = run

    def pack(self, episodes: list[Episode], step: int) -> Batch:
        """Return this rank's episodes of a step as a batch. Collective, within a rollout phase."""
        return self.run.pack(episodes, step)

    def score(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Score a batch; return the batch to learn from and numbers for the log. Collective over trainers.

        Raises:
            ValueError: a model gave a number that is not finite; the message names model, prompt and sample.
        """
        run = self.run
        return batch, score(batch, run.models, run.algo, run.cfg, run.peers)

    def answer(self, batch: Batch) -> Metrics:
        """Answer for frozen models on a rank that trains nothing, while others `score`. Collective over such ranks."""
        serve(batch, self.run.models, self.run.algo, self.run.cfg.rollout.temperature)
        return Metrics()

    def advantages(self, batch: Batch) -> Batch:
        """Return the batch with an advantage for each token. Collective over trainers."""
        return self.run.algo.advantages(batch, self.run.peers)

    def update(self, batch: Batch, step: int) -> Metrics:
        """Update every model that learns. Collective over trainers. step: counted from 0."""
        run = self.run
        return update(batch, run.models, run.algo, run.cfg, step, run.peers)
