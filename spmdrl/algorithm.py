"""One algorithm of a run: the functions of `algos/` put together for packed batches on many ranks.

Everything that selects or normalises over samples is computed from columns that all ranks gather, in sample order, so
every rank holds the same numbers whatever the layout (law 2). A micro-batch only ever sums.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from spmdrl.algos import ADVANTAGES, LOSSES, PRESETS, LossInputs, Totals, count_totals, kl_estimate, token_weights
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch, gather_seq
from spmdrl.policy.contract import LossResult, Policy
from spmdrl.spmd.exchange import all_reduce
from spmdrl.tracking.metrics import Metrics


@dataclass(frozen=True)
class Algorithm:
    """Advantage estimator + per-token loss + aggregation + KL + entropy, with their settings."""

    advantage: Callable
    loss: Callable
    settings: dict
    """Keyword arguments of the loss."""
    aggregation: str
    horizon: float
    """Normaliser of `seq-mean-token-sum-norm`: the longest response."""
    kl_coef: float
    kl_in: str
    kl_estimator: str
    entropy_coef: float
    old_logp: str
    """`update`: the update's own first pass; `policy`: a pass before; `rollout`: the engine's."""
    skip_zero_advantage: bool

    needs_reference: bool
    """KL to a frozen reference is computed; with kl_coef 0 it only stands in the metrics."""

    # ── before the update ────────────────────────────────────────────────────

    def advantages(self, batch: Batch, group: dist.ProcessGroup | None, device: torch.device) -> Batch:
        """The batch with `token["advantages"]`; group statistics over all ranks. Collective."""
        if self.kl_in == "reward" and self.kl_coef:
            kl_T = kl_estimate(self.kl_estimator, batch.token["old_logp"], batch.token["ref_logp"], batch.token["mask"])
            batch.seq["shaped"] = batch.seq["reward"] - self.kl_coef * batch.sum_tokens(kl_T)
        else:
            batch.seq["shaped"] = batch.seq["reward"]
        columns, mine = gather_seq(batch, ("shaped", "position"), group, device)
        everyone_N = self.advantage(columns["shaped"], columns["position"].long())
        batch.seq["advantage"] = everyone_N[mine]
        batch.token["advantages"] = batch.per_token(batch.seq["advantage"])
        return batch

    def prepare(self, share: Batch, group: dist.ProcessGroup | None, device: torch.device) -> dict:
        """What the loss needs of a whole optimizer step, over all ranks: global denominators. Collective.

        share: this rank's sequences of the step. Returns `totals` and, where sequences without advantage are left
        out of the forward, `active` bool [B].
        """
        local = count_totals(share.token["mask"], share.seq_index)
        both = torch.tensor([local.tokens, local.sequences], dtype=torch.float64, device=device)
        tokens, sequences = all_reduce(both, "sum", group).tolist()
        active = share.seq["advantage"] != 0 if self.skip_zero_advantage else None
        return {"totals": Totals(tokens, sequences), "active": active}

    # ── one micro-batch ──────────────────────────────────────────────────────

    def micro_loss(self, micro: Batch, logp: torch.Tensor, entropy: torch.Tensor, shared: dict) -> LossResult:
        """Loss and log sums of one micro-batch; logp and entropy [T] with gradient. No communication."""
        device = logp.device
        token = {k: v.to(device) for k, v in micro.token.items()}
        mask, seq = token["mask"], micro.seq_index.to(device)
        old_logp = {"update": logp.detach(), "policy": token.get("old_logp"), "rollout": token["rollout_logp"]}[
            self.old_logp
        ]
        inputs = LossInputs(
            logp=logp,
            old_logp=old_logp.to(logp.dtype),
            advantages=token["advantages"].to(logp.dtype),
            mask=mask,
            seq=seq,
            entropy=entropy,
            ref_logp=token.get("ref_logp"),
            rollout_logp=token["rollout_logp"],
        )
        per_token, stats = self.loss(inputs, **self.settings)
        metrics = Metrics()
        weight = mask.sum()
        if per_token.shape != mask.shape or any(v.shape != mask.shape for v in stats.values()):
            raise ValueError(
                f"the loss must return [T] tensors ({len(mask)} tokens here), see algos/losses.py; "
                f"it returned {tuple(per_token.shape)}, { ({k: tuple(v.shape) for k, v in stats.items()}) }"
            )
        if self.needs_reference and self.kl_in == "loss":
            kl_T = kl_estimate(self.kl_estimator, logp, token["ref_logp"].to(logp.dtype), mask)
            if self.kl_coef:
                per_token = per_token + self.kl_coef * kl_T
            metrics.add("kl/mean", _mean(kl_T.detach(), mask), weight)
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * entropy
        weights_T = token_weights(self.aggregation, mask, seq, shared["totals"], self.horizon)
        loss = (per_token.double() * weights_T).sum()
        metrics.add_sum("loss", loss)
        metrics.add("entropy/mean", _mean(entropy.detach(), mask), weight)
        for name, value in stats.items():
            metrics.add(name, _mean(value, mask), weight)
        if self.old_logp != "policy":
            add_logp_diff(metrics, logp.detach(), token["rollout_logp"], mask)
        return LossResult(loss, metrics)


def _mean(x_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    return torch.where(mask_T, x_T, 0.0).sum() / mask_T.sum()


def add_logp_diff(metrics: Metrics, logp_T: torch.Tensor, rollout_logp_T: torch.Tensor, mask_T: torch.Tensor) -> None:
    """|logp of the trainer - logp of the engine| on sampled tokens: mean and max over the step."""
    diff = torch.where(mask_T, (logp_T - rollout_logp_T.to(logp_T.dtype)).abs(), 0.0)
    metrics.add("logp_diff/mean", _mean(diff, mask_T), mask_T.sum())
    metrics.add_max("logp_diff/max", diff.max() if len(diff) else 0.0)


def score(batch: Batch, policy: Policy, reference: Policy | None, algo: Algorithm, temperature: float) -> Metrics:
    """Add what has to be known before the update: old_logp and ref_logp, where the algorithm uses them. Collective."""
    metrics = Metrics()
    if algo.old_logp == "policy":
        batch.token["old_logp"], _ = policy.logprobs(batch, temperature)
        add_logp_diff(metrics, batch.token["old_logp"], batch.token["rollout_logp"], batch.token["mask"])
    elif algo.needs_reference and algo.kl_in == "reward":
        batch.token["old_logp"] = batch.token["rollout_logp"]
    if algo.needs_reference:
        assert reference is not None, "compose() says that a reference is needed, so the run built one"
        batch.token["ref_logp"], _ = reference.logprobs(batch, temperature)
        if algo.kl_in == "reward":
            kl_T = kl_estimate(algo.kl_estimator, batch.token["old_logp"], batch.token["ref_logp"], batch.token["mask"])
            metrics.add("kl/mean", _mean(kl_T, batch.token["mask"]), batch.token["mask"].sum())
    return metrics


def share_out(batch: Batch, updates: int, prompts: int, order: list[int]) -> Batch:
    """Say which optimizer step uses each sequence: whole groups, an equal number of prompts each, in `order`.

    order: permutation of the positions 0 .. prompts - 1, keyed by (seed, step), the same on every rank.
    """
    step_of = torch.zeros(prompts, dtype=torch.int64)
    step_of[torch.tensor(order)] = torch.arange(prompts) * updates // prompts
    batch.seq["update"] = step_of[batch.seq["position"]]
    return batch


def load_function(spec: str, table: dict[str, Callable]) -> Callable:
    """A function by name, or the user's own by `path/to/file.py:function`.

    Raises:
        ValueError: no such name, file or function.
    """
    if spec in table:
        return table[spec]
    path, _, name = spec.partition(":")
    if not path.endswith(".py") or not name:
        raise ValueError(f"{spec!r} is none of {', '.join(table)}, nor path/to/file.py:function")
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist (from {spec!r})")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert module_spec and module_spec.loader, path
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name} (from {spec!r})")
    return getattr(module, name)


def compose(cfg: Config) -> Algorithm:
    """The algorithm of a run: a preset's values, overridden by those the user set.

    Raises:
        ValueError: unknown names.
    """
    algo, preset = cfg.algo, PRESETS[cfg.algo.preset]
    loss_name = algo.loss or preset.loss
    settings = {}
    if loss_name == "ppo_clip":
        pick = {name: getattr(algo, name) for name in ("clip_low", "clip_high", "dual_clip")}
        settings = {k: v if v is not None else getattr(preset, k) for k, v in pick.items()}
    reference = cfg.reference.enabled == "on" or (cfg.reference.enabled == "auto" and algo.kl_coef != 0)
    old_logp = algo.old_logp
    if old_logp == "auto":
        needs_pass = algo.updates_per_step > 1 or (reference and algo.kl_in == "reward")
        old_logp = "policy" if needs_pass else "update"
    # A user's own loss may have terms that no advantage multiplies.
    pure = loss_name in LOSSES and not algo.kl_coef and not algo.entropy_coef
    return Algorithm(
        load_function(algo.advantage or preset.advantage, ADVANTAGES),
        load_function(loss_name, LOSSES),
        settings,
        algo.aggregation or preset.aggregation,
        float(cfg.rollout.max_new_tokens),
        algo.kl_coef,
        algo.kl_in,
        algo.kl_estimator,
        algo.entropy_coef,
        old_logp,
        algo.skip_zero_advantage and pure,
        reference,
    )
