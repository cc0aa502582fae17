"""The base class of objectives that average over tokens, and helpers that add means to metrics."""

import torch

from spmdrl.algos.aggregate import Totals, count_totals, token_weights
from spmdrl.data.batch import Batch
from spmdrl.policy.contract import Objective, Shared
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics


class TokenObjective(Objective):
    """An objective that averages its loss over all trained tokens of an optimizer step, across ranks."""

    peers: Peers

    def trained_mask(self, batch: Batch) -> torch.Tensor:
        """Return a mask, bool [T], of the tokens that the loss is averaged over."""
        return batch.token["mask"]

    def prepare(self, share: Batch, index: int) -> Shared:
        """Implements `Objective.prepare`."""
        return Shared(totals(share, self.peers, self.trained_mask(share)))

    def weights(self, micro: Batch, shared: Shared, mode: str = "token-mean") -> torch.Tensor:
        """Return the loss weight of each token, [T], 0 outside the mask. mode: as in `token_weights`."""
        mask_T = self.trained_mask(micro)
        return token_weights(mode, mask_T, micro.episode_index, shared.totals, sequences=micro.episodes)


def totals(share: Batch, peers: Peers, mask_T: torch.Tensor | None = None) -> Totals:
    """Count the tokens and episodes of an optimizer step over all ranks. Collective.

    mask_T: True for the tokens to count; None for the loss mask.
    """
    local = count_totals(share.token["mask"] if mask_T is None else mask_T, share.episode_index)
    return Totals(*peers.sum(torch.tensor([local.tokens, local.sequences], dtype=torch.float64)).tolist())


def add_token_mean(metrics: Metrics, name: str, x_T: torch.Tensor, mask_T: torch.Tensor) -> None:
    """Add the elements of x_T where mask_T is True to the mean metric `name`.

    The mask may be False everywhere. Sums are computed in float64.
    """
    count = mask_T.sum()
    total = torch.where(mask_T, x_T.detach(), torch.zeros_like(x_T)).double().sum()
    metrics.add(name, total / count.clamp(min=1), count)


def add_mean(metrics: Metrics, name: str, x: torch.Tensor) -> None:
    """Add the elements of x to the mean metric `name`. The tensor x may be empty."""
    metrics.add(name, x.mean() if len(x) else 0.0, len(x))
