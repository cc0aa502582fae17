"""Objective of supervised fine-tuning: cross-entropy of the trained tokens, or DFT."""

from dataclasses import dataclass

import torch

from spmdrl.algos.value import TOKEN_LOSSES
from spmdrl.data.batch import Batch
from spmdrl.policy.contract import LossResult, Shared, TokenLoss
from spmdrl.policy.objectives.tokens import TokenObjective, add_token_mean
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics


@dataclass
class SftObjective(TokenObjective):
    """Averages the loss over the trained tokens of a step; all tokens weigh the same, whatever row they are in."""

    loss_name: str
    """A name in `algos.value.TOKEN_LOSSES`."""
    peers: Peers
    temperature = 1.0
    columns = frozenset({"token/mask"})
    second = "top"

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Shared) -> LossResult:
        """Implements `loss` of the contract, from logp and a flag for the likeliest token."""
        mask, metrics = micro.token["mask"].to(first_T.device), Metrics()
        loss = self._losses(first_T, second_T, {"weight": self.weights(micro, shared, first_T.device)})[0].sum()
        metrics.add_sum("loss", loss)
        add_token_mean(metrics, "nll/mean", -first_T, mask)
        add_token_mean(metrics, "accuracy/mean", second_T, mask)
        return LossResult(loss, metrics)

    def token_loss(self, micro: Batch, shared: Shared, device: torch.device) -> TokenLoss:
        """Implements `token_loss` of the contract."""
        return self._losses, {"weight": self.weights(micro, shared, device)}

    def _losses(self, logp: torch.Tensor, other: torch.Tensor | None, x: dict[str, torch.Tensor]) -> tuple:
        """Return the weighted loss of each token, fp64, [n], the rows of x; and no stats."""
        return TOKEN_LOSSES[self.loss_name](logp).double() * x["weight"], {}
