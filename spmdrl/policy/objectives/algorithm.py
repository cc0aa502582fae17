"""Combines functions of `algos/` into the algorithm of a run, for packed batches that are divided over ranks.

Functions that select samples or normalize over them gather the columns that they need from all ranks, in the order of
samples. So every rank computes the same numbers in every layout (law 2). A micro-batch's loss is only a sum.
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
    """The algorithm of a run: advantage estimator, loss, aggregation, KL, correction for the engine's logp."""

    settings: AlgoConfig
    """Settings of the terms that are added to the loss: KL, entropy bonus, likelihood of good responses."""
    advantage: Callable
    advantage_settings: dict
    loss: Callable
    loss_settings: dict
    select: Callable | None
    """Function that selects, from the complete batch, tokens that the loss treats differently; None to select none."""
    separable: bool
    """True if the loss of a token does not depend on the logp of other tokens."""
    aggregation: str
    horizon: float
    """Number of tokens by which the aggregation `seq-mean-token-sum-norm` divides: the length limit of responses."""
    old_logp: str
    """The source of old logp. `update`: the forward of the update itself; `policy`: a forward before the update;
    `rollout`: the engine."""
    correction: str
    """Kind of the importance weights that correct for the engine's logp (`algos/correction.py`)."""
    limits: CorrectionConfig
    """Bounds on the importance weights, and bounds outside of which a sequence is not trained on."""
    mask_cut: bool
    """True if responses that were cut at the length limit are not trained on; their rewards still count in the
    statistics of their groups."""
    staleness: int
    """Maximum number of versions by which the engine's weights may be older than the policy's."""
    chunked: bool
    """True if the head may compute a separable loss chunk by chunk."""
    skip_zero_advantage: bool
    needs: frozenset[str]
    """Names of the inputs that a step needs in addition to samples: reference, critic, cost, cost_critic, process
    (implicit models), scored steps (a process reward model), greedy, logp, collision, turns."""
    state: dict[str, float] = field(default_factory=dict)
    """Numbers that change during a run and are saved in checkpoints: kl_coef, multiplier, moments of the reward."""

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
            # Cut responses are masked after the advantages are computed, so that their rewards count in the statistics
            # of their groups.
            cut_B = batch.seq["finish"] == FINISH_REASONS.index("length")
            batch.token["sampled"] = batch.token["mask"]
            batch.token["mask"] = overlong_mask(batch.token["mask"], batch.seq_index, cut_B)
        # The sum is over absolute values, because an episode whose advantages sum to 0 can still have a gradient.
        batch.seq["advantage"] = batch.sum_episodes(advantages_T.abs())
        return batch

    def samples(self, batch: Batch, outcome: str, values: str, peers: Peers) -> Samples:
        """Return the advantage estimator's input. Rewards of tokens include the KL penalty if `kl_in` is `reward`.

        outcome, values: names of the columns with the rewards of episodes and with a critic's values. An episode counts
        as one sequence, which concatenates its paths. `token["turn_shaped"]` (`score.shape`) is the part of the reward
        for individual turns before the end of an episode.
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
        """Return a mask, bool [T], of the tokens sampled with weights at most `--rollout.staleness` versions old.

        Tokens of carried-over or replayed responses may be older. version: the policy's version when the update starts.
        """
        return batch.token["version"] >= version - self.staleness

    @property
    def entropy_before(self) -> bool:
        """True if a forward before the update measures the entropy of all tokens, even untrained ones."""
        return self.old_logp == "policy" and "collision" not in self.needs


MOMENTS = ("reward_count", "reward_mean", "reward_m2")
"""Keys in `Algorithm.state` of the reward's running count, mean and sum of squared deviations."""
OPTIONAL = {"logp": "old_logp", "collision": "collision", "process": "process", "ends": "ends"}
"""Field of `Samples` -> name of the token column with its values, which a batch may lack."""


def mean(x_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Return the mean of x under the mask; nan for an empty mask, which has the weight 0 in a metric."""
    return torch.where(mask_T, x_T, 0.0).sum() / mask_T.sum()


def add_mismatch(metrics: Metrics, logp_T, rollout_logp_T, mask_T, seq_T, fresh_T, episodes: int | None = None) -> None:
    """Add metrics of how much the trainer's logp at the start of an update differs from the engine's.

    The metrics `mismatch/*` cover all sampled tokens. The metrics `logp_diff/*`, which can stop a run, cover only the
    tokens in `fresh_T`, because the logp of tokens that were sampled with older weights is expected to differ.

    episodes: number of episodes; None to read it from seq_T, which waits for the device.
    """
    for name, (value, weight) in mismatch(logp_T, rollout_logp_T, mask_T, seq_T, episodes).items():
        metrics.add(name, value, weight)
    value, weight, largest = disagreement(logp_T, rollout_logp_T, mask_T & fresh_T)
    metrics.add("logp_diff/mean", value, weight)
    metrics.add_max("logp_diff/max", largest)
