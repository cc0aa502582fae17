"""Numerical guards of an update: steps that are not finite, spikes of the gradient norm, the loss scale of float16.

All values judged here were reduced over ranks before, so every rank decides alike (law 1).
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from spmdrl.data.batch import Batch
from spmdrl.policy.contract import HeadFunction, TokenLoss

WINDOW, LEAST = 32, 8
"""A spike is measured against the median of the last WINDOW norms, once there are at least LEAST."""
MOST = 3
"""Largest number of batches stored in a run, for spikes and for non-finite steps separately: batches are large."""


class NonFiniteError(RuntimeError):
    """A loss or gradient is not finite; the message names the optimizer step."""


@dataclass(frozen=True)
class AnomalousStep:
    """An optimizer step whose gradient spikes, or whose loss or gradient is not finite."""

    batch: Batch
    """This rank's sequences of the step, with every column."""
    share: int
    """Index of the step in its update."""
    updates_done: int
    """Optimizer steps taken before this one."""
    version: int
    norm: float
    """Norm of the gradient before clipping; may be nan or inf."""
    loss_finite: bool
    median: float
    """Median of the last norms; nan if there are none."""
    on_policy: bool
    """As in `Shared`."""

    @property
    def finite(self) -> bool:
        """True if loss and gradient are finite, so that the step is a spike."""
        return self.loss_finite and math.isfinite(self.norm)


@dataclass
class Guard:
    """Judges the optimizer steps of one model."""

    limit: int
    """`--optimizer.bad-steps`."""
    factor: float
    """`--run.spike-factor`."""
    store: Callable[[AnomalousStep], str] | None = None
    """Stores an anomalous step and returns how to inspect it. Collective over the training ranks."""
    row: int = 0
    """Consecutive non-finite steps so far."""
    stored: list[int] = field(default_factory=lambda: [0, 0])
    """Steps stored so far: spikes, non-finite ones."""
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def passes(self, step: AnomalousStep) -> bool:
        """Return True if the optimizer may take this step; count it, and store it if it is anomalous.

        Collective if the step is anomalous.

        Raises:
            NonFiniteError: the step is not finite, and is the last of `limit` such steps in a row.
        """
        where = ""
        if (not step.finite or self.spikes(step.norm)) and self.store and self.stored[not step.finite] < MOST:
            self.stored[not step.finite] += 1
            where = self.store(step)
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
        look = where or "the last batch in samples.jsonl"
        raise NonFiniteError(
            f"{what} at optimizer step {step.updates_done}{often}; weights are unchanged. "
            f"Lower --optimizer.lr, or look at {look}"
        )

    @property
    def median(self) -> float:
        """The median of the last norms; nan if there are none."""
        return statistics.median(self.norms) if self.norms else math.nan

    def spikes(self, norm: float) -> bool:
        """Return True if a finite norm is more than `factor` times the median of the norms before it."""
        return bool(self.factor) and len(self.norms) >= LEAST and norm > self.factor * self.median

    def state(self) -> dict:
        """Return the state that a resumed run needs; JSON-serializable."""
        return {"row": self.row, "handed_on": list(self.stored), "norms": list(self.norms)}

    def restore(self, state: dict) -> None:
        """Restore a state that `state` returned."""
        self.row, self.stored = state["row"], list(state["handed_on"])
        self.norms = deque(state["norms"], maxlen=WINDOW)


@dataclass
class LossScale:
    """The scale of one model's loss for a backward in float16: a power of 2, equal on every rank.

    Gradients in float16 below 6e-8 become 0, those above 65,504 become inf. So the loss is multiplied by a scale before
    its backward, and the gradient divided by it in float32 (https://arxiv.org/abs/1710.03740). The scale follows
    torch's GradScaler: it halves when the gradient is not finite, and doubles after INTERVAL finite steps in a row.
    """

    scale: float = 2.0**16
    clean: int = 0
    """Steps in a row with a finite gradient since the scale changed."""

    INTERVAL: ClassVar[int] = 2000
    LEAST: ClassVar[float] = 1.0
    """At this scale the loss scale is not the cause of a gradient that is not finite."""

    @property
    def can_shrink(self) -> bool:
        """True where a smaller scale may make the gradient finite."""
        return self.scale > self.LEAST

    def adapt(self, finite: bool) -> None:
        """Adapt the scale after a step. finite: whether the gradient over all ranks was, before the division."""
        self.clean = self.clean + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, self.LEAST)
        elif self.clean == self.INTERVAL:
            self.scale, self.clean = self.scale * 2, 0

    def state(self) -> list[float]:
        """Return the state that a resumed run needs; JSON-serializable."""
        return [self.scale, self.clean]

    def restore(self, state: list[float]) -> None:
        """Restore a state that `state` returned."""
        self.scale, self.clean = float(state[0]), int(state[1])


def scaled(token_loss: TokenLoss | HeadFunction | None, scale: float) -> TokenLoss | HeadFunction | None:
    """Multiply a loss that is computed in chunks, together with its gradient, by the scale.

    Raises:
        ValueError: a function of the whole head, which computes a loss of its own.
    """
    if scale == 1 or token_loss is None:
        return token_loss
    if callable(token_loss):
        raise ValueError(
            "--model.dtype float16: a divergence from a teacher has no loss scale; take bfloat16 or float32"
        )
    function, columns = token_loss

    def multiplied(*args, **more) -> tuple[torch.Tensor, dict]:
        loss_C, stats = function(*args, **more)
        return loss_C * scale, stats

    return multiplied, columns
