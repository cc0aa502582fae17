"""Table of all advantage estimators, and a function that computes the advantages of a padded batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from spmdrl.algos import advantages, credit, turns
from spmdrl.algos.aggregate import sum_per_sequence
from spmdrl.algos.rows import as_tensor, find, nearest, settings_of, unpad
from spmdrl.algos.samples import Result, Samples, at_last_sampled

PER_TOKEN = tuple(f.name for f in fields(Samples) if f.default is None and f.metadata["shape"] == "T")
"""Names of the optional per-token fields of `Samples`."""


@dataclass(frozen=True)
class Advantage:
    """An advantage estimator: its function, and the inputs that the function uses.

    The keyword-only parameters of the function are its settings. Its docstring names the paper (`rows.paper_of`).
    """

    function: Callable[..., Result]
    needs: tuple[str, ...] = ()
    """Names of the `Samples` fields that the estimator requires."""
    reads: tuple[str, ...] = ()
    """Names of `Samples` fields that the estimator uses if they are given."""
    compares: bool = True
    """Whether the estimator compares the samples of a group. If not, `group` is ignored."""
    gradient: Literal["exact", "scaled", "biased"] = "biased"
    """How the expected policy gradient relates to the true gradient (docs/credit.md). `exact`: the two are equal.
    `scaled`: the two differ only by the factor 1 - 1/n, because the baseline of n samples includes the sample itself.
    `biased`: their directions differ, too."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the names of the `Samples` fields that the estimator uses in addition to rewards and groups."""
        return (*self.needs, *self.reads)


def own_advantage(function: Callable[..., Result]) -> Advantage:
    """Wrap a user-defined function in an `Advantage`. The function may have an attribute `needs`: a tuple with the
    names of the `Samples` fields that it requires.
    """
    return Advantage(function, needs=getattr(function, "needs", ()), compares=False)


ADVANTAGES: dict[str, Advantage] = {
    "gae": Advantage(credit.gae, needs=("values",), compares=False, gradient="exact"),
    "grpo": Advantage(advantages.grpo),
    "dr_grpo": Advantage(advantages.dr_grpo, gradient="scaled"),
    "rloo": Advantage(advantages.rloo, gradient="exact"),
    "reinforce": Advantage(advantages.reinforce, compares=False, gradient="scaled"),
    "remax": Advantage(credit.remax, needs=("baseline",), compares=False, gradient="exact"),
    "reinforce_plus_plus": Advantage(credit.reinforce_plus_plus, compares=False),
    "reinforce_plus_plus_baseline": Advantage(advantages.reinforce_plus_plus_baseline),
    "opo": Advantage(advantages.opo),
    "gpg": Advantage(advantages.gpg),
    "grpo_pass_k": Advantage(advantages.grpo_pass_k),
    "gdpo": Advantage(advantages.gdpo, reads=("parts",)),
    "optimal_token_baseline": Advantage(credit.optimal_token_baseline, needs=("logp", "collision")),
    "gigpo": Advantage(turns.gigpo, reads=("turn", "state", "parent")),
    "win_rate": Advantage(advantages.win_rate),
    "per_token": Advantage(credit.per_token, compares=False, gradient="exact"),
    "prime": Advantage(credit.prime, needs=("process",)),
    "grpo_process": Advantage(credit.grpo_process, needs=("process", "ends")),
    "turn_rloo": Advantage(turns.turn_rloo, reads=("turn", "parent"), gradient="exact"),
    "turn_gae": Advantage(
        turns.turn_gae, needs=("values",), reads=("turn", "parent"), compares=False, gradient="exact"
    ),
}


