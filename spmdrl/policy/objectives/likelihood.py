"""The objective of supervised fine-tuning: cross-entropy over the trained tokens, or the DFT loss."""

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
    """Averages the loss over the trained tokens of an optimizer step, with equal weights."""

    loss_name: str
    """Key of the loss in `algos.value.TOKEN_LOSSES`."""
    peers: Peers
    temperature = 1.0
    columns = frozenset({"token/mask"})
    second = "top"

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Shared) -> LossResult:
        """Implements `Objective.loss`; first_T is logp, and second_T is 1 for argmax tokens, else 0."""
        mask, metrics = micro.token["mask"], Metrics()
        loss = self._losses(first_T, second_T, {"weight": self.weights(micro, shared)})[0].sum()
        metrics.add_sum("loss", loss)
        add_token_mean(metrics, "nll/mean", -first_T, mask)
        add_token_mean(metrics, "accuracy/mean", second_T, mask)
        return LossResult(loss, metrics)

    def token_loss(self, micro: Batch, shared: Shared) -> TokenLoss:
        """Implements `Objective.token_loss`."""
        return self._losses, {"weight": self.weights(micro, shared)}

    def _losses(self, logp: torch.Tensor, other: torch.Tensor | None, x: dict[str, torch.Tensor]) -> tuple:
        """Return the weighted per-token loss, fp64 [n], and an empty dict of stats."""
        return TOKEN_LOSSES[self.loss_name](logp).double() * x["weight"], {}
