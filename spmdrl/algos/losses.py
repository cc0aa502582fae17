"""Table of all policy losses, and a function that computes the scalar loss of a padded batch.

The losses are implemented in `token_losses.py`, `sequence_losses.py` and `covariance_losses.py`. See the docstring of
`token_losses.py` for their inputs and outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from spmdrl.algos.aggregate import AGGREGATIONS, count_totals, token_weights
from spmdrl.algos.covariance_losses import Selecting, clip_cov, kl_cov, select_clip_cov, select_kl_cov
from spmdrl.algos.loss_inputs import LossInputs, LossResult
from spmdrl.algos.rows import as_tensor, find, nearest, settings_of, unpad
from spmdrl.algos.sequence_losses import gmpo, gspo, gspo_token, sppo
from spmdrl.algos.token_losses import cispo, dppo_kl, dppo_tv, dro, gpg, ppo, reinforce, sapo


@dataclass(frozen=True)
class Loss:
    """A policy loss: the function that computes it, and the properties that a run needs to use the function.

    The keyword-only parameters of the function are its settings. Its docstring names the paper (`rows.paper_of`).
    """

    function: Callable[..., LossResult]
    aggregation: str = "token-mean"
    """Aggregation used by the paper or its authors. A run uses it by default."""
    scope: Literal["token", "sequence", "one per sequence"] = "token"
    """Which logp values the loss of a token depends on. `token`: only the token's own. `sequence`: those of the whole
    sequence. `one per sequence`: those of the whole sequence, where all tokens of a sequence have the same loss. With
    `one per sequence`, only a mean over sequences makes sense, so a run always uses `aggregation`. (With `gspo`, the
    losses within a sequence are equal only if its advantages are.)"""
    select: Callable[..., torch.Tensor] | None = None
    """Function that selects tokens from the whole batch before the loss is computed, for `LossInputs.selected`. The
    function takes the same settings as the loss. None if the loss needs no selection."""
    has_ratio: bool = True
    """Whether the loss compares logp with old_logp, by their ratio or their difference."""
    skips: bool = True
    """Whether a sequence with advantage 0 has loss 0, so that the forward pass can skip it."""


def own_loss(function: Callable[..., LossResult]) -> Loss:
    """Wrap a user-defined function in a `Loss`.

    The scope is `token` if the function's attribute `token_separable` is True, or if the function is a built-in loss
    with that scope. In all other cases, the scope is `sequence`.
    """
    built_in = any(loss.function is function and loss.scope == "token" for loss in LOSSES.values())
    separable = built_in or getattr(function, "token_separable", False)
    return Loss(function, scope="token" if separable else "sequence", skips=False)


LOSSES: dict[str, Loss] = {
    "ppo": Loss(ppo),
    "gspo": Loss(gspo, "seq-mean-token-mean", "one per sequence", skips=False),
    "gspo_token": Loss(gspo_token, "seq-mean-token-mean", "sequence"),
    "cispo": Loss(cispo),
    "sapo": Loss(sapo, "seq-mean-token-mean"),
    "gmpo": Loss(gmpo, "seq-mean-token-mean", "one per sequence", skips=False),
    "kl_cov": Loss(kl_cov, select=select_kl_cov, skips=False),
    "clip_cov": Loss(clip_cov, select=select_clip_cov, skips=False),
    # The authors of DPPO recommend Dr. GRPO's aggregation with it.
    "dppo_tv": Loss(dppo_tv, "seq-mean-token-sum-norm"),
    "dppo_kl": Loss(dppo_kl, "seq-mean-token-sum-norm"),
    # The papers of dro and reinforce use log p of a response, which is a sum over its tokens.
    "dro": Loss(dro, "seq-mean-token-sum", skips=False),
    "sppo": Loss(sppo, "seq-mean-token-mean", "one per sequence", skips=False),
    "gpg": Loss(gpg, has_ratio=False),
    "reinforce": Loss(reinforce, "seq-mean-token-sum", has_ratio=False),
}


INPUTS = tuple(field.name for field in fields(LossInputs) if field.default is None and field.name != "sequences")
"""Names of the optional inputs to a loss."""


def compute_loss(
    name: str,
    *,
    logp: torch.Tensor,
    old_logp: Any,
    advantages: Any,
    mask: Any,
    aggregation: str | None = None,
    horizon: float | None = None,
    draw: Any = None,
    **settings: Any,
) -> torch.Tensor:
    """Compute the policy loss `name` (a key of LOSSES) for a padded batch, as a scalar that is differentiable in
    `logp`.

    Args:
        name: loss name, such as "ppo" or "gspo".
        logp: [B, T], log-probabilities under the current policy, in nats. Must be a tensor, unlike the other inputs,
            because the result is differentiable with respect to `logp`.
        old_logp: [B, T], log-probabilities under the policy at the start of the step.
        advantages: [B, T].
        mask: [B, T], True or 1 where the policy sampled. Rows without a sampled token do not count.
        aggregation: one of AGGREGATIONS, or None for the aggregation that the loss's paper uses. Ignored by losses with
            one value per sequence, which are always averaged over sequences.
        horizon: number of tokens that `seq-mean-token-sum-norm` divides by, or None for T.
        draw: [B, T], uniform random numbers in [0, 1) that clip_cov uses to select tokens, or None to draw them with a
            fixed seed.
        settings: keyword settings of the loss, such as clip_low, and inputs [B, T]: weights, ref_logp, rollout_logp,
            entropy, selected (see LossInputs). If `selected` is not given, kl_cov and clip_cov select tokens from this
            batch.

    Returns:
        the loss, a 0-d tensor in the dtype and on the device of `logp`.

    Raises:
        ValueError: an unknown name or setting, a setting out of range, or mismatched shapes.
    """
    loss = find(name, LOSSES, "loss")
    known = settings_of(loss.function)
    for key in settings.keys() - {*known, *INPUTS}:
        raise ValueError(
            f"{name} takes no {key!r}{nearest(key, [*known, *INPUTS, 'draw'])}; its settings: "
            f"{', '.join(known) or 'none'}; tensors: {', '.join(INPUTS)}, draw"
        )
    find(aggregation or loss.aggregation, dict.fromkeys(AGGREGATIONS), "aggregation")
    if aggregation is None or loss.scope == "one per sequence":
        aggregation = loss.aggregation
    if not isinstance(logp, torch.Tensor) or not logp.is_floating_point():
        raise ValueError(f"logp must be a tensor of floats, got {getattr(logp, 'dtype', type(logp).__name__)}")
    mask_T, seq_T, shape = unpad(mask)
    as_tensor("logp", logp, shape)
    # bfloat16 cannot represent a ratio of 1 + 4e-4, so the loss of half-precision inputs is computed in float32.
    logp_T = (logp if logp.dtype in (torch.float32, torch.float64) else logp.float()).flatten()
    given = {"old_logp": old_logp, "advantages": advantages} | {k: settings.pop(k, None) for k in INPUTS}
    columns: dict[str, Any] = {
        k: as_tensor(k, v, shape).flatten().to(logp_T) for k, v in given.items() if v is not None
    }
    if isinstance(given["entropy"], torch.Tensor):
        columns["entropy"] = given["entropy"].flatten()  # unlike the other columns, it keeps its gradient
    mask_T, seq_T = mask_T.to(logp.device), seq_T.to(logp.device)
    x = LossInputs(logp=logp_T, mask=mask_T, seq=seq_T, sequences=shape[0], **columns)
    if x.selected is not None:
        x = replace(x, selected=(x.selected != 0) & mask_T)
    elif loss.select:
        x = replace(x, selected=_select(loss.select, x, shape, draw, settings))
    loss_T, _ = loss.function(x, **settings)
    totals = count_totals(mask_T, seq_T)
    weights_T = token_weights(aggregation, mask_T, seq_T, totals, shape[1] if horizon is None else horizon)
    return (loss_T.double() * weights_T).sum().to(logp.dtype)


def _select(
    select: Callable[..., torch.Tensor], x: LossInputs, shape: tuple[int, int], draw: Any, settings: dict[str, Any]
) -> torch.Tensor:
    """Return the tokens that `select` chooses from this batch, bool [T]."""
    if draw is None:
        draw_T = torch.rand(len(x.mask), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    else:
        draw_T = as_tensor("draw", draw, shape).flatten().cpu().double()
    logp_T, old_T, advantages_T = (column_T.detach().cpu().double() for column_T in (x.logp, x.old_logp, x.advantages))
    selecting = Selecting(logp_T, old_T, advantages_T, x.mask.cpu(), x.seq.cpu(), shape[0], draw=draw_T)
    return select(selecting, **settings).to(x.logp.device)
