"""One algorithm of a run: the functions of `algos/` put together for packed batches on many ranks.

Everything that selects or normalises over samples is computed from columns that all ranks gather, in sample order, so
every rank holds the same numbers whatever the layout (law 2). A micro-batch only ever sums.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from spmdrl.algos.aggregate import Totals, count_totals, token_weights
from spmdrl.algos.correction import correction_weights_T, disagreement, mismatch, reject_sequences
from spmdrl.algos.credit import lagrangian
from spmdrl.algos.kl import kl_estimate
from spmdrl.algos.losses import TOKEN_LOSSES, LossInputs
from spmdrl.algos.samples import Samples
from spmdrl.algos.selection import Selecting
from spmdrl.algos.shaping import overlong_mask, token_rewards
from spmdrl.algos.value import implicit_reward_loss, positive_nll, value_loss
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch, gather_rows
from spmdrl.data.trajectory import FINISH_REASONS
from spmdrl.policy.contract import LossResult, Policy, TokenLoss
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.seeds import uniform
from spmdrl.tracking.metrics import Metrics


@dataclass
class Algorithm:
    """Advantage estimator + per-token loss + aggregation + KL + correction, with their settings."""

    cfg: Config
    advantage: Callable
    advantage_settings: dict
    loss: Callable
    loss_settings: dict
    select: Callable | None
    """Which tokens of the whole batch the loss treats apart; None for a loss that looks at each token alone."""
    aggregation: str
    horizon: float
    """Normaliser of `seq-mean-token-sum-norm`: the longest response."""
    old_logp: str
    """`update`: the update's own first pass; `policy`: a pass before; `rollout`: the engine's."""
    correction: str
    """Kind of importance weights of engine against trainer, see `algos/correction.py`."""
    skip_zero_advantage: bool
    needs: frozenset[str]
    """What a step has to know beside the samples: reference, critic, cost, cost_critic, process, greedy, logp,
    collision."""
    state: dict[str, float] = field(default_factory=dict)
    """What moves from step to step and is saved with it: kl_coef, multiplier, moments of the reward."""

    # ── before the update ────────────────────────────────────────────────────

    def advantages(self, batch: Batch, group: dist.ProcessGroup | None, device: torch.device) -> Batch:
        """The batch with `token["advantages"]` and `token["returns"]`; `seq["shaped"]` is in it already. Collective."""
        samples = self.samples(batch, "shaped", "values", group, device)
        advantages_T, batch.token["returns"] = self.advantage(samples, **self.advantage_settings)
        if "cost" in self.needs:
            costs = self.samples(batch, "cost", "cost_values", group, device)
            cost_T, batch.token["cost_returns"] = self.advantage(costs, **self.advantage_settings)
            advantages_T = lagrangian(advantages_T, cost_T, self.state["multiplier"])
        batch.token["advantages"] = advantages_T
        if self.cfg.shaping.mask_cut:
            # From here on: its reward has counted in the statistics of its group.
            cut_B = batch.seq["finish"] == FINISH_REASONS.index("length")
            batch.token["sampled"] = batch.token["mask"]
            batch.token["mask"] = overlong_mask(batch.token["mask"], batch.seq_index, cut_B)
        # Sums of magnitudes: a sequence whose advantages cancel still has a gradient.
        batch.seq["advantage"] = batch.sum_tokens(advantages_T.abs())
        return batch

    def samples(
        self, batch: Batch, outcome: str, values: str, group: dist.ProcessGroup | None, device: torch.device
    ) -> Samples:
        """What the estimator sees: an outcome column as token rewards, minus KL where it stands in the reward."""
        token, mask_T, seq_T = batch.token, batch.token["mask"], batch.seq_index
        kl_T = None
        if outcome == "shaped" and self.cfg.algo.kl_in == "reward" and self.state["kl_coef"]:
            kl_T = kl_estimate(self.cfg.algo.kl_estimator, token["old_logp"], token["ref_logp"], mask_T).double()
        optional = {name: token[key].double() for name, key in OPTIONAL.items() if key in token}
        if values in token:
            optional["values"] = token[values].double()
        optional |= {name: token[name] for name in ("turn", "state") if name in token}
        return Samples(
            rewards=token_rewards(batch.seq[outcome], kl_T, self.state["kl_coef"], mask_T, seq_T),
            mask=mask_T,
            seq=seq_T,
            group=batch.seq["position"],
            baseline=batch.seq["baseline"],
            parts={k.removeprefix("part/"): v for k, v in batch.seq.items() if k.startswith("part/")},
            gather=lambda seq_n, columns_nK: gather_rows(batch, seq_n, columns_nK, group, device),
            **optional,
        )

    def prepare(
        self,
        policy: Policy,
        start: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        device: torch.device,
        share: Batch,
        index: int,
    ) -> dict:
        """What the loss needs of a whole optimizer step, over all ranks. Collective.

        start: the policy's `updates_done` when the update began; share: this rank's sequences of the step; index: the
        step's place in the update. Returns `totals`; `first`, whether the weights are those that the update began with,
        and their `version`; `unmoved`, whether old_logp is of these weights, by a pass before; `active` bool [B] where
        sequences without advantage are left out of the forward; `good_tokens`, the denominator of the likelihood of
        good responses; `by_token`, the function of that name, or None where it is not asked for. A loss that selects
        gets `token["selected"]` in the share.
        """
        first = policy.updates_done == start
        unmoved = self.old_logp == "policy" and first
        mask_T, good_T = share.token["mask"], share.per_token(share.seq["reward"] > 0)
        local = count_totals(mask_T, share.seq_index)
        counts = torch.tensor([local.tokens, local.sequences, float((mask_T & good_T).sum())], dtype=torch.float64)
        tokens, sequences, good = all_reduce(counts.to(device), "sum", group).tolist()
        if self.select is not None:
            logp_T = share.token["old_logp"] if unmoved else policy.logprobs(share, temperature)[0]
            place_T = torch.arange(share.n_tokens) - share.per_token(share.cu_seqlens[:-1].long())
            share.token["selected"] = self.select(
                Selecting(
                    logp=logp_T.double(),
                    old_logp=share.token["old_logp"].double(),
                    advantages=share.token["advantages"].double(),
                    mask=mask_T,
                    seq=share.seq_index,
                    sequences=len(share),
                    draw=uniform(share.per_token(share.seq["seed"]), place_T),
                    gather=lambda seq_n, columns_nK: gather_rows(share, seq_n, columns_nK, group, device),
                ),
                **self.loss_settings,
            )
        active = share.seq["advantage"] != 0 if self.skip_zero_advantage else None
        by_token = self.by_token if self.cfg.policy.chunked_loss else None
        return {
            "totals": Totals(tokens, sequences),
            "first": first,
            "version": policy.version,
            "unmoved": unmoved,
            "active": active,
            "good_tokens": good,
            "by_token": by_token,
        }

    # ── one micro-batch ──────────────────────────────────────────────────────

    def micro_loss(self, micro: Batch, logp: torch.Tensor, entropy: torch.Tensor, shared: dict) -> LossResult:
        """Loss and log sums of one micro-batch; logp and entropy [T] with gradient. No communication."""
        x = self.columns(micro, shared, logp.device)
        loss_T, stats = self.token_losses(shared, logp, entropy, x)
        metrics, mask, loss = Metrics(), x["mask"], loss_T.sum()
        metrics.add_sum("loss", loss)
        if not self.entropy_before:
            stats = {**stats, "entropy/mean": entropy.detach()}
        for name, value in stats.items():
            metrics.add(name, mean(value, mask), mask.sum())
        if self.old_logp != "policy" and shared["first"]:
            young_T = self.young(micro, shared["version"]).to(mask.device)
            add_mismatch(metrics, logp.detach(), x["rollout_logp"], mask, x["seq"], young_T)
        return LossResult(loss, metrics)

    def young(self, batch: Batch, version: int) -> torch.Tensor:
        """Marks the tokens, bool [T], whose weights are at most `--rollout.staleness` versions old.

        Carried over and replayed tokens are older. version: of the policy where the update begins.
        """
        return batch.token["version"] >= version - self.cfg.rollout.staleness

    @property
    def entropy_before(self) -> bool:
        """A pass before the update tells the entropy of every token, those that the update leaves out included."""
        return self.old_logp == "policy" and "collision" not in self.needs

    def by_token(self, micro: Batch, shared: dict, device: torch.device) -> TokenLoss | None:
        """The same loss for whoever computes logp in chunks; None where a token's loss depends on other tokens."""
        return (partial(self.token_losses, shared), self.columns(micro, shared, device)) if self.separable else None

    @property
    def separable(self) -> bool:
        """No token's loss depends on another's logp. A user's own loss says so by an attribute `token_separable`."""
        cfg = self.cfg.correction
        rejects = cfg.reject_low is not None or cfg.reject_high is not None
        if self.old_logp != "policy" and (rejects or self.correction.endswith("sequence")):
            return False
        return self.loss in TOKEN_LOSSES or getattr(self.loss, "token_separable", False)

    def columns(self, micro: Batch, shared: dict, device: torch.device) -> dict[str, torch.Tensor]:
        """What `token_losses` looks at beside logp and entropy, [T] on the device."""
        x = {k: micro.token[k].to(device) for k in LOSS_COLUMNS if k in micro.token}
        mask, seq = x["mask"], micro.seq_index.to(device)
        x |= {"seq": seq, "weight": token_weights(self.aggregation, mask, seq, shared["totals"], self.horizon)}
        if self.old_logp == "policy":
            correction_T = self.weights(x["old_logp"], x["rollout_logp"], mask, seq)
            x |= {} if correction_T is None else {"correction": correction_T}
        if self.cfg.algo.positive_coef:
            x["good"] = micro.per_token(micro.seq["reward"] > 0).to(device)
        return x

    def token_losses(
        self, shared: dict, logp: torch.Tensor, entropy: torch.Tensor, x: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of each token with its final weight, fp64, and detached stats; all [n], the rows that x has."""
        mask, algo, current = x["mask"], self.cfg.algo, logp.detach()
        old_logp = current if self.old_logp == "update" else x[OLD_LOGP[self.old_logp]].to(logp.dtype)
        correction = x.get("correction")
        if self.old_logp != "policy":
            # Of the logp of this very pass: none is known from before.
            correction = self.weights(current, x["rollout_logp"], mask, x["seq"])
        if shared["unmoved"]:
            # The same numbers but for rounding, which another layout rounds otherwise: |logp - old_logp| would have its
            # gradient by the sign of that.
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
        )
        per_token, stats = self.loss(inputs, **self.loss_settings)
        if per_token.shape != mask.shape or any(v.shape != mask.shape for v in stats.values()):
            raise ValueError(
                f"the loss must return [T] tensors ({len(mask)} tokens here), see algos/losses.py; "
                f"it returned {tuple(per_token.shape)}, { ({k: tuple(v.shape) for k, v in stats.items()}) }"
            )
        if "reference" in self.needs and algo.kl_in == "loss":
            kl_T = kl_estimate(algo.kl_estimator, logp, x["ref_logp"].to(logp.dtype), mask)
            if self.state["kl_coef"]:
                per_token = per_token + self.state["kl_coef"] * kl_T
            stats = {**stats, "kl/mean": kl_T.detach()}
        if algo.entropy_coef:
            per_token = per_token - algo.entropy_coef * entropy
        loss = per_token.double() * x["weight"]
        if algo.positive_coef:
            likelihood = positive_nll(logp, mask, x["good"]).double()
            loss = loss + algo.positive_coef * likelihood / max(1.0, shared["good_tokens"])
        return loss, stats

    def weights(self, trainer_T, rollout_T, mask_T, seq_T) -> torch.Tensor | None:
        """Importance weights of engine against trainer, [T]; None where none are asked for."""
        cfg = self.cfg.correction
        weights_T = None
        if self.correction != "none":
            weights_T = correction_weights_T(self.correction, trainer_T, rollout_T, mask_T, seq_T, cfg.low, cfg.high)
        if cfg.reject_low is not None or cfg.reject_high is not None:
            kept_B = reject_sequences(trainer_T, rollout_T, mask_T, seq_T, cfg.reject_low, cfg.reject_high)
            kept_T = kept_B[seq_T].to(trainer_T.dtype)
            weights_T = kept_T if weights_T is None else weights_T * kept_T
        return weights_T

    # ── the other models ─────────────────────────────────────────────────────

    def value_micro_loss(self, returns: str, values: str) -> Callable:
        """Loss of a critic on columns of the batch, as `Policy.update` takes it."""

        def micro_loss(micro: Batch, value: torch.Tensor, _: torch.Tensor, shared: dict) -> LossResult:
            token = {k: micro.token[k].to(value.device) for k in ("mask", returns, values)}
            mask, seq = token["mask"], micro.seq_index.to(value.device)
            old, target = token[values].to(value.dtype), token[returns].to(value.dtype)
            per_token, stats = value_loss(value, old, target, mask, self.cfg.critic.clip)
            weights_T = token_weights("token-mean", mask, seq, shared["totals"])
            loss = (per_token.double() * weights_T).sum()
            metrics = Metrics()
            metrics.add_sum("loss", loss)
            for name, x_T in stats.items():
                metrics.add(name, mean(x_T, mask), mask.sum())
            return LossResult(loss, metrics)

        return micro_loss

    def process_micro_loss(self, micro: Batch, logp: torch.Tensor, _: torch.Tensor, shared: dict) -> LossResult:
        """Loss of the implicit process reward model: does the whole response's reward tell its outcome?"""
        token = {k: micro.token[k].to(logp.device) for k in ("mask", "process_ref_logp")}
        mask, seq = token["mask"], micro.seq_index.to(logp.device)
        outcome_T = micro.per_token(micro.seq["reward"].clamp(0, 1)).to(logp.device)
        reference_T = token["process_ref_logp"].to(logp.dtype)
        per_token = implicit_reward_loss(logp, reference_T, mask, seq, outcome_T, self.cfg.process_reward.beta)
        loss = (per_token.double() * token_weights("seq-mean-token-mean", mask, seq, shared["totals"])).sum()
        metrics = Metrics()
        metrics.add_sum("loss", loss)
        return LossResult(loss, metrics)


MOMENTS = ("reward_count", "reward_mean", "reward_m2")
"""Names of the running moments of the reward in `Algorithm.state`."""
LOSS_COLUMNS = ("mask", "advantages", "rollout_logp", "old_logp", "ref_logp", "selected")
"""Token columns of a batch that a loss may look at."""
OLD_LOGP = {"policy": "old_logp", "rollout": "rollout_logp"}
"""Where `Algorithm.old_logp` is found, apart from the update's own pass."""
OPTIONAL = {"logp": "old_logp", "collision": "collision", "process": "process"}
"""Field of Samples -> token column that fills it where the batch has one."""


def mean(x_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Mean under the mask, nan where there is nothing (a metric of weight 0 then)."""
    return torch.where(mask_T, x_T, 0.0).sum() / mask_T.sum()


def add_mismatch(metrics: Metrics, logp_T, rollout_logp_T, mask_T, seq_T, young_T) -> None:
    """Measures how far the trainer's logp, where its update begins, is from the engine's on sampled tokens.

    `mismatch/*` of all of them. `logp_diff/*`, by which a run is stopped, of those in `young_T`: older weights are
    apart from the trainer's without anything being wrong.
    """
    for name, (value, weight) in mismatch(logp_T, rollout_logp_T, mask_T, seq_T).items():
        metrics.add(name, value, weight)
    value, weight, largest = disagreement(logp_T, rollout_logp_T, mask_T & young_T)
    metrics.add("logp_diff/mean", value, weight)
    metrics.add_max("logp_diff/max", largest)
