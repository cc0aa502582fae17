"""Numerical guards of an update: a step that is not finite is skipped and counted, a gradient that spikes is noticed.

Everything judged here was reduced over ranks before, so all of them come to the same end (law 1).
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from spmdrl.data.batch import Batch

WINDOW, LEAST = 32, 8
"""A spike is measured by the median of so many last norms, once there are at least so many."""
MOST = 3
"""Batches handed on in a run of each kind, spikes and steps that are not finite: they are large."""


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not a number; names where it was seen first."""


@dataclass(frozen=True)
class AnomalousStep:
    """An optimizer step whose gradient spikes, or whose loss or gradient is not finite."""

    batch: Batch
    """This rank's sequences of it, with every column."""
    share: int
    """Its place in the update."""
    updates_done: int
    """Optimizer steps behind the weights that it began with."""
    version: int
    norm: float
    """Of the gradient, before clipping; may be nan or inf."""
    loss_finite: bool
    median: float
    """Of the last norms; nan where there are none."""
    on_policy: bool
    """As in `Shared`."""

    @property
    def finite(self) -> bool:
        """Loss and gradient are numbers: it is a spike."""
        return self.loss_finite and math.isfinite(self.norm)


@dataclass
class Guard:
    """Judges the optimizer steps of one model."""

    limit: int
    """`--optimizer.bad-steps`."""
    factor: float
    """`--run.spike-factor`."""
    hand_on: Callable[[AnomalousStep], str] | None = None
    """Gets what stands out and returns where it is kept. Collective over the ranks that train."""
    row: int = 0
    """Steps without a number so far, one after the other."""
    handed_on: list[int] = field(default_factory=lambda: [0, 0])
    """Spikes, and steps that are not finite."""
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def passes(self, step: AnomalousStep) -> bool:
        """Whether the optimizer may take this step, which is told of and counted here. Collective where it stands out.

        Raises:
            NonFiniteError: it may not, and is the last of `limit` such in a row.
        """
        where = ""
        if (not step.finite or self.spikes(step.norm)) and self.hand_on and self.handed_on[not step.finite] < MOST:
            self.handed_on[not step.finite] += 1
            where = self.hand_on(step)
        if step.finite:
            self.row = 0
            if step.norm > 0:
                self.norms.append(step.norm)
            return True
        self.row += 1
        if self.row < max(self.limit, 1):
            return False
        what = f"gradient norm is {step.norm}" if not math.isfinite(step.norm) else "the loss is not finite"
        often = f", {self.row} in a row (--optimizer.bad-steps {self.limit})" if self.row > 1 else ""
        look = f"python -m spmdrl.replay {where}" if where else "the last batch in samples.jsonl"
        raise NonFiniteError(
            f"{what} at optimizer step {step.updates_done}{often}; weights are unchanged. "
            f"Lower --optimizer.lr, or look at {look}"
        )

    @property
    def median(self) -> float:
        """Of the last norms; nan where there are none."""
        return statistics.median(self.norms) if self.norms else math.nan

    def spikes(self, norm: float) -> bool:
        """Whether a finite norm is far above those before it."""
        return bool(self.factor) and len(self.norms) >= LEAST and norm > self.factor * self.median

    def state(self) -> dict:
        """What a resumed run has to know; JSON-able."""
        return {"row": self.row, "handed_on": list(self.handed_on), "norms": list(self.norms)}

    def restore(self, state: dict) -> None:
        """Take over what `state` gave."""
        self.row, self.handed_on = state["row"], list(state["handed_on"])
        self.norms = deque(state["norms"], maxlen=WINDOW)
