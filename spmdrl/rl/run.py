"""A reinforcement learning run on one rank, and the learning method `PolicyGradient`. `train.py` calls both.

`rl/build.py` builds the run and its method. `rl/distillation.py` and `rl/online_preference.py` contain other methods.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch
from spmdrl.data.episode import Episode
from spmdrl.data.pack import to_episodes
from spmdrl.data.prompts import PromptSet
from spmdrl.data.step_batch import ReplayBuffer, make_batch
from spmdrl.health.preempt import AbandonedError, PreemptedError, any_rank
from spmdrl.policy.models import shares_prompts
from spmdrl.policy.objectives.algorithm import Algorithm
from spmdrl.rl.describe import check_mismatch, describe, describe_age, model_columns, sample_row, with_rates
from spmdrl.rl.evaluation import Evaluation
from spmdrl.rl.rollout_plan import Experience
from spmdrl.rl.sampler import Sampler
from spmdrl.rl.score import score, serve
from spmdrl.rl.spikes import Spikes
from spmdrl.rl.state import RunState
from spmdrl.rl.tool_calls import CallReader, call_reader
from spmdrl.rl.update import adapt_coefficients, update
from spmdrl.session.device_table import Memory
from spmdrl.session.image_reader import ImageReader
from spmdrl.session.journal import merge_roles
from spmdrl.session.run import JobRun
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics


@dataclass(kw_only=True)
class Run(JobRun[Config]):
    """A run on this rank: the models, engine and files of the training loop, and the work of each step."""

    algo: Algorithm
    spikes: Spikes
    state: RunState
    sampler: Sampler | None
    """Samples the experience of each step; None on ranks that do not sample."""
    replay: ReplayBuffer
    evaluation: Evaluation
    memory: Memory
    tokenizer: Any
    prompts: PromptSet
    experts_width: int
    """Number of columns of `token["experts"]` in a batch, or 0 without routing replay."""
    images: ImageReader | None
    """Reads the images of prompts; None if the model reads text only."""
    method: "PolicyGradient" = field(init=False)
    """Learning method, created after the run."""
    timeouts_seen: int = 0
    digits = 3

    @property
    def peers(self) -> Peers:
        """The run's data positions. Metrics and losses are summed over them."""
        return self.world.data_peers

    @property
    def placeholder(self) -> int | None:
        """Id of the placeholder tokens of images, or None if the model reads text only."""
        return self.images.vision.image if self.images else None

    @cached_property
    def reader(self) -> CallReader | None:
        """The tool-call parser for the policy's turns, or None without an environment."""
        return call_reader(self.cfg, self.tokenizer)

    # ── one step ─────────────────────────────────────────────────────────────

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps (0-based)."""
        for step in super().steps():
            self.spikes.step = step + 1
            yield step

    def experience(self, step: int) -> Experience:
        """Return this step's graded experience, sampled now or in advance. Collective over all ranks.

        The result has no episodes on a rank that does not sample.

        Raises:
            PreemptedError: sampling was abandoned. Every rank raises it.
        """
        done = None
        with suppress(AbandonedError):
            done = self.sampler.take(step, self.memory.version) if self.sampler else Experience([])
        with self.timer("exchange"):
            self._unless(done is None, step, f"step {step + 1} was abandoned while it sampled")
        assert done is not None
        return done

    def _unless(self, abandoned: bool, step: int, what: str) -> None:
        """Raise PreemptedError on all ranks if the ranks that sample abandoned sampling. Collective over all ranks."""
        if self.world.roles.split:
            abandoned = any_rank(abandoned, self.world.host_group)
        if abandoned:
            raise PreemptedError(step, what, abandoned=True)

    def stand_by(self, step: int, batch: Batch) -> Metrics:
        """Do the work of a rank that does not train while other ranks train. Collective over the ranks of its role.

        The rank samples responses for later steps or runs the frozen models. `log` adds the sampling metrics later.
        """
        if self.sampler:
            with suppress(AbandonedError):
                self.sampler.look_ahead(step, self.memory.version)
            return Metrics()
        with self.timer("logp"):
            return self.method.answer(batch)

    def evaluate(self, step: int, force: bool = False) -> None:
        """Evaluate before this step's rollout if an evaluation is due. Collective over all ranks.

        The metrics are added to the step's log line. With a reward model, call `judge` afterwards in the training
        phase.

        Raises:
            PreemptedError: the evaluation was abandoned. Every rank raises it.
        """
        evaluation = self.evaluation
        if not evaluation.is_due(step, force):
            return
        with self.timer("eval"):
            episodes = None
            with suppress(AbandonedError):
                episodes = evaluation.sample(f"{self.checkpoints.start_step}/{step}/{force}", self.memory.version)
            self._unless(episodes is None, step, f"the evaluation after step {step} was abandoned")
            evaluation.numbers = merge_roles(evaluation.numbers, self.world)
            evaluation.to_judge = episodes if self.cfg.reward.model else None
            if self.cfg.env:
                mine = episodes if self.world.rank == self.world.roles.samplers[0] else None
                evaluation.show(self._rows(0, mine or []))

    def judge(self) -> None:
        """Add reward-model scores if an evaluation is waiting for them. Collective over all ranks."""
        if self.evaluation.to_judge is not None:
            with self.timer("eval"):
                self.evaluation.judge()

    # ── after a step ─────────────────────────────────────────────────────────

    def log(self, step: int, batch: Batch, done: Experience, stats: Metrics) -> None:
        """Reduce this step's metrics across ranks and write them. Collective over all ranks."""
        with self.timer("log"):
            self._count(batch, done, stats)
            values = self._numbers(stats)
            values |= self.evaluation.take() | self.checkpoints.saver.poll()
            self.checkpoints.saver.record_metrics(step + 1, values)
            if step + 1 == self.cfg.run.steps:
                # `finish` evaluates again and adds `eval/...` to the same line, so the earlier metrics are renamed.
                values = {re.sub("^eval/", "eval_before/", name): value for name, value in values.items()}
            rollout = self.cfg.rollout
            adapt_coefficients(self.algo, self.cfg, values, rollout.prompts_per_step * rollout.samples_per_prompt)
            self._write(step + 1, values, batch, done)
            # Write the metrics first, because the warning or error refers to them.
            if warning := check_mismatch(step + 1, values, self.cfg):
                self.session.warn(warning)

    def _count(self, batch: Batch, done: Experience, stats: Metrics) -> None:
        """Add metrics of the batch and of the rollout. Collective over all ranks."""
        world, rollout = self.world, self.cfg.rollout
        stats.merge(done.stats)
        timeouts = self.sampler.grader.timeouts if self.sampler else 0
        drawn = done.drawn * (world.rank == world.roles.samplers[0])
        counts = torch.tensor([timeouts - self.timeouts_seen, done.bad_samples, drawn])
        self.timeouts_seen = timeouts
        timeouts, bad, drawn = all_reduce(counts, "sum", world.host_group).tolist()
        # Do not count steps that were sampled in advance, because a resumed run may sample them again.
        self.state.draws += drawn
        if world.trains:
            describe(stats, batch, bool(self.cfg.reward.model))
            if world.roles.split or rollout.oversample > 1:
                describe_age(stats, batch, self.memory.version)
            stats.add("reward/timeouts", timeouts)
            if self.cfg.filter.bad_sample == "skip":
                stats.add("filter/bad_samples", bad)

    def _numbers(self, stats: Metrics) -> dict[str, float]:
        """Return the step's metrics with memory and times, equal on all ranks. Collective over all ranks."""
        world = self.world
        for name, gib in self.memory.metrics().items():
            stats.add_max(name, gib)
        if world.trains:
            values = with_rates(self.reduced(stats, world.data_group, world.device))
            values |= {"version": self.models.policy.version}
        else:
            values = self.reduced(stats, world.role_group)
        return merge_roles(values, world)

    def _write(self, step: int, values: dict[str, float], batch: Batch, done: Experience) -> None:
        """Write the step's metrics and some samples. Collective over all ranks."""
        rows = []
        columns, labels = {}, self.models.reading.names if self.models.reading else ()
        if self.world.trains and self.models.reading and self.cfg.tracking.samples:
            columns = model_columns(batch, labels, self.peers)
        if self.world.is_first:
            # Label scores are in `columns`, so they are not included as reward parts of the episodes.
            episodes = to_episodes(batch, labels) if self.world.roles.split else done.episodes
            rows = self._rows(step, episodes, columns)
        self.journal.rows(self.evaluation.take_rows(step))
        self.journal.step(step, values, rows)

    def _rows(self, step: int, episodes: list[Episode], more: dict | None = None) -> list[dict]:
        """Return some of the episodes as rows of samples.jsonl. step: 1-based. more: additional columns."""
        if not (count := self.cfg.tracking.samples):
            return []
        chosen = episodes[:: max(1, len(episodes) // count)][:count]
        rows = [sample_row(step, e, self.tokenizer.decode, self.reader) for e in chosen]
        return [row | (more or {}).get((e.position, e.sample), {}) for row, e in zip(rows, chosen, strict=True)]

    def held(self) -> dict[str, int]:
        """Return values that must be equal on all ranks after a step."""
        return {"draws": self.state.draws, "version": self.memory.version}

    # ── the end ──────────────────────────────────────────────────────────────

    def leave(self, left: PreemptedError) -> None:
        """Save the models unless a checkpoint has them. Collective over all ranks."""
        if left.abandoned:
            # An abandoned rollout leaves the weights offloaded; entering this phase moves them back.
            with self.memory.training_phase():
                pass
        super().leave(left)

    def measure_last(self, done: int) -> dict[str, float]:
        """Evaluate the policy after the last step. Collective over all ranks."""
        if not self.evaluation.is_due(done, force=True):
            return {}
        with self.memory.rollout_phase():
            self.evaluate(done, force=True)
        if self.evaluation.to_judge is not None:
            with self.memory.training_phase():
                self.judge()
        numbers = self.evaluation.numbers
        self.journal.rows(self.evaluation.take_rows(done))
        self.journal.numbers(done, numbers | {"version": self.memory.version})
        self.checkpoints.saver.record_metrics(done + 1, numbers)
        return numbers

    def close(self) -> None:
        """Close files and stop processes."""
        super().close()
        if self.sampler:
            self.sampler.close()


class PolicyGradient:
    """Policy-gradient learning from advantages, and the base class of the other learning methods."""

    replays = True
    """True if `spmdrl.tools.replay` can replay an optimizer step."""

    def __init__(self, run: Run):
        self.run = run

    def pack(self, episodes: list[Episode], step: int) -> Batch:
        """Return this rank's episodes of a step as a batch (`make_batch`). Collective, within a rollout phase."""
        run = self.run
        # The columns depend only on settings, because ranks without the policy must have the same columns.
        with run.timer("exchange"):
            return make_batch(
                episodes,
                step,
                run.cfg,
                run.world,
                run.replay,
                turns="turns" in run.algo.needs,
                skips_equal=run.algo.skip_zero_advantage,
                experts_width=run.experts_width,
                share_prompts=shares_prompts(run.cfg.policy),
                model_parts=run.models.reading.names if run.models.reading else (),
                placeholder=run.placeholder,
            )

    def score(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Score a batch, and return the batch to train on and metrics. Collective over the ranks that train.

        Raises:
            ValueError: a model output is not finite; the message names model, prompt and sample.
        """
        run = self.run
        return batch, score(batch, run.models, run.algo, run.cfg, run.peers)

    def answer(self, batch: Batch) -> Metrics:
        """Run the frozen models on a rank that does not train, while the other ranks run `score`. Collective."""
        serve(batch, self.run.models, self.run.algo, self.run.cfg.rollout.temperature)
        return Metrics()

    def advantages(self, batch: Batch) -> Batch:
        """Add per-token advantages to a batch. Collective over the ranks that train."""
        return self.run.algo.advantages(batch, self.run.peers)

    def update(self, batch: Batch, step: int) -> Metrics:
        """Update all trained models. Collective over the ranks that train. step: 0-based."""
        run = self.run
        return update(batch, run.models, run.algo, run.cfg, step, run.peers)
