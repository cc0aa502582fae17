"""The RL objectives: for the policy, a critic and an implicit process reward model.

Only `prepare` selects samples and normalizes over them, across all ranks. The loss of a micro-batch is a sum (law 2).
"""

from dataclasses import dataclass
from functools import partial

import torch

from spmdrl.algos.aggregate import Totals, count_totals, token_weights
from spmdrl.algos.correction import correction_weights, reject_sequences
from spmdrl.algos.covariance_losses import Selecting
from spmdrl.algos.kl import kl_estimate
from spmdrl.algos.losses import LossInputs
from spmdrl.algos.value import implicit_reward_loss, positive_nll, value_loss
from spmdrl.data.batch import Batch
from spmdrl.data.distribute import gather_rows
from spmdrl.policy.contract import LossResult, Objective, Policy, Shared, TokenLoss
from spmdrl.policy.objectives.algorithm import Algorithm, add_mismatch, mean
from spmdrl.policy.objectives.tokens import TokenObjective
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.seeds import uniform
from spmdrl.tracking.metrics import Metrics

LOSS_COLUMNS = ("mask", "advantages", "rollout_logp", "old_logp", "ref_logp", "selected")
"""Token columns that a policy loss may read."""
OLD_LOGP = {"policy": "old_logp", "rollout": "rollout_logp"}
"""Maps `Algorithm.old_logp` to a column. `update` has no column, because it uses logp from the current forward pass."""


@dataclass
class PolicyShared(Shared):
    """The `Shared` values of an optimizer step plus values that only a policy loss needs."""

    first: bool = False
    """True if the policy's weights have not changed since the start of the update."""
    version: int = 0
    """The policy's `version` during this step."""
    good_tokens: float = 0.0
    """Number of tokens in good responses over all ranks, which normalises their likelihood term."""


