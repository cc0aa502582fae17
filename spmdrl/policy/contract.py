"""The contract of policies, and that of the objectives that train them."""

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
    """The loss of one micro-batch (a scalar, already divided by global counts), and sums for the log."""

    loss: torch.Tensor
    stats: Metrics


TokenLoss = tuple[Callable[..., tuple[torch.Tensor, dict]], dict[str, torch.Tensor]]
"""A loss in which no token depends on another: a function (logp [n], entropy [n], columns of these n rows) -> (loss [n]
with its final weight, stats), and the columns [T]. The entropy is None where `second` is another number."""


HeadFunction = Callable[..., tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]]
"""Replaces a language model's head where a loss needs more than logp and entropy: a function (states_nD, weight_VD,
rows_n, divisor, softcap) -> (a loss, a scalar with gradient or None; numbers [n, ...] without gradient).

states_nD: the states before the tokens under the mask; rows_n: the indices of these tokens in [T]. divisor: divides the
logits; it is the temperature times the family's own divisor. softcap: the cap on logits, or None.
"""


@dataclass(frozen=True)
class OutputHead:
    """The output layer by which a language model turns hidden states into logits."""

    weight_VD: torch.Tensor
    divisor: float
    softcap: float | None


@dataclass
class Shared:
    """Facts of one optimizer step for all of its micro-batches, equal on every rank except `active`."""

    totals: Totals = field(default_factory=lambda: Totals(0.0, 0.0))
    """Global denominators."""
    active: torch.Tensor | None = None
    """bool [B]: this rank's sequences that contribute; the others do not run. None: all contribute."""
    on_policy: bool = False
    """old_logp was computed before the update with exactly the weights that this step begins with."""


Second = Literal["entropy", "collision", "top"]
"""A language model's second number beside logp: the entropy; the sum over the vocabulary of p squared (no gradient); or
1 where the token is the likeliest one, else 0 (no gradient)."""


MEASURE = -1
"""`Objective.prepare` gets this index for a step that is measured without training."""


class Objective(Protocol):
    """A loss that trains a model (`objectives/`); its sum is the same for every layout (law 2).

    A learner calls `prepare` once per optimizer step, then `loss` for each micro-batch.
    """

    columns: frozenset[str]
    """Columns that the batch must have beside tokens and mask: `token/<name>` and `seq/<name>`."""
    temperature: float
    """Logits are divided by it before logp is taken."""
    second: Second = "entropy"
    """The number that `loss` gets beside logp."""

    def prepare(self, share: Batch, index: int) -> Shared:
        """Compute the inputs that the loss needs from a whole optimizer step. Collective over data positions.

        share: this rank's sequences, which may get further columns. index: of the step in the update, or MEASURE.
        """
        ...

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Any) -> LossResult:
        """Sum the loss of one micro-batch. No communication.

        first_T, second_T: the head's two numbers for each token, with gradient: logp and `second` of a language model,
        or value and zeros of a critic. shared: the result of `prepare`.
        """
        ...

    def token_loss(self, micro: Batch, shared: Any, device: torch.device) -> TokenLoss | HeadFunction | None:
        """Return the same loss for a head that computes logp in chunks; None where tokens depend on each other.

        A `HeadFunction` returns the loss and the two numbers that `loss` then receives.
        """
        return None


Write = Callable[[Path, World], None]
"""(folder, groups to communicate over) -> `folder/model` as HF safetensors in `--model.dtype` with `fixed`, and
`folder/state` for the optimizer and float32 weights that `model` has rounded. Collective."""

Head = Literal["lm", "value", "score", "steps"]
"""A model's output for each token: logp and entropy; the value of the state before it; or a score of the text up to it,
by a classifier of sequences or, for `steps` and where the folder holds one, of tokens."""
SCORES = ("score", "steps")
"""Heads that read the state after a token."""


class Policy(Protocol):
    """A model sharded over ranks. Every method is collective: all ranks call it together."""

    version: int
    """Counts changes of the weights. An engine must hold this version to sample (law 5)."""
    updates_done: int
    """Optimizer steps that the weights have taken."""
    updates_due: int
    """Optimizer steps that were due, whether taken or skipped; the learning rate schedule counts these."""
    fixed: dict[str, bytes]
    """Name -> content of the files in `model/` beside the weights, on rank 0. Computed at first access, at the latest
    when a run that saves starts, and copied into every checkpoint. Raises ValueError."""

    def logprobs(
        self, batch: Batch, temperature: float, second: Second = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logp and `second` [T] of a batch on the host, without gradient; 0 outside the loss mask."""
        ...

    def read(self, batch: Batch, temperature: float, function: HeadFunction) -> tuple[torch.Tensor, ...]:
        """Return the numbers [T, ...] of a batch that a head function computes, on the host; zeros outside the mask.

        Empty if no rank has a sequence. Only the fsdp backend has this method and the next one.
        """
        ...

    def output_head(self) -> OutputHead:
        """Return the whole output head on the device in the compute type."""
        ...

    def values(self, batch: Batch) -> torch.Tensor:
        """Return values or scores on the host, without gradient; 0 outside the mask.

        [T], or [T, L] for a classifier with two or more labels L.
        """
        ...

    def update(self, batch: Batch, objective: Objective, steps: int = 1) -> Metrics:
        """Take `steps` optimizer steps, each on the sequences that name it in `batch.seq["update"]`.

        Adds 1 to `version` if any step was taken. A step whose gradient is exactly zero changes and counts nothing.
        """
        ...

    def pieces(self, part: Part = "model") -> list[Piece]:
        """Return this rank's part of every weight, under HF checkpoint names, as views that an update changes.

        Names and boxes are the same at every call. part: for a policy with adapters, the full `model` with the adapters
        merged in (computed at every access), the unmodified `base`, or the `adapter` weights alone.
        """
        ...

    def take_over(self, other: "Policy", share: float = 1.0) -> None:
        """Average the weights with those of another policy of the same backend, architecture and layout, locally.

        share: the other policy's weight.
        """
        ...

    def bytes_by_owner(self) -> dict[str, int]:
        """Return the bytes that this rank holds on its device, by owner: parameters, gradients, optimizer."""
        ...

    def offload(self, place: Literal["host", "disk"], parameters: bool = True) -> None:
        """Move optimizer state off the device, and the parameters if `parameters` is true; drop the gradients."""
        ...

    def onload(self) -> None:
        """Bring everything that was offloaded back to the device."""
        ...

    def saving(self, copy: bool = False) -> Write:
        """Return a function that writes this model over the groups of its own world.

        copy: the function writes a host copy of the current values. It may then run in a thread beside training, over
        the groups of a twin of that world (`spmd.mesh.twin`).
        """
        ...

    def save(self, folder: Path) -> None:
        """Write this model into `folder`."""
        ...

    def checkpoint_bytes(self) -> int:
        """Estimate how many bytes `save` writes, over all ranks."""
        ...

    def load(self, folder: Path) -> None:
        """Read a folder that `save` wrote, on this or another layout."""
        ...
