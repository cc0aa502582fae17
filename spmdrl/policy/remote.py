"""A frozen model on ranks of its own: training ranks send requests, scoring ranks answer them.

Tokens go to the scorers by exchange, every sequence once, balanced by length; the results return to all ranks that hold
the sequence. Training and scoring ranks make the same calls in the same order (`score` and `serve` of `rl/score.py`).
"""

from typing import Any

import torch

from spmdrl.data.batch import Batch
from spmdrl.data.distribute import distribute
from spmdrl.data.packing import work_of
from spmdrl.policy.contract import HeadFunction, Policy, Second
from spmdrl.spmd.exchange import Table, exchange, select
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.world import World

HOST = torch.device("cpu")


class RemotePolicy:
    """`logprobs` and `values` of the Policy contract (`contract.py`) for a model on other ranks.

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
        """Send nothing yet.

        model: the model itself on a scoring rank, None on a training rank. world: all ranks; its holders are the
        training ranks. scorers: int64 [data positions, copies], the scoring ranks; the ranks of a position hold the
        same sequences, and the first of them answers. dtype: of the answers. share: the model runs a prompt once for
        all samples that share it, so these stay on one scorer. labels: numbers that the model computes for a token.
        """
        self.model, self.world, self.scorers, self.dtype, self.share = model, world, scorers, dtype, share
        self.shape = (labels,) if labels > 1 else ()

    def logprobs(
        self, batch: Batch, temperature: float, second: Second = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the contract. A scorer passes an empty batch and gets an empty result."""
        request = distribute(self._request(batch), self.scorers, Peers(self.world.rollout_group, HOST))
        answers: tuple[torch.Tensor, ...] = (torch.zeros(0, *self.shape), torch.zeros(0, *self.shape))
        if self.model is not None:
            answers = self.model.logprobs(request, temperature, second)
        logp_T, second_T = self._answer(request, [x_T.to(self.dtype) for x_T in answers])
        return logp_T, second_T

    def read(self, batch: Batch, temperature: float, function: HeadFunction) -> tuple[torch.Tensor, ...]:
        """See the contract. `function.empty` holds the result for no tokens."""
        request = distribute(self._request(batch), self.scorers, Peers(self.world.rollout_group, HOST))
        answers: Any = function.empty  # type: ignore[attr-defined]
        if self.model is not None:
            answers = self.model.read(request, temperature, function) or answers
        return tuple(self._answer(request, list(answers)))

    def values(self, batch: Batch) -> torch.Tensor:
        return self.logprobs(batch, 1.0)[0]

    def _request(self, batch: Batch) -> Batch:
        """Return the columns that scorers need of this rank's sequences; of ranks with copies only the first sends."""
        place = torch.nonzero(self.world.holders == self.world.rank)
        origin, copy = (int(x) for x in place[0]) if len(place) else (0, 0)
        index_B = torch.arange(len(batch))
        work, common = work_of(batch, self.share)
        seq = batch.identity | {"origin": torch.full_like(index_B, origin), "index": index_B}
        seq |= {"update": torch.zeros_like(index_B), "work": work} | ({"common": common} if self.share else {})
        token = {name: batch.token[name] for name in ("tokens", "mask")}
        return Batch(batch.lengths, token, seq).select(index_B[: len(batch) if copy == 0 else 0])

    def _answer(self, request: Batch, numbers: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send the numbers [T] of `request` back to the ranks that sent its sequences, in those ranks' order."""
        copies = self.world.holders.shape[1]
        table = Table(torch.stack([request.seq["origin"], request.seq["index"]], 1))
        for i, x_T in enumerate(numbers):
            table.lengths[str(i)], table.values[str(i)] = request.lengths, x_T
        answers = len(table) if self.world.rank in self.scorers[:, 0] else 0
        table = select(table, torch.arange(answers).repeat_interleave(copies))
        back, _ = exchange(
            table, lambda rows: self.world.holders[rows[::copies, 0]].flatten(), self.world.rollout_group, HOST
        )
        return list(back.values.values())

    def bytes_by_owner(self) -> dict[str, int]:
        """See the contract: counts the model on this rank."""
        return self.model.bytes_by_owner() if self.model else {}
