"""The interfaces of policies (`Policy`) and of the objectives that train them (`Objective`)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from spmdrl.algos.aggregate import Totals
from spmdrl.config.engines import Part
from spmdrl.data.batch import Batch
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Metrics
from spmdrl.weights.reshard import Piece


@dataclass
class LossResult:
    """The loss of one micro-batch (a scalar, already divided by global counts), and statistics for the log."""

    loss: torch.Tensor
    stats: Metrics


TokenLoss = tuple[Callable[..., tuple[torch.Tensor, dict]], dict[str, torch.Tensor]]
"""A loss in which no token depends on another: a function (logp [n], entropy [n], columns of these n rows) -> (loss [n]
with its final weight, stats), and the columns [T]. The entropy is None if `second` is another number."""


HeadFunction = Callable[..., tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]]
"""Replaces a language model's head if a loss needs more than logp and entropy: a function (states_nD, weight_VD,
rows_n, divisor, softcap) -> (a scalar loss with gradient, or None; numbers [n, ...] without gradient).

states_nD: the states that predict the tokens under the mask; rows_n: the indices of these tokens in [T]. divisor:
divides the logits; the temperature times the divisor of the model family. softcap: the cap on logits, or None.
"""


@dataclass(frozen=True)
class OutputHead:
    """The output layer by which a language model turns hidden states into logits."""

    weight_VD: torch.Tensor
    divisor: float
    softcap: float | None


@dataclass
class Shared:
    """Values of one optimizer step that all of its micro-batches need; the same on every rank except `active`."""

    totals: Totals = field(default_factory=lambda: Totals(0.0, 0.0))
    """Global denominators."""
    active: torch.Tensor | None = None
    """bool [B]: this rank's sequences that contribute to the loss; others are not run. None: all contribute."""
    on_policy: bool = False
    """True if old_logp was computed with exactly the weights at the start of this step."""


Second = Literal["entropy", "collision", "top"]
"""The number that a language model returns in addition to logp. `entropy`; `collision`: the sum of p squared over the
vocabulary, without gradient; `top`: 1 if the token is the likeliest one, else 0, without gradient."""


MEASURE = -1
"""Index passed to `Objective.prepare` for a step whose loss is only measured, without training."""


class Objective(Protocol):
    """A loss that trains a model (`objectives/`); its sum is the same for every layout (law 2).

    A learner calls `prepare` once per optimizer step, then `loss` for each micro-batch.
    """

    columns: frozenset[str]
    """Columns that the batch must have in addition to tokens and mask: `token/<name>` and `seq/<name>`."""
    temperature: float
    """The temperature that divides logits before logp is computed."""
    second: Second = "entropy"
    """The number that `loss` gets in addition to logp."""

    def prepare(self, share: Batch, index: int) -> Shared:
        """Compute the values that the loss needs from all sequences of an optimizer step. Collective over data
        positions.

        share: this rank's sequences; `prepare` may add columns to them. index: number of the step within the update,
        or MEASURE.
        """
        ...

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Any) -> LossResult:
        """Return the summed loss of one micro-batch, without communication.

        first_T, second_T: the head's two numbers for each token, with gradient: logp and `second` of a language model,
        or value and zeros of a critic. shared: the result of `prepare`.
        """
        ...

    def token_loss(self, micro: Batch, shared: Any, device: torch.device) -> TokenLoss | HeadFunction | None:
        """Return the same loss for a head that computes logp in chunks; None if the loss of a token depends on others.

        A `HeadFunction` returns the loss and the two numbers that `loss` then receives.
        """
        return None


Write = Callable[[Path, World], None]
"""Function of (folder, world whose groups it communicates over) that writes `folder/model` (HF safetensors in
`--model.dtype`, and the files of `fixed`) and `folder/state` (optimizer state, and float32 weights if `model` rounds
them). Collective."""

Head = Literal["lm", "value", "score", "steps"]
"""The kind of output for each token. `lm`: logp and entropy; `value`: the value of the state before the token; `score`:
a score of the text up to the token, by a classifier of sequences; `steps`: the same by a classifier of tokens if the
folder holds one."""
SCORES = ("score", "steps")
"""Heads that are applied to the state after a token."""


class Policy(Protocol):
    """A model sharded over ranks. Every method is collective: all ranks call it together."""

    version: int
    """Number of changes of the weights so far. An engine samples only from weights of this version (law 5)."""
    updates_done: int
    """Number of optimizer steps taken so far."""
    updates_due: int
    """Number of optimizer steps so far, taken or skipped; the learning rate schedule depends on it."""
    fixed: dict[str, bytes]
    """Name -> content of the files in `model/` other than the weights, on rank 0. Computed at the first access, which
    in a run that saves is at start, and copied into every checkpoint. Raises ValueError."""

    def logprobs(
        self, batch: Batch, temperature: float, second: Second = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logp and `second` [T] of a batch in host memory, without gradient; 0 outside the loss mask."""
        ...

    def read(self, batch: Batch, temperature: float, function: HeadFunction) -> tuple[torch.Tensor, ...]:
        """Return the numbers [T, ...] that a head function computes for a batch, on the host; zeros outside the mask.

        The tuple is empty if no rank has a sequence. Only the fsdp backend implements `read` and `output_head`.
        """
        ...

    def output_head(self) -> OutputHead:
        """Return the complete output head on the device, in the compute type."""
        ...

    def values(self, batch: Batch) -> torch.Tensor:
        """Return values or scores [T] on the host, without gradient; 0 outside the mask.

        A classifier with L > 1 labels returns [T, L].
        """
        ...

    def update(self, batch: Batch, objective: Objective, steps: int = 1) -> Metrics:
        """Take `steps` optimizer steps; step i uses the sequences whose `batch.seq["update"]` is i.

        If any step was taken, `version` increases by 1. A step whose gradient is exactly zero is not taken.
        """
        ...

    def pieces(self, part: Part = "model") -> list[Piece]:
        """Return this rank's part of every weight under HF checkpoint names, as views that reflect later updates.

        Names and boxes are the same at every call. part: for a policy with adapters, `model` is the complete model
        with the adapters merged in (computed at every access), `base` the unmodified model, `adapter` the adapter
        weights alone.
        """
        ...

    def take_over(self, other: "Policy", share: float = 1.0) -> None:
        """Average the weights with those of another policy of the same backend, architecture and layout.

        share: weight of the other policy in the average. No communication.
        """
        ...

    def bytes_by_owner(self) -> dict[str, int]:
        """Return the bytes in use on this rank's device, by owner: parameters, gradients, optimizer."""
        ...

    def offload(self, place: Literal["host", "disk"], parameters: bool = True) -> None:
        """Move optimizer state off the device, and the parameters if `parameters` is true; drop the gradients."""
        ...

    def onload(self) -> None:
        """Move everything that was offloaded back to the device."""
        ...

    def saving(self, copy: bool = False) -> Write:
        """Return a function that writes this model and its optimizer state.

        copy: the function writes a host copy of the current values. It may then run in a thread during training, over
        the groups of a twin of the policy's world (`spmd.mesh.twin`).
        """
        ...

    def save(self, folder: Path) -> None:
        """Write this model into `folder`."""
        ...

    def checkpoint_bytes(self) -> int:
        """Estimate how many bytes `save` writes, over all ranks."""
        ...

    def load(self, folder: Path) -> None:
        """Read a folder that `save` wrote under this or another layout."""
        ...
