"""What a policy is. `fsdp/` is one; another backend adds its files beside it and nothing above changes."""

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
    """The loss of one micro-batch, a scalar that is divided by global counts already, and sums for the log."""

    loss: torch.Tensor
    stats: Metrics


TokenLoss = tuple[Callable[..., tuple[torch.Tensor, dict]], dict[str, torch.Tensor]]
"""A loss in which no token depends on another: (logp [n], entropy [n], columns of these n rows) -> (loss [n] with its
final weight, stats), and the columns [T]."""


@dataclass
class Shared:
    """Facts of one optimizer step that all of its micro-batches share, the same on every rank but for `active`."""

    totals: Totals = field(default_factory=lambda: Totals(0.0, 0.0))
    """Global denominators."""
    active: torch.Tensor | None = None
    """bool [B], this rank's sequences that contribute; the others are not run. None: all do."""
    on_policy: bool = False
    """old_logp is of the very weights that the step begins with, by a pass before the update."""


class Objective(Protocol):
    """The loss that a model learns by, in a form that every layout of ranks and micro-batches sums alike (law 2).

    The policy update of reinforcement learning is one, a critic another (`rl/objectives.py`). A learner calls `prepare`
    once for each optimizer step, then `loss` for each micro-batch.
    """

    columns: frozenset[str]
    """Columns that the batch must have beside tokens and mask: `token/<name>` and `seq/<name>`."""
    temperature: float
    """Logits are divided by it before logp is taken."""

    def prepare(self, share: Batch, index: int) -> Shared:
        """Compute what the loss needs of a whole optimizer step. Collective over data positions.

        share: this rank's sequences of the step; columns may be added to it. index: the step's place in the update.
        """
        ...

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Any) -> LossResult:
        """Sum the loss of one micro-batch. No communication.

        first_T, second_T: the head's two numbers of each token, with gradient: logp and entropy of a language model,
        value and zeros of a critic. shared: as `prepare` returned it.
        """
        ...

    def token_loss(self, micro: Batch, shared: Any, device: torch.device) -> TokenLoss | None:
        """Return the same loss for a head that computes logp in chunks; None where tokens depend on each other."""
        return None


Write = Callable[[Path, World], None]
"""(folder, groups to communicate over) -> `folder/model` as HF safetensors in `--model.dtype` with `fixed`, and
`folder/state` for the optimizer and float32 weights that `model` has rounded. Collective."""

Head = Literal["lm", "value", "score"]
"""What a model says of a token: logp and entropy; the value of the state before it; a score of all up to it."""


class Policy(Protocol):
    """A model sharded over ranks. Every method is collective: all ranks call it together."""

    version: int
    """Counts changes of the weights; what an engine must hold to sample (law 5)."""
    updates_done: int
    """Optimizer steps behind them."""
    updates_due: int
    """Optimizer steps that came up, taken or left out; the learning rate schedule counts these."""
    fixed: dict[str, bytes]
    """Name -> content of what `model/` holds beside weights, on rank 0: made when it is first asked for, no later than
    the start of a run that saves, and copied into every checkpoint. Raises ValueError."""

    def logprobs(
        self, batch: Batch, temperature: float, second: Literal["entropy", "collision"] = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logp and entropy [T] of a batch on the host, without gradient; 0 outside the loss mask.

        second: `collision` gives the sum over the vocabulary of p squared instead of the entropy.
        """
        ...

    def values(self, batch: Batch) -> torch.Tensor:
        """[T] on the host, without gradient: what a model with a value or score head says; 0 outside the mask."""
        ...

    def update(self, batch: Batch, objective: Objective, steps: int = 1) -> Metrics:
        """Take `steps` optimizer steps, each on the sequences that name it in `batch.seq["update"]`.

        version + 1 when any was taken: a step whose gradient is exactly zero changes nothing and is not counted.
        """
        ...

    def pieces(self, part: Part = "model") -> list[Piece]:
        """What this rank holds of every weight, under HF checkpoint names; views that an update changes.

        The same names and boxes in the same order at every call.

        part: of a policy with adapters, the full `model` with them in it (computed anew at every call), the `base` as
        it was, or the `adapter` weights alone. Others have the first two, which are the same.
        """
        ...

    def take_over(self, other: "Policy") -> None:
        """Copy the weights of another policy of the same backend, architecture and layout; no communication."""
        ...

    def bytes_by_owner(self) -> dict[str, int]:
        """Bytes this rank holds on its device, by owner: parameters, gradients, optimizer."""
        ...

    def offload(self, place: Literal["host", "disk"], parameters: bool = True) -> None:
        """Optimizer state off the device, and the parameters unless told to leave them; gradients are let go.

        Between updates they hold nothing: the next one begins at zero.
        """
        ...

    def onload(self) -> None:
        """All that is away back to the device, where it was."""
        ...

    def saving(self, copy: bool = False) -> Write:
        """What writes this model, over the groups of its own world.

        copy: it writes the values of this moment, of which it holds a copy on the host, and may do so in a thread
        beside training, over the groups of a twin of that world (`spmd.mesh.twin`).
        """
        ...

    def save(self, folder: Path) -> None:
        """Write it now."""
        ...

    def checkpoint_bytes(self) -> int:
        """About what `save` writes, over all ranks."""
        ...

    def load(self, folder: Path) -> None:
        """What `save` wrote, on this or another layout."""
        ...
