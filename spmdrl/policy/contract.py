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
    """The loss of one micro-batch, already divided by global counts, together with statistics for the log."""

    loss: torch.Tensor
    stats: Metrics


TokenLoss = tuple[Callable[..., tuple[torch.Tensor, dict]], dict[str, torch.Tensor]]
"""A loss whose value for a token does not depend on other tokens, as a function and the columns [T] that it reads. The
function maps (logp [n], entropy [n], the columns at the same n tokens) to (weighted losses [n], stats). Its argument
entropy is None if the objective's `second` is `top`."""


HeadFunction = Callable[..., tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]]
"""A function that replaces a language model's head, for losses that need more than logp and entropy. It maps
(states_nD, weight_VD, rows_n, divisor, softcap) to (a scalar loss with gradient, or None; numbers [n, ...] without
gradient).

states_nD: the states that predict the tokens under the mask; rows_n: the indices of these tokens in [T]. divisor: the
number that divides the logits: the temperature times the divisor of the model family. softcap: the cap on logits;
None for no cap.
"""


@dataclass(frozen=True)
class OutputHead:
    """The output layer by which a language model turns hidden states into logits."""

    weight_VD: torch.Tensor
    divisor: float
    softcap: float | None


@dataclass
class Shared:
    """Values that all micro-batches of one optimizer step need; all but `active` are the same on every rank."""

    totals: Totals = field(default_factory=lambda: Totals(0.0, 0.0))
    """Numbers of tokens and episodes over all ranks, by which losses are divided."""
    active: torch.Tensor | None = None
    """bool [B]: True for this rank's sequences that contribute to the loss; the others are not run. None: all
    contribute."""
    on_policy: bool = False
    """True if old_logp was computed with exactly the weights at the start of this step."""


Second = Literal["entropy", "collision", "top"]
"""The number that a language model returns for each token in addition to logp. `entropy`: the entropy in nats;
`collision`: the sum of squared probabilities over the vocabulary, without gradient; `top`: 1 if the token is the
likeliest one, else 0, without gradient."""


MEASURE = -1
"""The `index` for `Objective.prepare` if the loss of a step is only measured and no model trains."""


class Objective(Protocol):
    """A loss that trains a model (`objectives/`). Its sum does not depend on how ranks divide the batch (law 2).

    A learner calls `prepare` once per optimizer step, then `loss` for each micro-batch.
    """

    columns: frozenset[str]
    """Columns that the batch must have in addition to tokens and mask, as `token/<name>` and `seq/<name>`."""
    temperature: float
    """The temperature that divides logits before logp is computed."""
    second: Second = "entropy"
    """The number that `loss` gets in addition to logp."""

    def prepare(self, share: Batch, index: int) -> Shared:
        """Compute the values that the loss needs from all sequences of an optimizer step.

        Collective over data-parallel ranks. share: this rank's sequences; `prepare` may add columns to them. index:
        number of the step within the update, from 0, or MEASURE.
        """
        ...

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Any) -> LossResult:
        """Return the summed loss of one micro-batch, without communication.

        micro: the micro-batch, on the device of first_T, without the columns that only forwards read. first_T,
        second_T: the head's two numbers for each token, with gradient. For a language model these are logp and
        `second`, for a critic the value and 0. shared: the result of `prepare`.
        """
        ...

    def token_loss(self, micro: Batch, shared: Any) -> TokenLoss | HeadFunction | None:
        """Return the same loss in a form for heads that compute logp chunk by chunk; None if it depends on whole packs.

        micro: as in `loss`. If the result is a `HeadFunction`, `loss` gets its two numbers as first_T and second_T, for
        the statistics.
        """
        return None


Write = Callable[[Path, World], None]
"""The function that `Policy.saving` returns. Its arguments are a folder, and a world over whose groups it communicates.
It writes `folder/model` (HF safetensors in `--model.dtype`, and the files in `Policy.fixed`) and `folder/state`
(optimizer state, and float32 weights if those in `model` are rounded). Collective."""

