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
    """The loss of one micro-batch, already normalised by global counts, with statistics for the log."""

    loss: torch.Tensor
    stats: Metrics


TokenLoss = tuple[Callable[..., tuple[torch.Tensor, dict]], dict[str, torch.Tensor]]
"""A per-token loss that does not depend on other tokens: a function and the columns [T] that it reads. The function
maps (logp [n], entropy [n], the columns at the same n tokens) to (weighted losses [n], stats). Its `entropy` argument
is None if the objective's `second` is `top`."""


HeadFunction = Callable[..., tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]]
"""A function that replaces a language model's head, for losses that need more than logp and entropy. It maps
(states_nD, head, rows_n) to (a scalar loss with gradient, or None; numbers [n, ...] without gradient).

states_nD: hidden states that predict the tokens in the loss mask. head: the model's `OutputHead`, whose divisor
includes the temperature. rows_n: indices of the tokens in [T].
"""


@dataclass(frozen=True)
class OutputHead:
    """The output layer that maps a language model's hidden states to logits."""

    weight_VD: torch.Tensor
    divisor: float
    """Number that divides the logits: the model family's own divisor, times a temperature if there is one."""
    softcap: float | None
    """Cap on the logits before division, or None for no cap."""
    excluded: tuple[int, ...] = ()
    """Token ids that have probability 0 (`Policy.exclude`)."""


@dataclass
class Shared:
    """Values shared by all micro-batches of one optimizer step. All except `active` are the same on every rank."""

    totals: Totals = field(default_factory=lambda: Totals(0.0, 0.0))
    """Token and episode counts over all ranks, used to normalise losses."""
    active: torch.Tensor | None = None
    """bool [B]: True for this rank's sequences that contribute to the loss; all other sequences are skipped. None if
    all sequences contribute."""
    on_policy: bool = False
    """True if old_logp was computed with the same weights that this step starts from."""


Second = Literal["entropy", "collision", "top"]
"""The second per-token output of a language model, next to logp. `entropy` is the entropy in nats. `collision` is the
sum of squared probabilities over the vocabulary. `top` is 1 if the token is the argmax, else 0. The last two have no
gradient."""


MEASURE = -1
"""The `index` to pass to `Objective.prepare` if the loss is only evaluated and no model is trained."""


class Objective(Protocol):
    """A training loss (`objectives/`). The total loss does not depend on how the batch is split across ranks (law 2).

    A learner calls `prepare` once per optimizer step, then `loss` for each micro-batch.
    """

    columns: frozenset[str]
    """Columns that the batch must have besides tokens and mask, as `token/<name>` and `seq/<name>`."""
    temperature: float
    """The temperature that logits are divided by before logp is computed."""
    second: Second = "entropy"
    """The second per-token output that `loss` receives, next to logp."""

    def prepare(self, share: Batch, index: int) -> Shared:
        """Compute the values that the loss needs from all sequences of the optimizer step.

        Collective over data-parallel ranks. share: this rank's sequences; `prepare` may add columns to them. index:
        index of the step within the update, starting at 0, or MEASURE.
        """
        ...

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Any) -> LossResult:
        """Return the summed loss of one micro-batch, without communication.

        micro: the micro-batch, on the same device as first_T, without the columns that only the forward pass reads.
        first_T, second_T: the two outputs of the head per token, with gradient. These are logp and `second` for a
        language model, and the value and 0 for a critic. shared: the result of `prepare`.
        """
        ...

    def token_loss(self, micro: Batch, shared: Any) -> TokenLoss | HeadFunction | None:
        """Return the loss in a form that heads can compute chunk by chunk, or None if it cannot be chunked.

        micro: as in `loss`. If this returns a `HeadFunction`, its two outputs are passed to `loss` as first_T and
        second_T to compute the statistics.
        """
        return None


Write = Callable[[Path, World], None]
"""The function returned by `Policy.saving`. It takes a folder and the world whose process groups it uses. It writes
`folder/model` (HF safetensors in `--model.dtype`, and the files in `Policy.fixed`) and `folder/state` (optimizer state,
and float32 weights if those in `model` are rounded). Collective."""

