"""Detects non-finite steps and gradient-norm spikes, and scales the loss to avoid float16 gradient underflow.

All decisions are based on values reduced over ranks, so every rank makes the same decision (law 1).
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from spmdrl.data.batch import Batch
from spmdrl.policy.contract import HeadFunction, LossResult, Objective, TokenLoss

WINDOW, LEAST = 32, 8
"""A spike is a gradient norm far above the median of the last WINDOW norms. Detection starts after LEAST norms."""
MOST = 3
"""Maximum number of batches to store per model and kind of anomaly, as batches are large."""


class NonFiniteError(RuntimeError):
    """The loss or the gradient was non-finite in too many steps in a row. The message gives the optimizer step."""


@dataclass(frozen=True)
class AnomalousStep:
    """A step checked by `Guard.passes`; anomalous if its gradient norm spikes, or if norm or loss is not finite."""

    batch: Batch
    """This rank's sequences in the step, with all columns."""
    share: int
    """Index of the step within its update, starting at 0."""
    updates_done: int
    """Number of optimizer steps taken before this one."""
    version: int
    norm: float
    """2-norm of the gradient before clipping; can be nan or inf."""
    loss_finite: bool
    median: float
    """Median of the recent gradient norms, or nan if there are none."""
    on_policy: bool
    """`Shared.on_policy` in this step."""

    @property
    def finite(self) -> bool:
        """True if loss and gradient norm are finite."""
        return self.loss_finite and math.isfinite(self.norm)


@dataclass
class Guard:
    """Checks the optimizer steps of one model."""

    limit: int
    """Value of `--optimizer.bad-steps`: the run stops after this many non-finite steps in a row."""
    factor: float
    """Value of `--run.spike-factor`: a norm above this multiple of the median is a spike; 0 disables detection."""
    store: Callable[[AnomalousStep], str] | None = None
    """Callback that stores an anomalous step and returns instructions for inspecting it, for messages. Use None to
    store nothing. Collective over the training ranks."""
    row: int = 0
    """Current number of non-finite steps in a row."""
    stored: list[int] = field(default_factory=lambda: [0, 0])
    """Number of steps stored so far: [spikes, non-finite steps]."""
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def passes(self, step: AnomalousStep) -> bool:
        """Return True if the optimizer may take this step; record its norm and store the step if it is anomalous.

        Collective if the step is anomalous.

        Raises:
            NonFiniteError: `limit` steps in a row were non-finite.
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
        what = f"the gradient norm is {step.norm}" if not math.isfinite(step.norm) else "the loss is not finite"
        often = f", the last of {self.row} bad steps in a row (--optimizer.bad-steps {self.limit})"
        often = often if self.row > 1 else ""
        look = where or "the last batch in samples.jsonl"
        raise NonFiniteError(
            f"{what} at optimizer step {step.updates_done}{often}; weights are unchanged. "
            f"Lower --optimizer.lr, or look at {look}"
        )

    @property
    def median(self) -> float:
        """The median of the recent gradient norms, or nan if there are none."""
        return statistics.median(self.norms) if self.norms else math.nan

    def spikes(self, norm: float) -> bool:
        """Return True if the norm exceeds `factor` times the median of the recent norms."""
        return bool(self.factor) and len(self.norms) >= LEAST and norm > self.factor * self.median

    def state(self) -> dict:
        """Return the JSON-serializable state that a resumed run needs."""
        return {"row": self.row, "handed_on": list(self.stored), "norms": list(self.norms)}

    def restore(self, state: dict) -> None:
        """Restore a state that `state` returned."""
        self.row, self.stored = state["row"], list(state["handed_on"])
        self.norms = deque(state["norms"], maxlen=WINDOW)


@dataclass
class LossScale:
    """The loss scale of one model for float16 backward passes: a power of 2, the same on every rank.

    In float16, gradients below 3e-8 become 0 and gradients above 65,519 become inf. Therefore, the loss is multiplied
    by the scale before backward, and the gradient is divided by it in float32 (https://arxiv.org/abs/1710.03740). As in
    torch's GradScaler, the scale is halved when the gradient is not finite, and doubled after INTERVAL finite steps in
    a row.
    """

    scale: float = 2.0**16
    clean: int = 0
    """Number of consecutive steps with a finite gradient since the scale last changed."""

    INTERVAL: ClassVar[int] = 2000
    LEAST: ClassVar[float] = 1.0
    """Minimum scale. If the gradient is not finite even at this scale, the scale is not the cause."""

    @property
    def can_shrink(self) -> bool:
        """True if the scale can be halved, which might make the next gradient finite."""
        return self.scale > self.LEAST

    def adapt(self, finite: bool) -> None:
        """Halve, keep or double the scale after a step. finite: True if the scaled gradient was finite on all ranks."""
        self.clean = self.clean + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, self.LEAST)
        elif self.clean == self.INTERVAL:
            self.scale, self.clean = self.scale * 2, 0

    def state(self) -> list[float]:
        """Return the JSON-serializable state that a resumed run needs."""
        return [self.scale, self.clean]

    def restore(self, state: list[float]) -> None:
        """Restore a state that `state` returned."""
        self.scale, self.clean = float(state[0]), int(state[1])


def scaled(token_loss: TokenLoss | HeadFunction | None, scale: float) -> TokenLoss | HeadFunction | None:
    """Return a chunked loss multiplied by the scale, so that its gradient is scaled too. None is returned as is.

    Raises:
        ValueError: the loss is a `HeadFunction`, which cannot be scaled.
    """
    if scale == 1 or token_loss is None:
        return token_loss
    if callable(token_loss):
        raise ValueError("--model.dtype float16: distillation supports no loss scale; use bfloat16 or float32")
    function, columns = token_loss

    def multiplied(*args, **more) -> tuple[torch.Tensor, dict]:
        loss_C, stats = function(*args, **more)
        return loss_C * scale, stats

    return multiplied, columns


class SummedLoss:
    """Wraps an objective and accumulates the loss of every micro-batch in the tensor `total`."""

    def __init__(self, objective: Objective, total: torch.Tensor):
        """total: a float64 scalar that accumulates the losses."""
        self.objective, self.total = objective, total

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objective, name)

    def loss(self, *inputs: Any) -> LossResult:
        """Return the objective's loss for a micro-batch and add it to `total`."""
        result = self.objective.loss(*inputs)
        self.total = self.total + result.loss.detach().double()
        return result
