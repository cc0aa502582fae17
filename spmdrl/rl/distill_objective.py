"""The objective of distillation: a divergence from a teacher, over all logits or over the teacher's likeliest tokens.

The teacher leaves columns in a batch: its K likeliest tokens of each place, from wherever it lies, or its hidden
states, of which the student's head makes logits chunk by chunk. Logits [T, V] never exist.
"""

from dataclasses import dataclass
from typing import Any

import torch

from spmdrl.algos.aggregate import token_weights
from spmdrl.config.distillation import DistillationConfig
from spmdrl.data.batch import Batch
from spmdrl.hub.build import DTYPES
from spmdrl.hub.folder import read_config
from spmdrl.hub.resolve import resolve
from spmdrl.policy.contract import HeadFunction, LossResult, Objective, OutputHead, Shared
from spmdrl.rl.algorithm import mean
from spmdrl.rl.objectives import totals
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics
from spmdrl_kernels.distill import distillation_loss, top_logprobs
from spmdrl_kernels.divergence import StatesTeacher, Teacher, TopTeacher


@dataclass(frozen=True)
class Reader:
    """Reads off a teacher what the student learns from; a `HeadFunction`."""

    top_k: int
    """Tokens of each place; 0: the hidden states, for all logits."""
    vocab: int
    """Tokens that student and teacher share."""
    dtype: torch.dtype
    """Type that the models compute in."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return ("teacher_ids", "teacher_logp", "teacher_rest") if self.top_k else ("teacher_states",)

    @property
    def none(self) -> tuple[torch.Tensor, ...]:
        """The columns of no tokens."""
        if not self.top_k:
            return (torch.zeros(0, 1, dtype=self.dtype),)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        ids = torch.zeros(0, self.top_k, dtype=torch.int32)
        return ids, torch.zeros(0, self.top_k, dtype=wide), torch.zeros(0, dtype=wide)

    def __call__(
        self,
        states_nD: torch.Tensor,
        weight_VD: torch.Tensor,
        rows_n: torch.Tensor,
        divisor: float,
        softcap: float | None,
    ) -> tuple[None, tuple[torch.Tensor, ...]]:
        """See the contract."""
        if not self.top_k:
            return None, (states_nD,)
        found = top_logprobs(states_nD, weight_VD, self.top_k, divisor, softcap=softcap, valid_vocab=self.vocab)
        return None, (found[0].int(), *found[1:])


def reader_of(cfg: DistillationConfig) -> Reader:
    """The reader of a run.

    Raises:
        ValueError: `--distill.top-k` is not below the number of tokens.
    """
    trust = cfg.model.trust_remote_code
    folders = [resolve(path, trust) for path in (cfg.model.path, cfg.reference.path or cfg.model.path)]
    vocab = min(read_config(folder, trust).get_text_config().vocab_size for folder in folders)
    if cfg.distill.top_k >= vocab:
        raise ValueError(
            f"--distill.top-k {cfg.distill.top_k}: student and teacher share {vocab} tokens; take fewer, or 0 for all"
        )
    return Reader(cfg.distill.top_k, vocab, DTYPES[cfg.model.dtype])


class DistillObjective(Objective):
    """The divergence of the student from its teacher, as a mean over the sampled tokens of an optimizer step."""

    second = "entropy"

    def __init__(self, cfg: DistillationConfig, reader: Reader, head: OutputHead | None, peers: Peers):
        """head: the teacher's, where all logits are compared."""
        self.cfg, self.reader, self.head, self.peers = cfg.distill, reader, head, peers
        # One temperature for both, by which the student samples, too.
        self.temperature = cfg.rollout.temperature
        self.columns = frozenset(f"token/{name}" for name in reader.names)

    def prepare(self, share: Batch, index: int) -> Shared:
        """Implements `prepare` of the contract."""
        return Shared(totals(share, self.peers))

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Shared) -> LossResult:
        """Implements `loss` of the contract, from divergence and entropy."""
        mask, metrics = micro.token["mask"].to(first_T.device), Metrics()
        loss = (first_T.double() * self.weights(micro, shared, first_T.device)).sum()
        metrics.add_sum("loss", loss)
        for name, value_T in (("divergence/mean", first_T), ("entropy/mean", second_T)):
            metrics.add(name, mean(value_T.detach(), mask), mask.sum())
        return LossResult(loss, metrics)

    def token_loss(self, micro: Batch, shared: Shared, device: torch.device) -> HeadFunction:
        """Implements `token_loss` of the contract."""
        columns = {name: micro.token[name].to(device) for name in self.reader.names}
        weight_T = self.weights(micro, shared, device)

        def head(states_nD, weight_VD, rows_n, divisor, softcap) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            teacher = self.teacher({name: column[rows_n] for name, column in columns.items()})
            total, divergence_n1, entropy_n = distillation_loss(
                *(states_nD, weight_VD, [(teacher, weight_T[rows_n])], self.cfg.beta, divisor),
                softcap=softcap,
                valid_vocab=self.reader.vocab,
            )
            return total, (divergence_n1[:, 0], entropy_n)

        return head

    def teacher(self, columns: dict[str, torch.Tensor]) -> Teacher:
        """The teacher of some rows, from its columns."""
        if self.head is not None:
            divisor = self.temperature * self.head.divisor
            return StatesTeacher(columns["teacher_states"], self.head.weight_VD, divisor, self.head.softcap)
        ids, logp, rest = (columns[name] for name in self.reader.names)
        return TopTeacher(ids.long(), logp, rest, self.cfg.tail == "renormalize")

    def weights(self, micro: Batch, shared: Shared, device: torch.device) -> torch.Tensor:
        """The final weight of each token, [T] on the device; 0 outside the mask."""
        mask, seq = micro.token["mask"].to(device), micro.seq_index.to(device)
        weight_T: Any = token_weights("token-mean", mask, seq, shared.totals)
        return weight_T