Head = Literal["lm", "value", "score", "steps"]
"""The kind of output for each token. `lm`: logp and entropy; `value`: the value of the state before the token; `score`:
a score of the text up to the token, by a classifier of sequences; `steps`: a score by a classifier of tokens, or of
sequences if the folder holds no classifier of tokens."""
SCORES = ("score", "steps")
"""Heads that read the state after a token instead of the state before it."""


class Policy(Protocol):
    """A model sharded over ranks. All ranks call each method together, because most methods communicate."""

    version: int
    """Number of calls of `update` so far that changed the weights. An engine samples only from weights of this version
    (law 5)."""
    updates_done: int
    """Number of optimizer steps taken so far."""
    updates_due: int
    """Number of optimizer steps so far, including skipped ones; the learning rate schedule depends on it."""
    fixed: dict[str, bytes]
    """Name -> content of the files in a checkpoint's `model/` other than the weights, on rank 0. They are computed at
    the first access, which is at start in a run that saves. Raises ValueError if transformers cannot write a file."""

    def logprobs(
        self, batch: Batch, temperature: float, second: Second = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logp and `second` [T] of a batch, in host memory, without gradient; 0 outside the loss mask."""
        ...

    def read(self, batch: Batch, temperature: float, function: HeadFunction) -> tuple[torch.Tensor, ...]:
        """Run a function in place of the head, and return what it computes for each token: tensors [T, ...].

        They are the second part of the result of a `HeadFunction`, in host memory, and 0 outside the loss mask.

        The tuple is empty if no rank has a sequence. Only the fsdp backend implements `read` and `output_head`.
        """
        ...

    def output_head(self) -> OutputHead:
        """Return the complete output head on the device, in the compute type."""
        ...

    def values(self, batch: Batch) -> torch.Tensor:
        """Return values or scores [T], in host memory, without gradient; 0 outside the loss mask.

        A classifier with L > 1 labels returns [T, L].
        """
        ...

    def update(self, batch: Batch, objective: Objective, steps: int = 1) -> Metrics:
        """Take `steps` optimizer steps; step i, from 0, trains on the sequences whose `batch.seq["update"]` is i.

        If any step was taken, `version` increases by 1. A step is not taken if its gradient is exactly zero, or if its
        loss or gradient is not finite.
        """
        ...

    def pieces(self, part: Part = "model") -> list[Piece]:
        """Return this rank's part of every weight under its HF checkpoint name, as views that reflect later updates.

        Names and ranges (`Piece.box`) are the same at every call. part: what to return of a policy with adapters.
        `model`: the complete model with the adapters merged in (computed at every access); `base`: the model without
        adapters; `adapter`: only the weights of the adapters.
        """
        ...

    def take_over(self, other: "Policy", share: float = 1.0) -> None:
        """Replace the weights by their average with those of another policy of the same backend and architecture.

        Both need the same layout; nothing is communicated. share: weight of the other policy in the average.
        """
        ...

    def bytes_by_owner(self) -> dict[str, int]:
        """Return the bytes in use on this rank's device, by owner: parameters, gradients, optimizer."""
        ...

    def offload(self, place: Literal["host", "disk"], parameters: bool = True) -> None:
        """Move optimizer state, and if `parameters` is true also the parameters, off the device; free the gradients."""
        ...

    def onload(self) -> None:
        """Move everything that `offload` moved back to the device."""
        ...

    def saving(self, copy: bool = False) -> Write:
        """Return a function that writes this model and its optimizer state.

        copy: True to copy the current values to host memory now. The function then writes this copy, and may run in a
        thread during training, over a copy of the policy's process groups (`spmd.mesh.twin`).
        """
        ...

    def save(self, folder: Path) -> None:
        """Write this model and its optimizer state into `folder`."""
        ...

    def checkpoint_bytes(self) -> int:
        """Estimate how many bytes all ranks together write in `save`."""
        ...

    def load(self, folder: Path) -> None:
        """Read weights and optimizer state from a folder that `save` wrote under this layout or another one."""
        ...
