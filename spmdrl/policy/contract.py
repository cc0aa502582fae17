"""What a policy is. `fsdp.py` is one; another backend adds its files beside it and nothing above changes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from spmdrl.data.batch import Batch
from spmdrl.spmd.mesh import World
from spmdrl.spmd.reshard import Piece
from spmdrl.tracking.metrics import Metrics

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""`--model.dtype` in torch's terms."""


@dataclass
class LossResult:
    """What a loss makes of one micro-batch: a scalar (already divided by global counts) and sums for the log."""

    loss: torch.Tensor
    stats: Metrics


Loss = Callable[[Batch, torch.Tensor, torch.Tensor, dict], LossResult]
"""(micro-batch, logp [T], entropy [T], what `prepare` returned for the whole update) -> LossResult."""


TokenLoss = tuple[Callable[..., tuple[torch.Tensor, dict]], dict[str, torch.Tensor]]
"""A loss in which no token depends on another: (logp [n], entropy [n], columns of these n rows) -> (loss [n] with its
final weight, stats), and the columns [T]."""

Prepare = Callable[[Batch, int], dict]
"""(this rank's sequences of one optimizer step, the step's place in the update) -> what its micro-batches share. The
backends themselves look at `active`, which sequences to run, and `by_token`: (micro-batch, shared, device) -> the same
loss as a TokenLoss, or None."""

Write = Callable[[Path, World], None]
"""(folder, groups to communicate over) -> `folder/model` as HF safetensors in `--model.dtype` with `fixed`, and
`folder/state` for the optimizer and float32 weights that `model` has rounded. Collective."""

Part = Literal["model", "base", "adapter"]
"""What of a policy travels: the full model, adapters added in; the model beneath them; they alone."""

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

    def update(self, batch: Batch, loss: Loss, prepare: Prepare, temperature: float) -> Metrics:
        """One optimizer step for each value of `batch.seq["update"]`; version + 1 when any was taken.

        A step whose gradient is exactly zero changes nothing and is not counted.
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