def compute_advantages(
    name: str, *, rewards: Any, mask: Any, group: Any = None, **inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute advantages and returns of a padded batch with the estimator `name` (a key of ADVANTAGES).

    Args:
        name: estimator name, such as "grpo" or "gae".
        rewards: per-token rewards [B, T], or outcome rewards [B], which are placed on the last sampled token.
        mask: [B, T], True or 1 where the policy sampled.
        group: [B], a number or string per row that identifies its prompt; required by estimators that compare samples.
        inputs: keyword settings of the estimator, such as gamma, and fields of `Samples`. Fields are [B, T], except
            `baseline` ([B] or a scalar) and `parts` (a dict of name -> [B] or [B, T]). Fields that the estimator does
            not use are ignored. For "reinforce", `baseline` is a setting and not a field.

    Returns:
        advantages [B, T] and returns [B, T], 0 where the mask is 0, on the device and in the dtype of `rewards`
        (float64 if `rewards` are integers or bools). The computation is in float64.

    Raises:
        ValueError: an unknown name or setting, a missing input, mismatched shapes, or rewards that are not finite.
    """
    estimator = find(name, ADVANTAGES, "advantage estimator")
    rewards, (mask_T, seq_T, shape) = as_tensor("rewards", rewards), unpad(mask)
    known = settings_of(estimator.function)
    settings = {k: v for k, v in inputs.items() if k in known}
    given = {k: v for k, v in inputs.items() if k not in known and v is not None}
    if unknown := sorted(given.keys() - {*PER_TOKEN, "baseline", "parts"}):
        raise ValueError(
            f"{name} takes no {unknown[0]!r}{nearest(unknown[0], [*known, *PER_TOKEN])}; its settings: "
            f"{', '.join(known) or 'none'}; inputs: {', '.join(PER_TOKEN)}, baseline, parts"
        )
    if group is None and estimator.compares:
        raise ValueError(f"{name} compares samples of one prompt: pass group, a number or string for each row")
    columns: dict[str, Any] = {k: as_tensor(k, v, shape).cpu().flatten() for k, v in given.items() if k in PER_TOKEN}
    if "baseline" in given:
        baseline = as_tensor("baseline", given["baseline"]).cpu()
        columns["baseline"] = as_tensor("baseline", baseline if baseline.ndim else baseline.expand(shape[0]), shape[:1])
    parts = given.get("parts", {})
    if not isinstance(parts, Mapping):
        raise ValueError(f"parts must be a dict of name -> [B] or [B, T], got {type(parts).__name__}")
    at_tokens = {k: _at_tokens(f"parts[{k!r}]", v, mask_T, seq_T, shape) for k, v in parts.items()}
    samples = Samples(
        rewards=_at_tokens("rewards", rewards, mask_T, seq_T, shape),
        mask=mask_T,
        seq=seq_T,
        group=_numbered(group, shape[0]),
        parts={k: sum_per_sequence(x_T, seq_T, shape[0]) for k, x_T in at_tokens.items()},
        **columns,
    )
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float64
    both = estimator.function(samples, **settings)
    advantages, returns = (x_T.view(shape).to(rewards.device, dtype, copy=True) for x_T in both)
    return advantages, returns


def _at_tokens(
    name: str, value: Any, mask_T: torch.Tensor, seq_T: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """Return rewards as fp64 [B * T], 0 where the mask is 0. Outcome rewards (a `value` of shape [B]) are placed on the
    last sampled token of each row.
    """
    x = as_tensor(name, value).cpu().double()
    if tuple(x.shape) == shape:
        return torch.where(mask_T, x.flatten(), 0.0)
    if tuple(x.shape) != shape[:1]:
        raise ValueError(f"{name} must be {shape} like the mask, or {shape[:1]} outcomes; got {tuple(x.shape)}")
    return at_last_sampled(x, mask_T, seq_T)


def _numbered(group: Any, rows: int) -> torch.Tensor:
    """Return groups as int64 [B], numbered in order of first appearance. If `group` is None, there is one group."""
    items = [0] * rows if group is None else group.tolist() if hasattr(group, "tolist") else list(group)
    if len(items) != rows or any(isinstance(item, list) for item in items):
        raise ValueError(f"group must be [{rows}], one number or string for each row, got {len(items)} entries")
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(item, len(numbers)) for item in items], dtype=torch.int64)
