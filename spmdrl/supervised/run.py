"""One supervised job on one rank: what `sft.py` calls, step by step. `supervised/build.py` makes it."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from spmdrl.config.supervised import SFTConfig
from spmdrl.data.batch import Batch
from spmdrl.health.preempt import PreemptedError
from spmdrl.health.status import rank_status
from spmdrl.policy.contract import Objective
from spmdrl.policy.distillation import DistillObjective
from spmdrl.policy.models import Models
from spmdrl.session.checkpoints import Checkpoints
from spmdrl.session.journal import Journal
from spmdrl.session.session import Session
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.world import World
from spmdrl.supervised.generations import Generations
from spmdrl.supervised.rows import Rows, pack
from spmdrl.tracking.metrics import Metrics, Timer


@dataclass
class SupervisedRun:
    """Parts of a job on this rank."""

    session: Session[SFTConfig]
    models: Models
    objective: Objective
    data: Rows
    held_out: Batch | None
    """This rank's share of the evaluation; None: there is none."""
    generations: Generations | None
    """The engine that answers prompts during the job; None: there is none."""
    checkpoints: Checkpoints
    journal: Journal
    counts: Counter
    step_began: float = 0.0
    numbers: dict[str, float] | None = None
    """Numbers of an evaluation that the next line of the log takes."""
    samples: list[dict] = field(default_factory=list)
    """Answers that go with that line."""

    @property
    def cfg(self) -> SFTConfig:
        """The job's settings."""
        return self.session.cfg

    @property
    def world(self) -> World:
        """All ranks."""
        return self.session.world

    @property
    def timer(self) -> Timer:
        """Seconds of a step by phase."""
        return self.session.timer

    @property
    def policy(self) -> Any:
        """The model that learns."""
        return self.models.policy

    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 0."""
        for step in self.session.steps(self.checkpoints.start_step):
            self.step_began = time.perf_counter()
            yield step

    def rows(self, step: int) -> Batch:
        """This rank's rows of a step, encoded and packed. Collective."""
        with self.timer("rows"):
            mine, self.counts = self.data.take(step, last=step + 1 == self.cfg.run.steps)
            return pack(mine.sequences, self.cfg.sft.neftune, (self.cfg.run.seed, step))

    def teach(self, batch: Batch) -> None:
        """Add what the teacher says of the trained tokens, where there is one. Collective."""
        if isinstance(self.objective, DistillObjective):
            assert self.models.reference is not None
            with self.timer("logp"):
                self.objective.ask(batch, "reference", self.models.reference)

    def evaluate(self, step: int, force: bool = False) -> None:
        """Measure the loss on the held-out rows if that is due before this step. Collective."""
        every = self.cfg.eval.every
        if self.held_out is None or not every or (step % every and not force):
            return
        with self.timer("eval"):
            logp_T, top_T = self.policy.logprobs(self.held_out, 1.0, "top")
            mask_T = self.held_out.token["mask"]
            sums = [-logp_T[mask_T].double().sum(), top_T[mask_T].double().sum(), mask_T.sum().double()]
            nll, right, count = self.world.data_peers.sum(torch.stack(sums)).tolist()
            self.numbers = {"eval/loss": nll / count, "eval/accuracy": right / count}

    def sample(self, step: int, force: bool = False) -> None:
        """Let the model answer the held-out prompts if that is due before this step. Collective."""
        every = self.cfg.generate.every
        if self.generations is None or (step % every and not force):
            return
        with self.timer("rollout"):
            # As a line of the log: an answer before a step stands with that step, the last ones with the last.
            self.samples = self.generations.sample(step + (not force))

    def log(self, step: int, batch: Batch, stats: Metrics) -> None:
        """Reduce this step's numbers over ranks and write them. Collective."""
        world = self.world
        with self.timer("log"):
            # Ranks of one data position hold the same sequences.
            share = world.data_size / world.size
            stats.add_sum("tokens/all", batch.n_tokens * share)
            stats.add_sum("tokens/trained", float(batch.token["mask"].sum()) * share)
            stats.add_max("tokens/most_on_a_rank", batch.n_tokens)
            for name, seconds in self.timer.flush().items():
                stats.add(name, seconds)
            stats.add_max("time/step", time.perf_counter() - self.step_began)
            values = stats.reduce(lambda x, op: all_reduce(x, op, world.data_group), world.device)
            most = values.pop("tokens/most_on_a_rank") * world.data_size
            values["packing/waste"] = 1 - values["tokens/all"] / most if most else 0.0
            values["tokens/s"] = values["tokens/all"] / values["time/step"]
            values |= {f"data/{name}": float(count) for name, count in self.counts.items()}
            if rows := self.data.mixture.rows:
                values["data/epoch"] = (step + 1) * self.cfg.sft.rows_per_step / rows
            values |= self.checkpoints.saver.poll() | (self.numbers or {})
            self.numbers = None
            self.checkpoints.saver.know(step + 1, values)
            self.journal.step(step + 1, values, self.samples)
            self.samples = []

    def checkpoint(self, step: int) -> None:
        """Agree on the step that was done, save if it is due, and leave if that is wanted. Collective."""
        self.checkpoints.step_done(step, {"version": self.policy.version})

    def leave(self, left: PreemptedError) -> None:
        """Save what was learnt where no checkpoint has it. Collective."""
        self.checkpoints.leave(left)

    def finish(self) -> None:
        """Evaluate what was learnt, and say where everything is. Collective."""
        saver, lines = self.checkpoints.saver, []
        done = max(self.checkpoints.start_step, self.cfg.run.steps)
        rank_status.step = rank_status.done = done
        self.evaluate(done, force=True)
        self.sample(done, force=True)
        self.journal.rows(self.samples)
        if self.numbers:
            self.journal.numbers(done, self.numbers)
            saver.know(done + 1, self.numbers)
            lines.append("  ".join(f"{k} {v:.4f}" for k, v in self.numbers.items()))
        saver.finish()
        if written := saver.poll():
            self.journal.numbers(done, written)
        self.session.finish(lines)

    def close(self) -> None:
        """Close files and threads."""
        self.journal.close()
        self.data.thread.shutdown(wait=False, cancel_futures=True)
