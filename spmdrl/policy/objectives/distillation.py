"""Trains a student on the divergence from its teacher, over the full vocabulary or the teacher's top-k tokens.

The teacher adds columns to a batch: its top-k tokens at each position, or its hidden states. From hidden states, the
student's ranks compute the teacher's logits in chunks, so the logits [T, V] are never materialised.
"""

from dataclasses import dataclass
from typing import Any

import torch

from spmdrl.config.divergence import DivergenceConfig
from spmdrl.config.schema import ModelConfig
from spmdrl.data.batch import Batch
from spmdrl.hub.build import DTYPES
from spmdrl.hub.folder import read_config
from spmdrl.hub.resolve import resolve
from spmdrl.policy.contract import HeadFunction, LossResult, OutputHead, Policy, Shared
from spmdrl.policy.objectives.tokens import TokenObjective, add_token_mean
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics
from spmdrl_kernels.distill import distillation_loss, top_logprobs
from spmdrl_kernels.divergence import StatesTeacher, Teacher, TopTeacher
from spmdrl_kernels.linear import wide


@dataclass(frozen=True)
class TargetReader:
    """A `HeadFunction` that a teacher runs to compute the target columns for its student."""

    top_k: int
    """Number of top teacher tokens to store per position. 0 stores hidden states instead, from which all logits are
    computed."""
    vocab: int
    """Size of the vocabulary that student and teacher share."""
    dtype: torch.dtype
    """Compute dtype of the models and storage dtype of hidden states."""

    def names(self, teacher: str) -> tuple[str, ...]:
        """Return the names of the columns that a teacher adds to a batch."""
        return tuple(f"{teacher}/{name}" for name in (("ids", "logp", "rest") if self.top_k else ("states",)))

    @property
    def empty(self) -> tuple[torch.Tensor, ...]:
        """The teacher's columns for an empty batch, in the order of `names`."""
        if not self.top_k:
            return (torch.zeros(0, 1, dtype=self.dtype),)
        ids, like = torch.zeros(0, self.top_k, dtype=torch.int32), torch.zeros(0, dtype=self.dtype)
        return ids, torch.zeros(0, self.top_k, dtype=wide(like)), torch.zeros(0, dtype=wide(like))

    def __call__(self, states_nD, head: OutputHead, rows_n) -> tuple[None, tuple[torch.Tensor, ...]]:
        """Implements `HeadFunction`: return None for the loss, and the targets for n tokens."""
        if not self.top_k:
            return None, (states_nD,)
        limits: dict[str, Any] = {"softcap": head.softcap, "valid_vocab": self.vocab, "excluded": head.excluded}
        found = top_logprobs(states_nD, head.weight_VD, self.top_k, head.divisor, **limits)
        return None, (found[0].int(), *found[1:])


def build_reader(divergence: DivergenceConfig, section: str, paths: list[str], model: ModelConfig) -> TargetReader:
    """Build the function that teachers run to compute the targets of their student.

    section: name of the settings section, for messages. paths: paths of student and teachers, in any form that
    `--model.path` accepts. model: settings that apply to all models.

    Raises:
        ValueError: top_k is not smaller than the vocabulary that student and teachers share.
    """
    trust = model.trust_remote_code
    configs = [read_config(resolve(path, trust), trust).get_text_config() for path in paths]
    vocab = min(config.vocab_size for config in configs)
    if divergence.top_k >= vocab:
        raise ValueError(
            f"--{section}.top-k {divergence.top_k}: student and teacher share {vocab} tokens; use fewer, or 0 for all"
        )
    return TargetReader(divergence.top_k, vocab, DTYPES[model.dtype])


def share_name(teacher: str) -> str:
    """Return the name of the column [B] with a teacher's weight per sequence; the weights of all teachers sum to 1."""
    return f"{teacher}/share"


