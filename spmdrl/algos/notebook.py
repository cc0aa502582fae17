"""The functions of algos/ for padded tensors, [B, T] with a mask, as a notebook or another program holds them.

B: sequences, T: the padded length. Tensors, numpy arrays and lists are taken alike; values where the mask is 0 have no
influence, nan included.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from spmdrl.algos.aggregate import AGGREGATIONS, count_totals, token_weights
from spmdrl.algos.correction import CORRECTIONS, correction_weights_T
from spmdrl.algos.estimators import ADVANTAGES
from spmdrl.algos.kl import KL_KINDS, kl_estimate
from spmdrl.algos.loss_inputs import LossInputs
from spmdrl.algos.losses import LOSSES, Loss
from spmdrl.algos.rows import find, nearest, settings_of
from spmdrl.algos.samples import Samples, last_sampled
from spmdrl.algos.selection import Selecting

# ── padded and packed ────────────────────────────────────────────────────────


def pack(mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A padded batch as a packed one that keeps every position: x_BT.flatten() is x_T, and x_T.view(B, T) goes back.

    Args:
        mask: [B, T] of True / False or 1 / 0.

    Returns:
        mask_T: bool, and seq_T: int64, both [B * T] on the host.
    """
    mask_BT = as_tensor("mask", mask).cpu()
    if mask_BT.ndim != 2:
        raise ValueError(f"mask must be [B, T], got {tuple(mask_BT.shape)}")
    if bool(((mask_BT != 0) & (mask_BT != 1)).any()):
        raise ValueError("mask must hold 0 and 1 only: True where the policy sampled")
    rows, width = mask_BT.shape
    return mask_BT.bool().flatten(), torch.arange(rows).repeat_interleave(width)


