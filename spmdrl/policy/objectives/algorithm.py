"""One algorithm of a run: the functions of `algos/` put together for packed batches on many ranks.

Everything that selects or normalises over samples is computed from columns that all ranks gather, in sample order, so
every rank holds the same numbers whatever the layout (law 2). A micro-batch only ever sums.
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
from spmdrl.data.dealing import gather_rows
from spmdrl.data.episode import FINISH_REASONS
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics


@dataclass
class Algorithm:
    """Advantage estimator + per-token loss + aggregation + KL + correction, with their settings."""

    settings: AlgoConfig
    """Coefficients and kinds of the terms beside the loss: KL, entropy bonus, likelihood of good responses."""
    advantage: Callable
    advantage_settings: dict
    loss: Callable
    loss_settings: dict
    select: Callable | None
    """Selects tokens of the whole batch that the loss treats apart; None for a loss that looks at each token alone."""
    separable: bool
    """No token's loss depends on another's logp."""
    aggregation: str
    horizon: float
    """Normaliser of `seq-mean-token-sum-norm`: the longest response."""
    old_logp: str
    """`update`: the update's own first pass; `policy`: a pass before; `rollout`: the engine's."""
    correction: str
    """Kind of importance weights of engine against trainer, see `algos/correction.py`."""
    limits: CorrectionConfig
    """Bounds of those weights, and of the sequences that are left out."""
    mask_cut: bool
    """Responses that were cut at the longest length teach nothing; their rewards count in their groups."""
    staleness: int
    """Versions that sampling runs ahead of training."""
    chunked: bool
    """A loss of which no token depends on another may be taken chunk by chunk."""
    skip_zero_advantage: bool
    needs: frozenset[str]
    """Inputs of a step beside the samples: reference, critic, cost, cost_critic, process (by the implicit models),
    scored steps (by a process reward model), greedy, logp, collision, turns."""
    state: dict[str, float] = field(default_factory=dict)
    """Numbers that change from step to step and are saved with it: kl_coef, multiplier, moments of the reward."""

    def advantages(self, batch: Batch, peers: Peers) -> Batch:
        """The batch with `token["advantages"]` and `token["returns"]`; `seq["shaped"]` is in it already. Collective."""
        samples = self.samples(batch, "shaped", "values", peers)
        advantages_T, batch.token["returns"] = self.advantage(samples, **self.advantage_settings)
        if "cost" in self.needs:
            costs = self.samples(batch, "cost", "cost_values", peers)
            cost_T, batch.token["cost_returns"] = self.advantage(costs, **self.advantage_settings)
            advantages_T = lagrangian(advantages_T, cost_T, self.state["multiplier"])
        batch.token["advantages"] = advantages_T
        if self.mask_cut:
            # From here on: its reward has counted in the statistics of its group.
            cut_B = batch.seq["finish"] == FINISH_REASONS.index("length")
            batch.token["sampled"] = batch.token["mask"]
            batch.token["mask"] = overlong_mask(batch.token["mask"], batch.seq_index, cut_B)
        # Sums of magnitudes: an episode whose advantages cancel still has a gradient.
        batch.seq["advantage"] = batch.sum_episodes(advantages_T.abs())
        return batch

    def samples(self, batch: Batch, outcome: str, values: str, peers: Peers) -> Samples:
        """Input of the estimator: an outcome column as token rewards, minus KL where it stands in the reward.

        An episode is one sequence of it, all its paths end to end. `token["turn_shaped"]` (`score.shape`) is the part
        of the reward that fell before the end, turn by turn.
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
        """Marks the tokens, bool [T], whose weights are at most `--rollout.staleness` versions old.

        Carried over and replayed tokens are older. version: of the policy where the update begins.
        """
        return batch.token["version"] >= version - self.staleness

    @property
    def entropy_before(self) -> bool:
        """A pass before the update tells the entropy of every token, those that the update leaves out included."""
        return self.old_logp == "policy" and "collision" not in self.needs


MOMENTS = ("reward_count", "reward_mean", "reward_m2")
"""Names of the running moments of the reward in `Algorithm.state`."""
OPTIONAL = {"logp": "old_logp", "collision": "collision", "process": "process", "ends": "ends"}
"""Field of Samples -> token column that fills it where the batch has one."""


def mean(x_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Mean under the mask, nan where there is nothing (a metric of weight 0 then)."""
    return torch.where(mask_T, x_T, 0.0).sum() / mask_T.sum()


def add_mismatch(metrics: Metrics, logp_T, rollout_logp_T, mask_T, seq_T, fresh_T) -> None:
    """Measures how far the trainer's logp, where its update begins, is from the engine's on sampled tokens.

    `mismatch/*` of all of them. `logp_diff/*`, by which a run is stopped, of those in `fresh_T`: older weights are
    apart from the trainer's without anything being wrong.
    """
    for name, (value, weight) in mismatch(logp_T, rollout_logp_T, mask_T, seq_T).items():
        metrics.add(name, value, weight)
    value, weight, largest = disagreement(logp_T, rollout_logp_T, mask_T & fresh_T)
    metrics.add("logp_diff/mean", value, weight)
    metrics.add_max("logp_diff/max", largest)
