"""A job on one rank: the work that all kinds of jobs do between steps and at the end."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist

from spmdrl.config.schema import TrainingConfig
from spmdrl.data.batch import Batch
from spmdrl.data.distribute import balance
from spmdrl.health.preempt import PreemptedError
from spmdrl.health.status import rank_status
from spmdrl.policy.models import Models
from spmdrl.session.checkpoints import Checkpoints
from spmdrl.session.journal import Journal
from spmdrl.session.session import Session
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Metrics, Timer

C = TypeVar("C", bound=TrainingConfig)


@dataclass(kw_only=True)
class JobRun(Generic[C]):
    """The state and methods that all kinds of jobs share. Subclasses add sampling, evaluation and logging."""

    session: Session[C]
    models: Models
    checkpoints: Checkpoints
    journal: Journal
    step_began: float = 0.0
    digits: ClassVar[int] = 4
    """Number of decimals for numbers in the final console lines."""

    @property
    def cfg(self) -> C:
        """The job's settings."""
        return self.session.cfg

    @property
    def world(self) -> World:
        """The ranks of the job, with their roles and process groups."""
        return self.session.world

    @property
    def timer(self) -> Timer:
        """The timer, which records the seconds spent in each phase of a step."""
        return self.session.timer

    @property
    def policy(self) -> Any:
        """The policy, or None on ranks that do not train."""
        return self.models.policy

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps (0-based)."""
        for step in self.session.steps(self.checkpoints.start_step):
            self.step_began = time.perf_counter()
            yield step

    def balance(self, batch: Batch) -> Batch:
        """Distribute the sequences of all ranks evenly over the ranks that train. Collective."""
        with self.timer("exchange"):
            return balance(batch, self.world)

    def reduced(
        self, stats: Metrics, group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
    ) -> dict[str, float]:
        """Return a step's metrics and times, reduced over a process group. Collective over the group."""
        for name, seconds in self.timer.flush().items():
            stats.add(name, seconds)
        stats.add_max("time/step", time.perf_counter() - self.step_began)
        return stats.reduce(lambda x, op: all_reduce(x, op, group), device)

    def checkpoint(self, step: int) -> None:
        """Check that all ranks agree after a step, save if a checkpoint is due, and stop on preemption. Collective."""
        self.checkpoints.step_done(step, self.held())

    def held(self) -> dict[str, int]:
        """Return the numbers that must be equal on all ranks after a step. `checkpoint` checks them."""
        return {"version": self.policy.version}

    def leave(self, left: PreemptedError) -> None:
        """Save a checkpoint of the last step before a preempted job exits, unless it is already saved. Collective."""
        self.checkpoints.leave(left)

    def finish(self) -> None:
        """Evaluate the models at the end of the job, and print the metrics and result paths. Collective."""
        done = max(self.checkpoints.start_step, self.cfg.run.steps)
        rank_status.step = rank_status.done = done
        numbers, saver = self.measure_last(done), self.checkpoints.saver
        saver.finish()
        if written := saver.poll():
            self.journal.numbers(done, written)
        shown = "  ".join(f"{name} {value:.{self.digits}f}" for name, value in numbers.items())
        self.session.finish([shown] if numbers else [])

    def measure_last(self, done: int) -> dict[str, float]:
        """Evaluate the models after `done` steps, log the metrics, and return them for the final lines. Collective."""
        raise NotImplementedError

    def close(self) -> None:
        """Close files and processes."""
        self.journal.close()