def as_tensor(name: str, value: Any, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A detached tensor of a tensor, array or list of numbers; a list of floats gives fp64, as Python's floats are.

    Raises:
        ValueError: no numbers, or not of that shape.
    """
    try:
        x = torch.as_tensor(value).detach()
        if x.is_floating_point() and not hasattr(value, "dtype"):
            x = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f"{name} must be a tensor, an array or a list of numbers: {e}") from e
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}")
    return x


# ── advantages ───────────────────────────────────────────────────────────────

_PER_TOKEN = ("values", "logp", "collision", "process", "ends", "turn", "state", "parent")


def compute_advantages(
    name: str, *, rewards: Any, mask: Any, group: Any = None, **inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of a batch by the estimator `name`, a key of ADVANTAGES.

    Args:
        name: such as "grpo" or "gae".
        rewards: [B, T] for each token, or [B] outcomes, which are placed on the last sampled token.
        mask: [B, T], True or 1 where the policy sampled.
        group: [B], the prompt of each row, as numbers or strings; estimators that compare samples need it.
        inputs: values, logp, collision, process, ends, turn, state, parent [B, T]; baseline [B] or one number; parts, a
            dict of name -> [B] or [B, T] (see Samples for what each is); and keyword settings of the estimator, such as
            gamma. Inputs that the estimator does not use are ignored. `baseline` of "reinforce" is its setting.

    Returns:
        advantages [B, T] and returns [B, T], 0 where the mask is 0, on the device and in the dtype of `rewards`
        (float64 for integers and bools). The computation is in float64.

    Raises:
        ValueError: an unknown name or setting, a missing input, shapes that do not fit, rewards that are not finite.
    """
    estimator = find(name, ADVANTAGES, "advantage estimator")
    rewards, (mask_T, seq_T), shape = as_tensor("rewards", rewards), pack(mask), tuple(as_tensor("mask", mask).shape)
    known = settings_of(estimator.function)
    settings = {k: v for k, v in inputs.items() if k in known}
    given = {k: v for k, v in inputs.items() if k not in known and v is not None}
    if unknown := sorted(given.keys() - {*_PER_TOKEN, "baseline", "parts"}):
        raise ValueError(
            f"{name} takes no {unknown[0]!r}{nearest(unknown[0], [*known, *_PER_TOKEN])}; its settings are "
            f"{', '.join(known) or 'none'}, inputs are {', '.join(_PER_TOKEN)}, baseline, parts"
        )
    if group is None and estimator.compares:
        raise ValueError(f"{name} compares samples of one prompt: pass group, a number or string for each row")
    fields: dict[str, Any] = {k: as_tensor(k, v, shape).cpu().flatten() for k, v in given.items() if k in _PER_TOKEN}
    if "baseline" in given:
        baseline = as_tensor("baseline", given["baseline"]).cpu()
        fields["baseline"] = as_tensor("baseline", baseline if baseline.ndim else baseline.expand(shape[0]), shape[:1])
    samples = Samples(
        rewards=_at_tokens("rewards", rewards, mask_T, seq_T, shape),
        mask=mask_T,
        seq=seq_T,
        group=_number(group, shape[0]),
        parts=_parts(given.get("parts", {}), mask_T, seq_T, shape),
        **fields,
    )
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float64
    both = (x_T.view(shape).to(rewards.device, dtype, copy=True) for x_T in estimator.function(samples, **settings))
    advantages, returns = both
    return advantages, returns


def _at_tokens(
    name: str, value: Any, mask_T: torch.Tensor, seq_T: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    """Rewards [B, T], or [B] on the last sampled token of each row: fp64 [B * T], 0 where the mask is False."""
    x = as_tensor(name, value).cpu().double()
    if tuple(x.shape) == shape:
        return torch.where(mask_T, x.flatten(), 0.0)
    if tuple(x.shape) != shape[:1]:
        raise ValueError(f"{name} must be {shape} like the mask, or {shape[:1]} outcomes; got {tuple(x.shape)}")
    last_B = last_sampled(mask_T, seq_T, shape[0])
    x_T = torch.zeros(len(mask_T), dtype=torch.float64)
    x_T[last_B[last_B >= 0]] = x[last_B >= 0]
    return x_T


def _parts(parts: Any, mask_T: torch.Tensor, seq_T: torch.Tensor, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Each part [B], where it is given for each token as the sum under the mask."""
    if not isinstance(parts, Mapping):
        raise ValueError(f"parts must be a dict of name -> [B] or [B, T], got {type(parts).__name__}")
    at_tokens = {k: _at_tokens(f"parts[{k!r}]", v, mask_T, seq_T, shape) for k, v in parts.items()}
    return {k: torch.zeros(shape[0], dtype=torch.float64).index_add_(0, seq_T, x) for k, x in at_tokens.items()}


def _number(group: Any, rows: int) -> torch.Tensor:
    """Groups as int64 [B], numbered in order of appearance."""
    items = [0] * rows if group is None else group.tolist() if hasattr(group, "tolist") else list(group)
    if len(items) != rows or any(isinstance(item, list) for item in items):
        raise ValueError(f"group must hold one number or string for each of the {rows} rows, got {len(items)}")
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(item, len(numbers)) for item in items], dtype=torch.int64)


# ── losses, KL, rollout correction ───────────────────────────────────────────

_LOSS_TENSORS = ("weights", "ref_logp", "rollout_logp", "entropy", "selected", "draw")


def compute_loss(
    name: str,
    *,
    logp: torch.Tensor,
    old_logp: Any,
    advantages: Any,
    mask: Any,
    aggregation: str | None = None,
    horizon: float | None = None,
    **settings: Any,
) -> torch.Tensor:
    """The policy loss `name`, a key of LOSSES, of a whole batch as one number, differentiable in `logp`.

    Args:
        name: such as "ppo" or "gspo".
        logp: [B, T] of the current policy, nats; the only tensor that must be one, for its gradient.
        old_logp: [B, T] of the policy at the start of the step.
        advantages: [B, T].
        mask: [B, T], True or 1 where the policy sampled. Rows without any count nowhere.
        aggregation: one of AGGREGATIONS; None for what the loss's paper does. Without effect on losses with
            one number per sequence, which are means over sequences.
        horizon: tokens by which `seq-mean-token-sum-norm` divides; None for T.
        settings: keyword settings of the loss, such as clip_low; and tensors [B, T]: weights, ref_logp, rollout_logp,
            entropy (see LossInputs). For kl_cov and clip_cov the tokens to hold back are chosen over this batch;
            `selected` gives them instead, `draw` the random numbers in [0, 1) that clip_cov chooses by (the same for
            every call where it is not given).

    Returns:
        0-d, in the dtype and on the device of `logp`.

    Raises:
        ValueError: an unknown name or setting, a setting out of range, shapes that do not fit.
    """
    loss = find(name, LOSSES, "loss")
    known = settings_of(loss.function)
    for key in settings.keys() - {*known, *_LOSS_TENSORS}:
        raise ValueError(
            f"{name} takes no {key!r}{nearest(key, [*known, *_LOSS_TENSORS])}; its settings are "
            f"{', '.join(known) or 'none'}, tensors are {', '.join(_LOSS_TENSORS)}"
        )
    aggregation = _aggregation_of(loss, aggregation)
    if not isinstance(logp, torch.Tensor) or not logp.is_floating_point():
        raise ValueError(f"logp must be a tensor of floats, got {getattr(logp, 'dtype', type(logp).__name__)}")

    (mask_T, seq_T), shape = pack(mask), tuple(as_tensor("mask", mask).shape)
    as_tensor("logp", logp, shape)
    # A ratio of 1 + 4e-4 is no bfloat16 number: half precision is computed in float32.
    given_dtype, logp = logp.dtype, logp if logp.dtype in (torch.float32, torch.float64) else logp.float()
    given = {k: v for k, v in settings.items() if k in _LOSS_TENSORS and v is not None}
    settings = {k: v for k, v in settings.items() if k in known}
    tensors = _loss_tensors(logp, {"old_logp": old_logp, "advantages": advantages, **given}, shape)
    if tensors.pop("draw", None) is not None:
        given["draw"] = as_tensor("draw", given["draw"]).flatten()
    if "selected" in tensors:
        tensors["selected"] = (tensors["selected"] != 0) & mask_T.to(logp.device)
    elif loss.select:
        tensors["selected"] = _select(loss.select, logp, tensors, mask_T, seq_T, shape[0], given.get("draw"), settings)

    mask_T, seq_T = mask_T.to(logp.device), seq_T.to(logp.device)
    loss_T, _ = loss.function(LossInputs(logp=logp.flatten(), mask=mask_T, seq=seq_T, **tensors), **settings)
    weights_T = token_weights(
        aggregation, mask_T, seq_T, count_totals(mask_T, seq_T), shape[1] if horizon is None else horizon
    )
    return (loss_T.double() * weights_T).sum().to(given_dtype)


def _aggregation_of(loss: Loss, aggregation: str | None) -> str:
    """The aggregation asked for, or that of the loss where it has no other or none is asked for."""
    find(aggregation or loss.aggregation, dict.fromkeys(AGGREGATIONS), "aggregation")
    return loss.aggregation if loss.scope == "one per sequence" or aggregation is None else aggregation


def _loss_tensors(logp: torch.Tensor, given: dict[str, Any], shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Inputs [B, T] of a loss as [B * T], in the dtype and on the device of logp."""
    tensors = {k: as_tensor(k, v, shape).flatten().to(logp.device, logp.dtype) for k, v in given.items()}
    if isinstance(given.get("entropy"), torch.Tensor):
        tensors["entropy"] = given["entropy"].flatten()  # may carry a gradient
    return tensors


def _select(
    select: Callable[..., torch.Tensor],
    logp: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    mask_T: torch.Tensor,
    seq_T: torch.Tensor,
    sequences: int,
    draw_T: torch.Tensor | None,
    settings: dict[str, Any],
) -> torch.Tensor:
    """Tokens that a loss holds back: bool [B * T]. draw_T: None for numbers of a fixed seed."""
    if draw_T is None:
        draw_T = torch.rand(len(mask_T), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs = {"logp": logp.flatten(), "draw": draw_T, **tensors}
    host = {k: x.detach().cpu().double() for k, x in inputs.items()}
    selecting = Selecting(
        host["logp"], host["old_logp"], host["advantages"], mask_T, seq_T, sequences, draw=host["draw"]
    )
    return select(selecting, **settings).to(logp.device)


def compute_kl(kind: str, *, logp: torch.Tensor, ref_logp: Any) -> torch.Tensor:
    """KL(policy || reference) estimated at each token, in the shape of `logp` and differentiable in it.

    Args:
        kind: one of KL_KINDS, see `kl_estimate`.
        logp: of the sampled tokens under the policy, nats, any shape.
        ref_logp: the same under the reference.

    Raises:
        ValueError: an unknown kind, shapes that differ.
    """
    find(kind, dict.fromkeys(KL_KINDS), "KL estimate")
    logp = torch.as_tensor(logp)
    return kl_estimate(kind, logp, as_tensor("ref_logp", ref_logp, tuple(logp.shape)).to(logp))


def correction_weights(
    kind: str, *, old_logp: Any, rollout_logp: Any, mask: Any, low: float | None = None, high: float | None = None
) -> torch.Tensor:
    """Importance weights for tokens that the engine sampled from not quite the policy of `old_logp`: [B, T].

    Args:
        kind: a key of CORRECTIONS, see `correction_weights_T`.
        old_logp: [B, T] of the trainer's policy, nats.
        rollout_logp: [B, T] as reported by the engine.
        mask: [B, T], True or 1 where the policy sampled.
        low: smallest ratio that is kept; None for the kind's default.
        high: largest ratio that is kept, or at which it is cut; None for the kind's default.

    Returns:
        weights, 0 where the mask is 0, in the dtype and on the device of `old_logp`; no gradient.

    Raises:
        ValueError: an unknown kind, bounds that make no sense, shapes that do not fit.
    """
    find(kind, CORRECTIONS, "rollout correction")
    (mask_T, seq_T), shape = pack(mask), tuple(as_tensor("mask", mask).shape)
    old, rollout = as_tensor("old_logp", old_logp, shape), as_tensor("rollout_logp", rollout_logp, shape)
    old = old if old.is_floating_point() else old.double()
    rows = (old.flatten(), rollout.flatten().to(old), mask_T.to(old.device), seq_T.to(old.device))
    return correction_weights_T(kind, *rows, low, high).view(shape)
