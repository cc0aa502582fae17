"""The loss scale for a backward in float16.

Gradients in float16 below 6e-8 become 0, those above 65,504 become inf. So the loss is multiplied by a scale before its
backward, and the gradient divided by it in float32 (https://arxiv.org/abs/1710.03740). The scale follows torch's
GradScaler: it halves when the gradient is not finite, and doubles after INTERVAL finite steps in a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from spmdrl.policy.contract import HeadFunction, TokenLoss


@dataclass
class LossScale:
    """The scale of one model's loss: a power of 2, equal on every rank."""

    scale: float = 2.0**16
    clean: int = 0
    """Steps in a row with a finite gradient since the scale changed."""

    GROWTH: ClassVar[float] = 2.0
    BACKOFF: ClassVar[float] = 0.5
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
            self.scale = max(self.scale * self.BACKOFF, self.LEAST)
        elif self.clean == self.INTERVAL:
            self.scale, self.clean = self.scale * self.GROWTH, 0

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
    function: Callable[..., tuple[torch.Tensor, dict]] = token_loss[0]

    def multiplied(*args, **more) -> tuple[torch.Tensor, dict]:
        loss_C, stats = function(*args, **more)
        return loss_C * scale, stats

    return multiplied, token_loss[1]
