"""The scale of a loss whose backward runs in float16.

Gradients in float16 below 6e-8 become 0 and above 65,504 inf. The loss is multiplied by a scale before its backward and
the gradient divided by it in float32 (https://arxiv.org/abs/1710.03740). The scale follows torch's GradScaler: it is
halved where the gradient is not finite, and doubled after so many steps in a row in which it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from spmdrl.policy.contract import HeadFunction, TokenLoss


@dataclass
class LossScale:
    """The scale of one model's loss: a power of 2, alike on every rank."""

    scale: float = 2.0**16
    clean: int = 0
    """Steps in a row whose gradient was finite, since the scale changed."""

    GROWTH: ClassVar[float] = 2.0
    BACKOFF: ClassVar[float] = 0.5
    INTERVAL: ClassVar[int] = 2000
    LEAST: ClassVar[float] = 1.0
    """At this scale a gradient that is not finite is none of the scale's doing."""

    @property
    def can_shrink(self) -> bool:
        """True where a smaller scale may make the gradient finite."""
        return self.scale > self.LEAST

    def judge(self, finite: bool) -> None:
        """Take note of a step. finite: of its gradient over all ranks, before the division."""
        self.clean = self.clean + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale * self.BACKOFF, self.LEAST)
        elif self.clean == self.INTERVAL:
            self.scale, self.clean = self.scale * self.GROWTH, 0

    def state(self) -> list[float]:
        """Return the state that a resumed run needs; JSON-able."""
        return [self.scale, self.clean]

    def restore(self, state: list[float]) -> None:
        """Restore a state that `state` returned."""
        self.scale, self.clean = float(state[0]), int(state[1])


def scaled(token_loss: TokenLoss | HeadFunction | None, scale: float) -> TokenLoss | HeadFunction | None:
    """Return a loss of chunks, whose gradient is made with it, multiplied by the scale.

    Raises:
        ValueError: a function of the whole head, which has a loss of its own.
    """
    if scale == 1 or token_loss is None:
        return token_loss
    if callable(token_loss):
        raise ValueError(
            "--model.dtype float16: a divergence from a teacher has no loss scale; take bfloat16 or float32"
        )
    function: Callable[..., tuple[torch.Tensor, dict]] = token_loss[0]

    def multiplied(*args, **more) -> tuple[torch.Tensor, dict]:
        loss_C, told = function(*args, **more)
        return loss_C * scale, told

    return multiplied, token_loss[1]
