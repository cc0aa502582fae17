"""Derives a method's functions, the inputs of these functions and the values of `auto` from the method's settings.

The function tables need torch, so they are imported lazily, and `--help` works without torch.
"""

from typing import TYPE_CHECKING, Any

from spmdrl.config.classifier import scores_steps
from spmdrl.config.named import load_function

if TYPE_CHECKING:
    from spmdrl.algos.estimators import Advantage
    from spmdrl.algos.losses import Loss


def advantage_of(cfg: Any) -> "Advantage":
    """Return the `ADVANTAGES` entry for `--algo.advantage`, or a new `Advantage` for a function in a user's file.

    Raises ValueError as `load_function` does.
    """
    from spmdrl.algos.estimators import ADVANTAGES, own_advantage

    name = cfg.algo.advantage
    return ADVANTAGES[name] if name in ADVANTAGES else own_advantage(load_function(name, ADVANTAGES))


def loss_of(cfg: Any) -> "Loss":
    """Return the `LOSSES` entry for `--algo.loss`, or a new `Loss` for a function in a user's file.

    Raises ValueError as `load_function` does.
    """
    from spmdrl.algos.losses import LOSSES, own_loss

    name = cfg.algo.loss
    return LOSSES[name] if name in LOSSES else own_loss(load_function(name, LOSSES))


def advantage_alone(cfg: Any) -> bool:
    """Return True if a sequence with zero advantage contributes nothing to an update and can be skipped.

    This is False if the update has terms that are not multiplied by the advantage (KL, entropy, positive_coef, expert
    balancing), and for losses that might have such terms (`Loss.skips`), such as user-defined ones.
    """
    algo, policy = cfg.algo, cfg.policy
    more = algo.kl_coef or algo.entropy_coef or algo.positive_coef or policy.moe_aux_loss or policy.moe_bias_rate
    return loss_of(cfg).skips and not more


def aggregation(cfg: Any) -> str:
    """Return the loss aggregation: `--algo.aggregation` or, if it is empty, the aggregation in the loss's paper.

    A loss with one value per sequence always uses its paper's aggregation.
    """
    loss = loss_of(cfg)
    return loss.aggregation if loss.scope == "one per sequence" else cfg.algo.aggregation or loss.aggregation


def needs(cfg: Any) -> frozenset[str]:
    """Return the inputs that a step needs besides samples, such as `critic`.

    Raises ValueError if the advantage's `needs` is not a tuple of known fields, or if the advantage uses step scores
    and no model provides them.
    """
    from spmdrl.algos.estimators import ADVANTAGES

    algo, safety, advantage = cfg.algo, cfg.safety, advantage_of(cfg)
    fields = advantage.fields
    known = dict.fromkeys(name for row in ADVANTAGES.values() for name in row.fields)
    if isinstance(advantage.needs, str) or (unknown := [name for name in fields if name not in known]):
        given = repr(advantage.needs) if isinstance(advantage.needs, str) else ", ".join(map(repr, unknown))
        raise ValueError(f"{algo.advantage}: its `needs` must be a tuple of names from {', '.join(known)}, not {given}")
    steps = scores_steps(cfg.reward.model)
    if "ends" in fields and not steps:
        raise ValueError(
            f"--algo.advantage {algo.advantage}: needs the scores of steps, which a process reward model gives: name "
            "one by --reward.model rm.yaml with a path and steps (docs/rewards.md)"
        )
    wanted = {
        "reference": cfg.has_reference,
        "critic": "values" in fields,
        "cost": safety.cost or safety.cost_model,
        "cost_critic": (safety.cost or safety.cost_model) and "values" in fields,
        "process": "process" in fields and not steps,
        "scored steps": steps,
        "greedy": "baseline" in fields,
        "collision": "collision" in fields,
        "logp": "logp" in fields,
        "turns": not {"turn", "state", "parent"}.isdisjoint(fields),
    }
    return frozenset(name for name, value in wanted.items() if value)


def old_logp(cfg: Any) -> str:
    """Return how old_logp is obtained: from the update's forward pass (`update`), from a separate forward pass before
    the update (`policy`), or from the engine (`rollout`).

    Raises ValueError as `needs` does.
    """
    algo = cfg.algo
    if algo.old_logp != "auto":
        return algo.old_logp
    if cfg.filter.replay_steps:
        return "rollout"
    wanted = needs(cfg)
    in_reward = "reference" in wanted and algo.kl_in == "reward"
    before = in_reward or wanted & {"logp", "collision"} or loss_of(cfg).select
    return "policy" if algo.updates_per_step > 1 or before else "update"


def correction(cfg: Any) -> str:
    """Return `--correction.kind`; `auto` corrects only if samples can come from weights other than the trainer's."""
    if cfg.correction.kind != "auto":
        return cfg.correction.kind
    rollout = cfg.rollout
    other = rollout.staleness or rollout.partial_steps or rollout.quantization != "none"
    # If old_logp comes from the engine, the ratio in the loss already corrects the mismatch between engine and trainer.
    return "tis_token" if other and old_logp(cfg) != "rollout" else "none"