class PolicyObjective(Objective):
    """Trains the policy with an `Algorithm`: ratio loss, KL, entropy bonus and rollout correction."""

    def __init__(self, algo: Algorithm, policy: Policy, temperature: float, peers: Peers, start: int | None = None):
        """peers: data-parallel ranks. start: `policy.updates_done` at the update's start; None if it starts now."""
        self.algo, self.policy, self.temperature, self.peers = algo, policy, temperature, peers
        self.start = policy.updates_done if start is None else start
        wanted = {"token/advantages", "token/rollout_logp", "token/version", "seq/reward", "seq/advantage"}
        wanted |= {"token/old_logp"} if algo.old_logp == "policy" or algo.select is not None else set()
        self.columns = frozenset(wanted | ({"token/ref_logp"} if "reference" in algo.needs else set()))

    def prepare(self, share: Batch, index: int) -> PolicyShared:
        """Implements `Objective.prepare`; adds `token["selected"]` to the share if the loss selects tokens."""
        algo, first = self.algo, self.policy.updates_done == self.start
        on_policy = algo.old_logp == "policy" and first
        mask_T, good_T = share.token["mask"], share.per_token(share.seq["reward"] > 0)
        local, first_E = count_totals(mask_T, share.episode_index), share.firsts
        counts = torch.tensor([local.tokens, local.sequences, float((mask_T & good_T).sum())], dtype=torch.float64)
        tokens, sequences, good = self.peers.sum(counts).tolist()
        if algo.select is not None:
            logp_T = share.token["old_logp"] if on_policy else self.policy.logprobs(share, self.temperature)[0]
            place_T = torch.arange(share.n_tokens) - share.cu_seqlens.long()[first_E][share.episode_index]
            share.token["selected"] = algo.select(
                Selecting(
                    logp=logp_T.double(),
                    old_logp=share.token["old_logp"].double(),
                    advantages=share.token["advantages"].double(),
                    mask=mask_T,
                    seq=share.episode_index,
                    sequences=len(first_E),
                    draw=uniform(share.per_token(share.seq["seed"]), place_T),
                    gather=lambda seq_n, columns_nK: gather_rows(share, first_E[seq_n], columns_nK, self.peers),
                ),
                **algo.loss_settings,
            )
        # With `skip_zero_advantage`, episodes whose advantages are all 0 need no forward pass.
        active = share.seq["advantage"] != 0 if algo.skip_zero_advantage else None
        return PolicyShared(Totals(tokens, sequences), active, on_policy, first, self.policy.version, good)

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: PolicyShared) -> LossResult:
        """Implements `Objective.loss`; first_T is logp and second_T the entropy."""
        algo, logp, entropy = self.algo, first_T, second_T
        x = self.inputs(micro, shared)
        loss_T, stats = self.token_losses(shared, micro.episodes, logp, entropy, x)
        metrics, mask, loss = Metrics(), x["mask"], loss_T.sum()
        metrics.add_sum("loss", loss)
        if not algo.entropy_before:
            stats = {**stats, "entropy/mean": entropy.detach()}
        for name, value in stats.items():
            metrics.add(name, mean(value, mask), mask.sum())
        if algo.old_logp != "policy" and shared.first:
            fresh_T = algo.fresh_mask(micro, shared.version)
            add_mismatch(metrics, logp.detach(), x["rollout_logp"], mask, x["seq"], fresh_T, micro.episodes)
        return LossResult(loss, metrics)

    def token_loss(self, micro: Batch, shared: PolicyShared) -> TokenLoss | None:
        """Implements `Objective.token_loss`."""
        if not (self.algo.chunked and self.separable):
            return None
        return partial(self.token_losses, shared, micro.episodes), self.inputs(micro, shared)

    @property
    def separable(self) -> bool:
        """True if the loss of a token, including its correction weight, does not depend on the logp of other tokens."""
        limits = self.algo.limits
        rejects = limits.reject_low is not None or limits.reject_high is not None
        if self.algo.old_logp != "policy" and (rejects or self.algo.correction.endswith("sequence")):
            return False
        return self.algo.separable

    def inputs(self, micro: Batch, shared: PolicyShared) -> dict[str, torch.Tensor]:
        """Return the columns [T] that `token_losses` reads."""
        x = {k: micro.token[k] for k in LOSS_COLUMNS if k in micro.token}
        mask, seq = x["mask"], micro.episode_index
        scale = self.algo.aggregation, mask, seq, shared.totals, self.algo.horizon, micro.episodes
        x |= {"seq": seq, "weight": token_weights(*scale)}
        if self.algo.old_logp == "policy":
            correction_T = self.weights(x["old_logp"], x["rollout_logp"], mask, seq, micro.episodes)
            x |= {} if correction_T is None else {"correction": correction_T}
        if self.algo.settings.positive_coef:
            x["good"] = micro.per_token(micro.seq["reward"] > 0)
        return x

    def token_losses(
        self,
        shared: PolicyShared,
        episodes: int,
        logp: torch.Tensor,
        entropy: torch.Tensor,
        x: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weighted per-token loss in fp64 and detached stats, [n] each.

        episodes: number of episodes in the micro-batch. x: the result of `inputs` at the n tokens.
        """
        algo, terms, mask, current = self.algo, self.algo.settings, x["mask"], logp.detach()
        old_logp = current if algo.old_logp == "update" else x[OLD_LOGP[algo.old_logp]].to(logp.dtype)
        correction = x.get("correction")
        if algo.old_logp != "policy":
            # There is no trainer logp from before the update, so the correction uses logp from this forward pass.
            correction = self.weights(current, x["rollout_logp"], mask, x["seq"], episodes)
        if shared.on_policy:
            # old_logp equals logp up to rounding, which depends on the layout. Use logp as old_logp, because the
            # gradient of |logp - old_logp| would otherwise depend on the sign of the rounding error.
            old_logp = current
        inputs = LossInputs(
            logp=logp,
            old_logp=old_logp,
            advantages=x["advantages"].to(logp.dtype),
            mask=mask,
            seq=x["seq"],
            entropy=entropy,
            ref_logp=x.get("ref_logp"),
            rollout_logp=x["rollout_logp"],
            weights=correction,
            selected=x.get("selected"),
            sequences=episodes,
        )
        per_token, stats = algo.loss(inputs, **algo.loss_settings)
        if per_token.shape != mask.shape or any(v.shape != mask.shape for v in stats.values()):
            raise ValueError(
                f"the loss must return [T] tensors ({len(mask)} tokens here), see algos/losses.py; "
                f"it returned {tuple(per_token.shape)}, { ({k: tuple(v.shape) for k, v in stats.items()}) }"
            )
        if "reference" in algo.needs and terms.kl_in == "loss":
            kl_T = kl_estimate(terms.kl_estimator, logp, x["ref_logp"].to(logp.dtype), mask)
            if algo.state["kl_coef"]:
                per_token = per_token + algo.state["kl_coef"] * kl_T
            stats = {**stats, "kl/mean": kl_T.detach()}
        if terms.entropy_coef:
            per_token = per_token - terms.entropy_coef * entropy
        loss = per_token.double() * x["weight"]
        if terms.positive_coef:
            likelihood = positive_nll(logp, mask, x["good"]).double()
            loss = loss + terms.positive_coef * likelihood / max(1.0, shared.good_tokens)
        return loss, stats

    def weights(self, trainer_T, rollout_T, mask_T, seq_T, episodes: int) -> torch.Tensor | None:
        """Return the weights [T] of rollout correction, 0 for rejected sequences, or None if the settings need none."""
        limits = self.algo.limits
        weights_T = None
        if self.algo.correction != "none":
            weights_T = correction_weights(
                self.algo.correction, trainer_T, rollout_T, mask_T, seq_T, limits.low, limits.high, episodes
            )
        if limits.reject_low is not None or limits.reject_high is not None:
            bounds = limits.reject_low, limits.reject_high
            kept_B = reject_sequences(trainer_T, rollout_T, mask_T, seq_T, *bounds, episodes)
            kept_T = kept_B[seq_T].to(trainer_T.dtype)
            weights_T = kept_T if weights_T is None else weights_T * kept_T
        return weights_T


@dataclass
class CriticObjective(TokenObjective):
    """Trains a critic on a column of returns, with values clipped around the values from before the update."""

    returns: str
    values: str
    clip: float | None
    """Clip range; value changes beyond it cannot lower the loss. Use None for no clipping."""
    peers: Peers
    temperature = 1.0

    def __post_init__(self):
        self.columns = frozenset({f"token/{self.returns}", f"token/{self.values}"})

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Shared) -> LossResult:
        """Implements `Objective.loss`; first_T holds the values."""
        mask, target, old = (micro.token[k] for k in ("mask", self.returns, self.values))
        per_token, stats = value_loss(first_T, old.to(first_T.dtype), target.to(first_T.dtype), mask, self.clip)
        loss, metrics = (per_token.double() * self.weights(micro, shared)).sum(), Metrics()
        metrics.add_sum("loss", loss)
        for name, x_T in stats.items():
            metrics.add(name, mean(x_T, mask), mask.sum())
        return LossResult(loss, metrics)


@dataclass
class ProcessObjective(TokenObjective):
    """Trains an implicit process reward model (PRIME) to predict the outcome of a response from its summed reward."""

    beta: float
    temperature: float
    peers: Peers
    columns = frozenset({"token/process_ref_logp", "seq/reward"})

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Shared) -> LossResult:
        """Implements `Objective.loss`; first_T is logp."""
        metrics = Metrics()
        mask, reference_T = (micro.token[k] for k in ("mask", "process_ref_logp"))
        outcome_T, seq_T = micro.per_token(micro.seq["reward"].clamp(0, 1)), micro.episode_index
        pack = first_T, reference_T.to(first_T.dtype), mask, seq_T
        per_token = implicit_reward_loss(*pack, outcome_T, self.beta, micro.episodes)
        loss = (per_token.double() * self.weights(micro, shared, "seq-mean-token-mean")).sum()
        metrics.add_sum("loss", loss)
        return LossResult(loss, metrics)
