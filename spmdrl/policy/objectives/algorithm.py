"""Combines functions from `algos/` into the RL algorithm of a run, for packed batches sharded over ranks.

Functions that select samples or normalize over them first gather the needed columns from all ranks in sample order, so
every rank computes the same numbers in every layout (law 2). The loss of a micro-batch is only a sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from spmdrl.algos.correction import disagreement, mismatch
from spmdrl.algos.credit import lagrangian
from spmdrl.algos.kl import kl_estimate
from spmdrl.algos.samples import Samples
from spmdrl.algos.shaping import overlong_mask, token_rewards
from spmdrl.config.learning import AlgoConfig, CorrectionConfig
from spmdrl.data.batch import Batch
from spmdrl.data.distribute import gather_rows
from spmdrl.data.episode import FINISH_REASONS
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics


@dataclass
class Algorithm:
    """The RL algorithm of a run: advantage estimator, loss, aggregation, KL, and rollout correction."""

    settings: AlgoConfig
    """Settings of additional loss terms: KL, entropy bonus, likelihood of good responses."""
    advantage: Callable
    advantage_settings: dict
    loss: Callable
    loss_settings: dict
    select: Callable | None
    """Function that selects the tokens in the full batch that the loss treats differently, or None to select none."""
    separable: bool
    """True if the loss of a token does not depend on the logp of other tokens."""
    aggregation: str
    horizon: float
    """Divisor of the aggregation `seq-mean-token-sum-norm`: the maximum response length in tokens."""
    old_logp: str
    """Source of old logp: the forward pass of the update itself (`update`), a separate forward pass before the update
    (`policy`), or the engine (`rollout`)."""
    correction: str
    """Kind of importance weights for rollout correction (`algos/correction.py`)."""
    limits: CorrectionConfig
    """Bounds on the importance weights, and bounds for rejecting whole sequences."""
    mask_cut: bool
    """True to exclude truncated responses from training. Their rewards still count in group statistics."""
    staleness: int
    """Maximum number of versions that the engine's weights can lag behind the policy's."""
    chunked: bool
    """True if the head may compute a separable loss in chunks."""
    skip_zero_advantage: bool
    needs: frozenset[str]
    """Names of the inputs that a step needs besides samples: reference, critic, cost, cost_critic, process (implicit
    models), scored steps (a process reward model), greedy, logp, collision, turns."""
    state: dict[str, float] = field(default_factory=dict)
    """Mutable state that is saved in checkpoints: kl_coef, multiplier, reward moments."""

    def advantages(self, batch: Batch, peers: Peers) -> Batch:
        """Add `token["advantages"]` and `token["returns"]` to a batch that has `seq["shaped"]`. Collective."""
        samples = self.samples(batch, "shaped", "values", peers)
        advantages_T, batch.token["returns"] = self.advantage(samples, **self.advantage_settings)
        if "cost" in self.needs:
            costs = self.samples(batch, "cost", "cost_values", peers)
            cost_T, batch.token["cost_returns"] = self.advantage(costs, **self.advantage_settings)
            advantages_T = lagrangian(advantages_T, cost_T, self.state["multiplier"])
        batch.token["advantages"] = advantages_T
        if self.mask_cut:
            # Truncated responses are masked after the advantages are computed, so that their rewards count in group
            # statistics.
            cut_B = batch.seq["finish"] == FINISH_REASONS.index("length")
            batch.token["sampled"] = batch.token["mask"]
            batch.token["mask"] = overlong_mask(batch.token["mask"], batch.seq_index, cut_B)
        # Sum absolute values, because an episode whose advantages sum to 0 can still have a gradient.
        batch.seq["advantage"] = batch.sum_episodes(advantages_T.abs())
        return batch

    def samples(self, batch: Batch, outcome: str, values: str, peers: Peers) -> Samples:
        """Return the advantage estimator's input. Token rewards include the KL penalty if `kl_in` is `reward`.

        outcome, values: names of the columns with episode rewards and with critic values. An episode counts as one
        sequence, the concatenation of its paths. `token["turn_shaped"]` (`score.shape`) is the part of the reward that
        is given to individual turns before the end of an episode.
        """
        token, mask_T, seq_T, first_E = batch.token, batch.token["mask"], batch.episode_index, batch.firsts
        kl_T = None
        if outcome == "shaped" and self.state["kl_coef"] and self.settings.kl_in == "reward":
            kl_T = kl_estimate(self.settings.kl_estimator, token["old_logp"], token["ref_logp"], mask_T).double()
        optional = {name: token[key].double() for name, key in OPTIONAL.items() if key in token}
        if values in token:
            optional["values"] = token[values].double()
        optional |= {name: token[name] for name in ("turn", "state", "parent") if name in token}
        turn_reward_T = token.get("turn_shaped") if outcome == "shaped" else None
        outcome_E, turn_T = batch.seq[outcome][first_E], token.get("turn")
        return Samples(
            rewards=token_rewards(outcome_E, kl_T, self.state["kl_coef"], mask_T, seq_T, turn_T, turn_reward_T),
            mask=mask_T,
            seq=seq_T,
            group=batch.seq["position"][first_E],
            baseline=batch.seq["baseline"][first_E],
            parts={k.removeprefix("part/"): v[first_E] for k, v in batch.seq.items() if k.startswith("part/")},
            gather=lambda seq_n, columns_nK: gather_rows(batch, first_E[seq_n], columns_nK, peers),
            **optional,
        )

    def fresh_mask(self, batch: Batch, version: int) -> torch.Tensor:
        """Return a mask, bool [T], of tokens sampled with weights at most `--rollout.staleness` versions old.

        Tokens of carried-over or replayed responses may be older. version: policy version at the start of the update.
        """
        return batch.token["version"] >= version - self.staleness

    @property
    def entropy_before(self) -> bool:
        """True if a forward pass before the update measures the entropy of all tokens, including untrained ones."""
        return self.old_logp == "policy" and "collision" not in self.needs


MOMENTS = ("reward_count", "reward_mean", "reward_m2")
"""Keys in `Algorithm.state` for the running count, mean and sum of squared deviations of the reward."""
OPTIONAL = {"logp": "old_logp", "collision": "collision", "process": "process", "ends": "ends"}
"""Maps fields of `Samples` to their token columns, which a batch may lack."""


def mean(x_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Return the masked mean of x, or nan for an empty mask, which has weight 0 in a metric."""
    return torch.where(mask_T, x_T, 0.0).sum() / mask_T.sum()


def add_mismatch(metrics: Metrics, logp_T, rollout_logp_T, mask_T, seq_T, fresh_T, episodes: int | None = None) -> None:
    """Add metrics on the mismatch between the trainer's logp at the start of an update and the engine's logp.

    `mismatch/*` covers all sampled tokens. `logp_diff/*`, which can stop a run, only covers the tokens in `fresh_T`,
    because logp is expected to differ for tokens that were sampled with older weights. episodes: number of episodes, or
    None to read it from seq_T, which synchronises with the device.
    """
    for name, (value, weight) in mismatch(logp_T, rollout_logp_T, mask_T, seq_T, episodes).items():
        metrics.add(name, value, weight)
    value, weight, largest = disagreement(logp_T, rollout_logp_T, mask_T & fresh_T)
    metrics.add("logp_diff/mean", value, weight)
    metrics.add_max("logp_diff/max", largest)
