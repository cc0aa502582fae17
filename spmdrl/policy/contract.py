"""The Policy contract. `fsdp/` implements it; another backend adds a folder beside it, and nothing above changes."""

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
"""A loss in which no token depends on another: (logp [n], entropy [n], columns of these n rows) -> (loss [n] with its
final weight, stats), and the columns [T]. The entropy is None where `second` is another number."""


class HeadFunction(Protocol):
    """Takes the place of a language model's head, for numbers that logp and entropy are not enough for."""

    def __call__(
        self,
        states_nD: torch.Tensor,
        weight_VD: torch.Tensor,
        rows_n: torch.Tensor,
        divisor: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]:
        """Return a loss, a scalar with gradient, or None, and numbers [n, ...] without gradient.

        states_nD: the states before the tokens under the mask, of which rows_n are the places in [T]. divisor: logits
        are divided by it, the temperature times the family's own divisor. softcap: the cap on logits, or None.
        """
        ...


@dataclass(frozen=True)
class OutputHead:
    """The output layer by which a language model turns hidden states into logits."""

    weight_VD: torch.Tensor
    divisor: float
    softcap: float | None


@dataclass
class Shared:
    """Facts of one optimizer step that all of its micro-batches share, the same on every rank but for `active`."""

    totals: Totals = field(default_factory=lambda: Totals(0.0, 0.0))
    """Global denominators."""
    active: torch.Tensor | None = None
    """bool [B], this rank's sequences that contribute; the others are not run. None: all do."""
    on_policy: bool = False
    """old_logp was computed before the update with exactly the weights that this step begins with."""


Second = Literal["entropy", "collision", "top"]
"""A language model's number beside logp: the entropy; the sum over the vocabulary of p squared (without gradient); 1
where no token is likelier than this one, else 0 (without gradient)."""


MEASURE = -1
"""Index of a step that is measured, not trained, for `Objective.prepare`."""


class Objective(Protocol):
    """The loss that a model learns by, in a form that every layout of ranks and micro-batches sums alike (law 2).

    The policy update of reinforcement learning is one, a critic another (`rl/objectives.py`). A learner calls `prepare`
    once for each optimizer step, then `loss` for each micro-batch.
    """

    columns: frozenset[str]
    """Columns that the batch must have beside tokens and mask: `token/<name>` and `seq/<name>`."""
    temperature: float
    """Logits are divided by it before logp is taken."""
    second: Second = "entropy"
    """The number that `loss` gets beside logp."""

    def prepare(self, share: Batch, index: int) -> Shared:
        """Compute what the loss needs of a whole optimizer step. Collective over data positions.

        share: this rank's sequences of the step; columns may be added to it. index: the step's place in the update,
        or MEASURE.
        """
        ...

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Any) -> LossResult:
        """Sum the loss of one micro-batch. No communication.

        first_T, second_T: the head's two numbers of each token, with gradient: logp and `second` of a language model,
        value and zeros of a critic. shared: as `prepare` returned it.
        """
        ...

    def token_loss(self, micro: Batch, shared: Any, device: torch.device) -> TokenLoss | HeadFunction | None:
        """Return the same loss for a head that computes logp in chunks; None where tokens depend on each other.

        A `HeadFunction` gives the loss and the two numbers that `loss` then gets.
        """
        return None


Write = Callable[[Path, World], None]
"""(folder, groups to communicate over) -> `folder/model` as HF safetensors in `--model.dtype` with `fixed`, and
`folder/state` for the optimizer and float32 weights that `model` has rounded. Collective."""

Head = Literal["lm", "value", "score", "steps"]
"""A model's output for each token: logp and entropy; the value of the state before it; a score of all up to it, by a
classifier of sequences or, for `steps` and where the folder holds one, of tokens."""
SCORES = ("score", "steps")
"""Heads that read the state after a token."""


class Policy(Protocol):
    """A model sharded over ranks. Every method is collective: all ranks call it together."""

    version: int
    """Counts changes of the weights; what an engine must hold to sample (law 5)."""
    updates_done: int
    """Optimizer steps that the weights have taken."""
    updates_due: int
    """Optimizer steps that were due, whether taken or skipped; the learning rate schedule counts these."""
    fixed: dict[str, bytes]
    """Name -> content of what `model/` holds beside weights, on rank 0: made when it is first asked for, no later than
    the start of a run that saves, and copied into every checkpoint. Raises ValueError."""

    def logprobs(
        self, batch: Batch, temperature: float, second: Second = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logp and `second` [T] of a batch on the host, without gradient; 0 outside the loss mask."""
        ...

    def read(self, batch: Batch, temperature: float, function: HeadFunction) -> tuple[torch.Tensor, ...]:
        """The numbers [T, ...] of a batch on the host that a function of the head gives; zeros outside the mask.

        An empty tuple where no rank has a sequence. No backend but fsdp has it.
        """
        ...

    def output_head(self) -> OutputHead:
        """The whole output head on the device, in the type that the model computes in. No backend but fsdp has it."""
        ...

    def values(self, batch: Batch) -> torch.Tensor:
        """Values or scores [T] on the host from a model with such a head, without gradient; 0 outside the mask.

        [T, L] from a classifier with L labels, two or more.
        """
        ...

    def update(self, batch: Batch, objective: Objective, steps: int = 1) -> Metrics:
        """Take `steps` optimizer steps, each on the sequences that name it in `batch.seq["update"]`.

        version + 1 when any was taken: a step whose gradient is exactly zero changes nothing and is not counted.
        """
        ...

    def pieces(self, part: Part = "model") -> list[Piece]:
        """This rank's part of every weight, under HF checkpoint names, as views that an update changes.

        The same names and boxes in the same order at every call.

        part: for a policy with adapters, the full `model` with the adapters merged in (computed anew at every call),
        the unmodified `base`, or the `adapter` weights alone. Other policies have `model` and `base`, which are equal.
        """
        ...

    def take_over(self, other: "Policy", share: float = 1.0) -> None:
        """Move to the weights of another policy of the same backend, architecture and layout; no communication.

        share: of the other's weights in the result.
        """
        ...

    def bytes_by_owner(self) -> dict[str, int]:
        """Bytes this rank holds on its device, by owner: parameters, gradients, optimizer."""
        ...

    def offload(self, place: Literal["host", "disk"], parameters: bool = True) -> None:
        """Move optimizer state off the device, and the parameters if `parameters` is true; drop the gradients.

        Gradients hold nothing between updates: the next update begins at zero.
        """
        ...

    def onload(self) -> None:
        """Bring everything that is offloaded back to its place on the device."""
        ...

    def saving(self, copy: bool = False) -> Write:
        """Return a function that writes this model over the groups of its own world.

        copy: the function holds a copy of the current values on the host and writes those; it may then run in a thread
        beside training, over the groups of a twin of that world (`spmd.mesh.twin`).
        """
        ...

    def save(self, folder: Path) -> None:
        """Write this model into `folder`."""
        ...

    def checkpoint_bytes(self) -> int:
        """Estimate how many bytes `save` writes, over all ranks."""
        ...

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on this or another layout."""
        ...
