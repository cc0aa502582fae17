"""Objective of supervised fine-tuning: cross-entropy of the trained tokens, or DFT."""

from dataclasses import dataclass
from functools import partial

import torch

from spmdrl.algos.aggregate import Totals, count_totals, token_weights
from spmdrl.algos.value import TOKEN_LOSSES
from spmdrl.data.batch import Batch
from spmdrl.policy.contract import LossResult, Objective, Shared, TokenLoss
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics


@dataclass
class SftObjective(Objective):
    """Averages the loss over the trained tokens of a step; all tokens weigh the same, whatever row they are in."""

    loss_name: str
    """A name in `algos.value.TOKEN_LOSSES`."""
    peers: Peers
    temperature: float = 1.0
    columns = frozenset({"token/mask"})
    second = "top"

    def prepare(self, share: Batch, index: int) -> Shared:
        """Implements `prepare` of the contract."""
        local = count_totals(share.token["mask"], share.seq_index)
        counts = torch.tensor([local.tokens, local.sequences], dtype=torch.float64)
        return Shared(Totals(*self.peers.sum(counts).tolist()))

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Shared) -> LossResult:
        """Implements `loss` of the contract, from logp and a flag for the likeliest token."""
        x = self.inputs(micro, shared, first_T.device)
        loss_T, _ = self.token_losses(first_T, second_T, x)
        mask, metrics = micro.token["mask"].to(first_T.device), Metrics()
        metrics.add_sum("loss", loss_T.sum())
        count = mask.sum()
        for name, value_T in (("nll/mean", -first_T.detach()), ("accuracy/mean", second_T.detach())):
            total = torch.where(mask, value_T, torch.zeros_like(value_T)).double().sum()
            metrics.add(name, total / count.clamp(min=1), count)
        return LossResult(loss_T.sum(), metrics)

    def token_loss(self, micro: Batch, shared: Shared, device: torch.device) -> TokenLoss:
        """Implements `token_loss` of the contract."""
        return partial(self.token_losses), self.inputs(micro, shared, device)

    def inputs(self, micro: Batch, shared: Shared, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the final weight of each token, [T] on the device."""
        mask, seq = micro.token["mask"].to(device), micro.seq_index.to(device)
        return {"weight": token_weights("token-mean", mask, seq, shared.totals)}

    def token_losses(
        self, logp: torch.Tensor, other: torch.Tensor | None, x: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weighted loss of each token, fp64, [n], the rows of x; and no stats."""
        return TOKEN_LOSSES[self.loss_name](logp).double() * x["weight"], {}
