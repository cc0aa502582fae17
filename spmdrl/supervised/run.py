"""The phases of a supervised training step. The job's entry point calls them on every rank."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from spmdrl.config.preference import FixedModelConfig
from spmdrl.config.supervised import SupervisedConfig
from spmdrl.data.batch import Batch
from spmdrl.policy.contract import MEASURE, Objective
from spmdrl.session.run import JobRun
from spmdrl.spmd.exchange import all_reduce
from spmdrl.supervised.generations import Generations
from spmdrl.supervised.rows import Rows, rows_due
from spmdrl.tracking.metrics import Metrics


@dataclass(kw_only=True)
class SupervisedRun(JobRun[SupervisedConfig]):
    """A supervised job on this rank, built by `build.assemble`."""

    objective: Objective
    data: Rows
    pack: Callable[[list, int], Batch]
    """Function that packs this rank's sequences into a batch. Its second argument is the step number."""
    held_out: Batch | None
    """This rank's share of the held-out rows, or None if the job does not evaluate."""
    generations: Generations | None
    """Samples answers to held-out prompts during the job, or None if the job does not sample."""
    counts: Counter
    """Row counts of this step (`rows.COUNTED`), over all ranks."""
    numbers: dict[str, float] | None = None
    """Metrics of the last evaluation that have not been logged yet, or None."""
    measured: Objective | None = None
    """Loss used for evaluations, or None for the training loss."""
    add_frozen: Callable[[Batch], None] | None = None
    """Adds a frozen model's columns to a batch for the objective, or None if there is no frozen model."""
    moves: FixedModelConfig | None = None
    """Settings for updating the reference from the policy, or None if the reference never changes."""
    report: Callable[[dict[str, float]], dict[str, float]] = field(default=lambda values: values)
    """Maps a step's metrics, reduced over ranks, to the metrics that are logged."""
    samples: list[dict] = field(default_factory=list)
    """Sampled answers that have not been logged yet."""

    def rows(self, step: int) -> Batch:
        """Return this rank's rows of a step, encoded and packed. Collective."""
        with self.timer("rows"):
            mine, self.counts = self.data.take(step, last=step + 1 == self.cfg.run.steps)
            return self.pack(mine.sequences, step)

    def score(self, batch: Batch) -> None:
        """Add the teacher's distributions or the reference's log p to a batch, if the job has one. Collective."""
        if self.add_frozen is not None:
            with self.timer("logp"):
                self.add_frozen(batch)

    def move_reference(self, step: int) -> None:
        """Update the reference from the policy if an update is due after this step. Collective."""
        moves = self.moves
        if moves is None or not moves.refresh_every or (step + 1) % moves.refresh_every:
            return
        assert self.models.reference is not None, "the settings are refused otherwise"
        self.models.reference.take_over(self.policy, moves.mix)
        if self.held_out is not None:
            self.held_out.token.pop("ref_logp", None)

    def evaluate(self, step: int, force: bool = False) -> None:
        """Compute the loss on the held-out rows if an evaluation is due before this step. Collective.

        force: evaluate even if no evaluation is due.
        """
        every = self.cfg.eval.every
        if self.held_out is None or not every or (step % every and not force):
            return
        held_out, objective, world = self.held_out, self.measured or self.objective, self.world
        with self.timer("eval"), torch.no_grad():
            if self.measured is None:
                self.score(held_out)
            shared = objective.prepare(held_out, MEASURE)
            first_T, second_T = self.policy.logprobs(held_out, 1.0, objective.second)
            stats = objective.loss(held_out, first_T, second_T, shared).stats
            values = stats.reduce(lambda x, op: all_reduce(x, op, world.data_group), world.device)
            self.numbers = self.report({f"eval/{name.removesuffix('/mean')}": x for name, x in values.items()})

    def sample(self, step: int, force: bool = False) -> None:
        """Sample answers to the held-out prompts if sampling is due before this step. Collective.

        force: sample even if sampling is not due, as after the last step.
        """
        every = self.cfg.generate.every
        if self.generations is None or (step % every and not force):
            return
        with self.timer("rollout"):
            # Step numbers start at 1 in samples.jsonl. Answers sampled before a step get that step's number; answers
            # sampled after the last step get the last step's number.
            self.samples = self.generations.sample(step + (not force))

    def log(self, step: int, batch: Batch, stats: Metrics) -> None:
        """Reduce this step's metrics over ranks and log them. Collective."""
        world = self.world
        with self.timer("log"):
            # Ranks with the same data position hold the same sequences, so each rank adds only its share of the counts.
            share = world.data_size / world.size
            stats.add_sum("tokens/all", batch.n_tokens * share)
            stats.add_sum("tokens/trained", float(batch.token["mask"].sum()) * share)
            stats.add_max("tokens/most_on_a_rank", batch.n_tokens)
            values = self.report(self.reduced(stats, world.data_group, world.device))
            most = values.pop("tokens/most_on_a_rank") * world.data_size
            values["packing/waste"] = 1 - values["tokens/all"] / most if most else 0.0
            values["tokens/s"] = values["tokens/all"] / values["time/step"]
            values |= {f"data/{name}": float(count) for name, count in self.counts.items()}
            if rows := self.data.mixture.rows:
                done = step * self.cfg.data.rows_per_step + rows_due(self.cfg, rows, step)
                values["data/epoch"] = done / rows
            values |= self.checkpoints.saver.poll() | (self.numbers or {})
            self.numbers = None
            self.checkpoints.saver.record_metrics(step + 1, values)
            self.journal.step(step + 1, values, self.samples)
            self.samples = []

    def measure_last(self, done: int) -> dict[str, float]:
        """Evaluate the trained model and sample from it. Collective. done: number of completed steps."""
        self.evaluate(done, force=True)
        self.sample(done, force=True)
        self.journal.rows(self.samples)
        if self.numbers:
            self.journal.numbers(done, self.numbers)
            self.checkpoints.saver.record_metrics(done + 1, self.numbers)
        return self.numbers or {}

    def close(self) -> None:
        """Close files and threads."""
        super().close()
        self.data.thread.shutdown(wait=False, cancel_futures=True)
