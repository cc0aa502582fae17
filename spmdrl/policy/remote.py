"""A frozen model on ranks of its own: ranks that train send requests, ranks that score answer them.

Tokens go to the scorers by exchange, every sequence once, balanced by length; the results come back to all ranks that
hold the sequence. Both sides make the same calls in the same order (`learn.score`, `learn.serve`).
"""

from typing import Any

import torch

from spmdrl.data.batch import Batch
from spmdrl.data.dealing import deal
from spmdrl.data.packing import work_of
from spmdrl.policy.contract import HeadFunction, Policy, Second
from spmdrl.spmd.exchange import Table, exchange, select
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.world import World

HOST = torch.device("cpu")


class RemotePolicy:
    """`logprobs` and `values` of the Policy contract (`contract.py`) for a model that lies on other ranks.

    Every method that communicates is collective over trainers and scorers.
    """

    version = updates_done = updates_due = 0

    def __init__(
        self,
        model: Policy | None,
        world: World,
        scorers: torch.Tensor,
        dtype: torch.dtype,
        share: bool,
        labels: int = 1,
    ):
        """Hold the settings; nothing is sent yet.

        Args:
            model: the model itself on a rank that scores, None on one that trains.
            world: all ranks; its holders are the ranks that train.
            scorers: int64 [data positions, copies], the ranks that score; of a position's ranks, which hold the same
                sequences, the first answers.
            dtype: type of the answers.
            share: the model runs a prompt once for all samples that share it, so these are kept on one scorer.
            labels: numbers that it gives for a token.
        """
        self.model, self.world, self.scorers, self.dtype, self.share = model, world, scorers, dtype, share
        self.shape = (labels,) if labels > 1 else ()

    def logprobs(
        self, batch: Batch, temperature: float, second: Second = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the contract. A scorer passes an empty batch and gets nothing back."""
        asked = deal(self._question(batch), self.scorers, Peers(self.world.rollout_group, HOST))
        answers: tuple[torch.Tensor, ...] = (torch.zeros(0, *self.shape), torch.zeros(0, *self.shape))
        if self.model is not None:
            answers = self.model.logprobs(asked, temperature, second)
        logp_T, second_T = self._answer(asked, [x_T.to(self.dtype) for x_T in answers])
        return logp_T, second_T

    def read(self, batch: Batch, temperature: float, function: HeadFunction) -> tuple[torch.Tensor, ...]:
        """See the contract. `function.none` are the numbers of no tokens."""
        asked = deal(self._question(batch), self.scorers, Peers(self.world.rollout_group, HOST))
        answers: Any = function.none  # type: ignore[attr-defined]
        if self.model is not None:
            answers = self.model.read(asked, temperature, function) or answers
        return tuple(self._answer(asked, list(answers)))

    def values(self, batch: Batch) -> torch.Tensor:
        """See the contract."""
        return self.logprobs(batch, 1.0)[0]

    def _question(self, batch: Batch) -> Batch:
        """Columns that scorers need of this rank's sequences; if several ranks hold copies, only the first sends."""
        place = torch.nonzero(self.world.holders == self.world.rank)
        origin, copy = (int(x) for x in place[0]) if len(place) else (0, 0)
        index_B = torch.arange(len(batch))
        work, common = work_of(batch, self.share)
        seq = batch.identity | {"origin": torch.full_like(index_B, origin), "index": index_B}
        seq |= {"update": torch.zeros_like(index_B), "work": work} | ({"common": common} if self.share else {})
        token = {name: batch.token[name] for name in ("tokens", "mask")}
        return Batch(batch.lengths, token, seq).select(index_B[: len(batch) if copy == 0 else 0])

    def _answer(self, asked: Batch, numbers: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send the numbers [T] of `asked` back to the ranks that its sequences came from, in those ranks' order."""
        copies = self.world.holders.shape[1]
        table = Table(torch.stack([asked.seq["origin"], asked.seq["index"]], 1))
        for i, x_T in enumerate(numbers):
            table.lengths[str(i)], table.values[str(i)] = asked.lengths, x_T
        answers = len(table) if self.world.rank in self.scorers[:, 0] else 0
        table = select(table, torch.arange(answers).repeat_interleave(copies))
        back, _ = exchange(
            table, lambda rows: self.world.holders[rows[::copies, 0]].flatten(), self.world.rollout_group, HOST
        )
        return list(back.values.values())

    def bytes_by_owner(self) -> dict[str, int]:
        """See the contract: the bytes of the model on this rank."""
        return self.model.bytes_by_owner() if self.model else {}