class DistillObjective(TokenObjective):
    """Averages the divergence between student and teachers over the sampled tokens of an optimizer step."""

    def __init__(
        self,
        cfg: DivergenceConfig,
        reader: TargetReader,
        teachers: dict[str, OutputHead | None],
        temperature: float,
        peers: Peers,
    ):
        """teachers: output heads by name, or None for top-k targets. temperature: divisor of all logits."""
        self.cfg, self.reader, self.teachers, self.peers = cfg, reader, teachers, peers
        self.temperature = temperature
        columns = {f"token/{column}" for name in teachers for column in reader.names(name)}
        self.columns = frozenset(columns | {f"seq/{share_name(name)}" for name in teachers})

    def add_teacher(self, batch: Batch, name: str, teacher: Policy) -> None:
        """Add the columns of a teacher that has weight 1 in all sequences. Collective."""
        # The student may train with embedding noise. The teacher only gets tokens and mask, and no noise.
        token = {column: batch.token[column] for column in ("tokens", "mask", "image") if column in batch.token}
        given = Batch(batch.lengths, token, batch.seq, batch.images)
        found = teacher.read(given, self.temperature, self.reader) or self.reader.empty
        batch.token |= dict(zip(self.reader.names(name), found, strict=True))
        batch.seq[share_name(name)] = torch.ones(len(batch), dtype=torch.float64)

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Shared) -> LossResult:
        """Implements `Objective.loss`; first_T is the divergence and second_T the entropy of the student."""
        metrics = Metrics()
        loss = (first_T.double() * self.weights(micro, shared)).sum()
        metrics.add_sum("loss", loss)
        add_token_mean(metrics, "divergence/mean", first_T, self.trained_mask(micro))
        add_token_mean(metrics, "entropy/mean", second_T, micro.token["mask"])
        return LossResult(loss, metrics)

    def token_loss(self, micro: Batch, shared: Shared) -> HeadFunction:
        """Implements `Objective.token_loss`."""
        names = [column for name in self.teachers for column in self.reader.names(name)]
        columns, device = {name: micro.token[name] for name in names}, micro.device
        weight_T = self.weights(micro, shared)
        share_TK = torch.stack([micro.per_token(micro.seq[share_name(name)]) for name in self.teachers], 1)
        share_BK = torch.stack([micro.host.seq[share_name(name)] for name in self.teachers], 1)
        in_use = torch.unique(share_BK > 0, dim=0).tolist()

        def groups(rows_n: torch.Tensor) -> list[tuple[list[bool], Any]]:
            """Group rows by which teachers have nonzero weight; return each group's teacher flags and row indices."""
            if len(in_use) == 1:
                return [(in_use[0], slice(None))]
            # Finding several groups synchronises with the device.
            kinds, kind_n = torch.unique(share_TK[rows_n] > 0, dim=0, return_inverse=True)
            # An empty batch still needs a loss with a (zero) gradient, because other ranks may wait for its backward.
            several = kinds.tolist() or [[True] * len(self.teachers)]
            return [(kind, torch.nonzero(kind_n == number).flatten()) for number, kind in enumerate(several)]

        def function(states_nD, head: OutputHead, rows_n) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            divergence_n, entropy_n = torch.zeros(2, len(rows_n), dtype=wide(states_nD), device=device)
            total = torch.zeros((), dtype=torch.float64, device=device)
            # Rows are grouped by the teachers with nonzero weight, so that no logits are computed for zero weights.
            for present, at in groups(rows_n):
                rows, pairs = rows_n[at], []
                for place, name in enumerate(self.teachers):
                    if present[place]:
                        targets = {column: columns[column][rows] for column in self.reader.names(name)}
                        pairs.append((self.teacher(name, targets), (weight_T * share_TK[:, place])[rows]))
                part, divergence_mK, entropy_n[at] = distillation_loss(
                    states_nD if len(rows) == len(rows_n) else states_nD[at],
                    *(head.weight_VD, pairs, self.cfg.beta, head.divisor),
                    softcap=head.softcap,
                    valid_vocab=self.reader.vocab,
                    excluded=head.excluded,
                )
                places = [place for place, there in enumerate(present) if there]
                shares_mK = torch.stack([share_TK[rows, place] for place in places], 1).to(divergence_mK.dtype)
                divergence_n[at] = (divergence_mK * shares_mK).sum(1)
                total = total + part
            return total, (divergence_n, entropy_n)

        return function

    def teacher(self, name: str, columns: dict[str, torch.Tensor]) -> Teacher:
        """Return the `Teacher` for some rows. columns: the teacher's columns at these rows."""
        found, head = [columns[column] for column in self.reader.names(name)], self.teachers[name]
        if head is not None:
            return StatesTeacher(found[0], head.weight_VD, self.temperature * head.divisor, head.softcap)
        ids, logp, rest = found
        return TopTeacher(ids.long(), logp, rest, self.cfg.tail == "renormalize")
