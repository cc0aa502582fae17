"""One reinforcement learning run on one rank: what `train.py` calls, step by step. `rl/build.py` makes it."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch, to_episodes
from spmdrl.data.episode import Episode
from spmdrl.data.prompts import PromptSet
from spmdrl.data.replay_buffer import ReplayBuffer
from spmdrl.data.step_batch import make_batch
from spmdrl.health.preempt import AbandonedError, PreemptedError, any_rank
from spmdrl.policy.models import shares_prompts
from spmdrl.policy.objectives.algorithm import Algorithm
from spmdrl.rl.describe import check_mismatch, describe, describe_age, model_columns, sample_rows, with_rates
from spmdrl.rl.evaluation import Evaluation
from spmdrl.rl.fill_batch import Experience
from spmdrl.rl.run_state import RunState
from spmdrl.rl.sampler import Sampler
from spmdrl.rl.spikes import Spikes
from spmdrl.rl.tool_calls import CallReader, call_reader
from spmdrl.rl.update import adapt_coefficients
from spmdrl.session.device_table import Memory
from spmdrl.session.journal import merge_roles
from spmdrl.session.run import JobRun
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics

if TYPE_CHECKING:
    from spmdrl.rl.method import PolicyGradient


@dataclass(kw_only=True)
class Run(JobRun[Config]):
    """Parts of a run on this rank."""

    algo: Algorithm
    spikes: Spikes
    state: RunState
    sampler: Sampler | None
    """None on a rank that does not sample."""
    replay: ReplayBuffer
    evaluation: Evaluation
    memory: Memory
    tokenizer: object
    prompts: PromptSet
    experts_width: int
    """Columns of routing that a batch replays; 0: none."""
    method: "PolicyGradient" = field(init=False)
    """The learning method; `rl/build.py` sets it once the run is built."""
    timeouts_seen: int = 0
    digits = 3

    @property
    def peers(self) -> Peers:
        """Data positions."""
        return self.world.data_peers

    @cached_property
    def reader(self) -> CallReader | None:
        """Reads the calls of turns; None without an environment."""
        return call_reader(self.cfg, self.tokenizer)

    # ── one step ─────────────────────────────────────────────────────────────

    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 0."""
        for step in super().steps():
            self.spikes.step = step + 1
            yield step

    def experience(self, step: int) -> Experience:
        """Experience of this step, sampled and graded here unless that was done ahead. Collective over samplers.

        Nothing on a rank that does not sample.

        Raises:
            PreemptedError: on every rank, where sampling was abandoned.
        """
        done = None
        with suppress(AbandonedError):
            done = self.sampler.take(step, self.memory.version) if self.sampler else Experience([])
        with self.timer("exchange"):
            self._unless(done is None, step, f"step {step + 1} was abandoned while it sampled")
        assert done is not None
        return done

    def _unless(self, abandoned: bool, step: int, what: str) -> None:
        """Go on only where those who sample, who agree among themselves, have not abandoned. Collective."""
        if self.world.roles.split:
            abandoned = any_rank(abandoned, self.world.host_group)
        if abandoned:
            raise PreemptedError(step, what, abandoned=True)

    def pack(self, episodes: list[Episode], step: int) -> Batch:
        """This rank's episodes as a batch, see `make_batch`. Collective."""
        # Ranks without the policy add the same columns.
        with self.timer("exchange"):
            return make_batch(
                episodes,
                step,
                self.cfg,
                self.world,
                self.replay,
                turns="turns" in self.algo.needs,
                skips_equal=self.algo.skip_zero_advantage,
                experts_width=self.experts_width,
                share_prompts=shares_prompts(self.cfg.policy),
                model_parts=self.models.reading.names if self.models.reading else (),
            )

    def stand_by(self, step: int, batch: Batch) -> Metrics:
        """Work of a rank that does not train, while others do. Collective over ranks of its kind.

        It samples the steps to come, or answers for the frozen models; `log` adds its numbers.
        """
        if self.sampler:
            with suppress(AbandonedError):
                self.sampler.look_ahead(step, self.memory.version)
            return Metrics()
        with self.timer("logp"):
            return self.method.answer(batch)

    def evaluate(self, step: int, force: bool = False) -> None:
        """Evaluate before this step's rollout if it is due; the numbers stand in that step's log line. Collective.

        With a reward model `judge` has to follow, in the training phase.

        Raises:
            PreemptedError: on every rank, where it was abandoned.
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
        """Add the reward model's score to an evaluation that waits for it. Collective."""
        if self.evaluation.to_judge is not None:
            with self.timer("eval"):
                self.evaluation.judge()

    # ── after a step ─────────────────────────────────────────────────────────

    def log(self, step: int, batch: Batch, done: Experience, stats: Metrics) -> None:
        """Reduce this step's numbers over ranks and write them. Collective."""
        with self.timer("log"):
            self._count(batch, done, stats)
            values = self._numbers(stats)
            values |= self.evaluation.take() | self.checkpoints.saver.poll()
            self.checkpoints.saver.record_metrics(step + 1, values)
            if step + 1 == self.cfg.run.steps:
                # `finish` evaluates once more, and its numbers join this line.
                values = {re.sub("^eval/", "eval_before/", name): value for name, value in values.items()}
            rollout = self.cfg.rollout
            adapt_coefficients(self.algo, self.cfg, values, rollout.prompts_per_step * rollout.samples_per_prompt)
            self._write(step + 1, values, batch, done)
            # Once the step is written down: its numbers are what there is to look at.
            if warning := check_mismatch(step + 1, values, self.cfg):
                self.session.warn(warning)

    def _count(self, batch: Batch, done: Experience, stats: Metrics) -> None:
        """Add what the batch and the rollout tell. Collective."""
        world, rollout = self.world, self.cfg.rollout
        stats.merge(done.stats)
        timeouts = self.sampler.grader.timeouts if self.sampler else 0
        drawn = done.drawn * (world.rank == world.roles.samplers[0])
        counts = torch.tensor([timeouts - self.timeouts_seen, done.bad_samples, drawn])
        self.timeouts_seen = timeouts
        timeouts, bad, drawn = all_reduce(counts, "sum", world.host_group).tolist()
        # Of the steps that were learnt from: what was sampled ahead is sampled again after a resume.
        self.state.draws += drawn
        if world.trains:
            describe(stats, batch, bool(self.cfg.reward.model))
            if world.roles.split or rollout.oversample > 1:
                describe_age(stats, batch, self.memory.version)
            stats.add("reward/timeouts", timeouts)
            if self.cfg.filter.bad_sample == "skip":
                stats.add("filter/bad_samples", bad)

    def _numbers(self, stats: Metrics) -> dict[str, float]:
        """The step's numbers with memory and times, alike on every rank. Collective."""
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
        """Write the step's numbers and some samples. Collective."""
        rows = []
        columns, labels = {}, self.models.reading.names if self.models.reading else ()
        if self.world.trains and self.models.reading and self.cfg.tracking.samples:
            columns = model_columns(batch, labels, self.peers)
        if self.world.is_first:
            # A label stands among the model's columns.
            episodes = to_episodes(batch, labels) if self.world.roles.split else done.episodes
            rows = self._rows(step, episodes, columns)
        self.journal.rows(self.evaluation.take_rows(step))
        self.journal.step(step, values, rows)

    def _rows(self, step: int, episodes: list[Episode], more: dict | None = None) -> list[dict]:
        """Some of the episodes as rows of samples.jsonl. step: counted from 1. more: further columns."""
        return sample_rows(step, episodes, self.tokenizer, self.cfg.tracking.samples, more, self.reader)

    def held(self) -> dict[str, int]:
        """Numbers that every rank must hold alike after a step."""
        return {"draws": self.state.draws, "version": self.memory.version}

    # ── the end ──────────────────────────────────────────────────────────────

    def leave(self, left: PreemptedError) -> None:
        """Save what was learnt where no checkpoint has it. Collective."""
        if left.abandoned:
            # The weights may be off the device.
            with self.memory.training_phase():
                pass
        super().leave(left)

    def measure_last(self, done: int) -> dict[str, float]:
        """Evaluate what was learnt. Collective."""
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
        """Close files and processes."""
        super().close()
        if self.sampler:
            self.sampler.close()
