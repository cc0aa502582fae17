"""Runs a frozen model on separate scoring ranks (scorers), which answer requests from the training ranks.

Sequences are distributed so that each scorer gets about the same number of tokens, and results are sent back to all
training ranks that hold the sequence. Training and scoring ranks must make the same calls in the same order (`score`
and `serve` in `rl/score.py`).
"""

from typing import Any

import torch

from spmdrl.data.batch import Batch
from spmdrl.data.distribute import distribute
from spmdrl.data.microbatch import work_of
from spmdrl.policy.contract import HeadFunction, Policy, Second
from spmdrl.spmd.exchange import Table, exchange, select
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.world import World

HOST = torch.device("cpu")


class RemotePolicy:
    """Implements `logprobs`, `read` and `values` of `Policy` (`contract.py`) for a model on scoring ranks.

    All three are collective over training and scoring ranks.
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
        """Store the arguments, without communication.

        model: the model on a scoring rank, or None on a training rank. world: all ranks; `world.holders` are the
        training ranks. scorers: the scoring ranks, int64 [data positions, copies]; ranks in the same position get the
        same sequences, and the first one answers. dtype: dtype of the answers. share: True if the model computes a
        prompt once for all its samples; all samples of a prompt are then sent to the same scorer. labels: number of
        model outputs per token.
        """
        self.model, self.world, self.scorers, self.dtype, self.share = model, world, scorers, dtype, share
        self.shape = (labels,) if labels > 1 else ()

    def logprobs(
        self, batch: Batch, temperature: float, second: Second = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implements `Policy.logprobs`; scorers pass an empty batch and get an empty result."""
        request = distribute(self._request(batch), self.scorers, Peers(self.world.rollout_group, HOST))
        answers: tuple[torch.Tensor, ...] = (torch.zeros(0, *self.shape), torch.zeros(0, *self.shape))
        if self.model is not None:
            answers = self.model.logprobs(request, temperature, second)
        logp_T, second_T = self._answer(request, [x_T.to(self.dtype) for x_T in answers])
        return logp_T, second_T

    def read(self, batch: Batch, temperature: float, function: HeadFunction) -> tuple[torch.Tensor, ...]:
        """Implements `Policy.read`; `function.empty` must be the function's result for an empty batch."""
        request = distribute(self._request(batch), self.scorers, Peers(self.world.rollout_group, HOST))
        answers: Any = function.empty  # type: ignore[attr-defined]
        if self.model is not None:
            answers = self.model.read(request, temperature, function) or answers
        return tuple(self._answer(request, list(answers)))

    def exclude(self, ids: tuple[int, ...]) -> None:
        """Implements `Policy.exclude` for the model on this rank, if there is one."""
        if self.model is not None:
            self.model.exclude(ids)

    def values(self, batch: Batch) -> torch.Tensor:
        """Implements `Policy.values`."""
        return self.logprobs(batch, 1.0)[0]

    def _request(self, batch: Batch) -> Batch:
        """Return the columns that scorers need, or an empty batch if another rank sends the same sequences."""
        place = torch.nonzero(self.world.holders == self.world.rank)
        origin, copy = (int(x) for x in place[0]) if len(place) else (0, 0)
        index_B = torch.arange(len(batch))
        work, common = work_of(batch, self.share)
        seq = batch.identity | {"origin": torch.full_like(index_B, origin), "index": index_B}
        seq |= {"update": torch.zeros_like(index_B), "work": work} | ({"common": common} if self.share else {})
        token = {name: batch.token[name] for name in ("tokens", "mask", "image") if name in batch.token}
        return Batch(batch.lengths, token, seq, batch.images).select(index_B[: len(batch) if copy == 0 else 0])

    def _answer(self, request: Batch, numbers: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send per-token results [T] back to the training ranks; return the results for this rank's sequences."""
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
        """Implements `Policy.bytes_by_owner` for the model on this rank, if there is one."""
        return self.model.bytes_by_owner() if self.model else {}