Head = Literal["lm", "value", "score", "steps"]
"""The kind of per-token output. `lm` stands for logp and entropy, `value` for the value of the state before the token,
and `score` for the score of the text up to the token, from a sequence classifier. `steps` is a score from a token
classifier, or from a sequence classifier if the folder has no token classifier."""
SCORES = ("score", "steps")
"""Heads that read the hidden state at a token instead of the hidden state before the token."""


class Policy(Protocol):
    """A model sharded over ranks. All ranks must call each method together, since most methods communicate."""

    version: int
    """Number of `update` calls so far that changed the weights. An engine only samples with weights of this version
    (law 5)."""
    updates_done: int
    """Number of optimizer steps taken so far."""
    updates_due: int
    """Number of optimizer steps so far, including skipped ones. The learning rate schedule follows this counter."""
    fixed: dict[str, bytes]
    """Maps the names of the non-weight files in a checkpoint's `model/` to their contents, on rank 0. The files are
    created on first access, which happens at startup if the run saves checkpoints. Raises ValueError if transformers
    cannot write a file."""

    def logprobs(
        self, batch: Batch, temperature: float, second: Second = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logp and `second` [T] for a batch, in host memory, without gradient, and 0 outside the loss mask."""
        ...

    def read(self, batch: Batch, temperature: float, function: HeadFunction) -> tuple[torch.Tensor, ...]:
        """Run a function in place of the head and return its per-token outputs, tensors [T, ...].

        The outputs are the second element of a `HeadFunction`'s result, in host memory, and 0 outside the loss mask.

        The tuple is empty if no rank has a sequence. Only the fsdp backend implements `read` and `output_head`.
        """
        ...

    def output_head(self) -> OutputHead:
        """Return the full (unsharded) output head on the device, in the compute dtype."""
        ...

    def exclude(self, ids: tuple[int, ...]) -> None:
        """Give token ids probability 0 in `logprobs`, `read` and `update`. Only for language models.

        If a token in the loss mask is excluded, its logp is -inf.
        """
        ...

    def values(self, batch: Batch) -> torch.Tensor:
        """Return values or scores [T], in host memory, without gradient, and 0 outside the loss mask.

        A classifier with L > 1 labels returns [T, L].
        """
        ...

    def update(self, batch: Batch, objective: Objective, steps: int = 1) -> Metrics:
        """Take `steps` optimizer steps; step i (from 0) trains on the sequences with `batch.seq["update"] == i`.

        `version` increases by 1 if at least one step was taken. A step is skipped if its gradient is exactly zero, or
        if its loss or gradient is not finite.
        """
        ...

    def pieces(self, part: Part = "model") -> list[Piece]:
        """Return this rank's shard of every weight by HF checkpoint name, as views that reflect later updates.

        Every call returns the same names and slices (`Piece.box`). part: weights to return for a policy with adapters.
        Use `model` for the full model with the adapters merged in (recomputed at every access), `base` for the model
        without adapters, and `adapter` for only the adapter weights.
        """
        ...

    def take_over(self, other: "Policy", share: float = 1.0) -> None:
        """Replace the weights with their average with another policy's weights.

        Both policies must have the same backend, architecture and layout, so no communication is needed. share: weight
        of the other policy in the average.
        """
        ...

    def bytes_by_owner(self) -> dict[str, int]:
        """Return the bytes in use on this rank's device, by owner: parameters, gradients, optimizer."""
        ...

    def offload(self, place: Literal["host", "disk"], parameters: bool = True) -> None:
        """Offload optimizer state from the device, and also parameters if `parameters` is true; free the gradients."""
        ...

    def onload(self) -> None:
        """Move everything that `offload` moved away back to the device."""
        ...

    def saving(self, copy: bool = False) -> Write:
        """Return a function that writes this model and its optimizer state.

        copy: True to copy the current values to host memory now. The function then writes this copy and can run in a
        thread during training, on duplicates of the policy's process groups (`spmd.mesh.twin`).
        """
        ...

    def save(self, folder: Path) -> None:
        """Write this model and its optimizer state into `folder`."""
        ...

    def checkpoint_bytes(self) -> int:
        """Estimate the total number of bytes that `save` writes over all ranks."""
        ...

    def load(self, folder: Path) -> None:
        """Load weights and optimizer state from a folder that `save` wrote under this or any other layout."""
        ...
