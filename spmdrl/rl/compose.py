"""Creates a run's `Algorithm`: looks up its functions by name or in a user's file, and binds their settings."""

from collections.abc import Callable
from typing import Any

from spmdrl.config.composition import advantage_alone, advantage_of, aggregation, correction, loss_of, needs, old_logp
from spmdrl.config.fields import get
from spmdrl.config.named import name_weight
from spmdrl.config.parameters import parameters_of
from spmdrl.config.schema import Config
from spmdrl.policy.objectives.algorithm import MOMENTS, Algorithm


def compose(cfg: Config) -> Algorithm:
    """Return the algorithm for a run. Raises ValueError for unknown names."""
    algo, advantage, loss, wanted = cfg.algo, advantage_of(cfg), loss_of(cfg), needs(cfg)
    return Algorithm(
        settings=algo,
        advantage=advantage.function,
        advantage_settings=settings_of(advantage.function, cfg),
        loss=loss.function,
        loss_settings=settings_of(loss.function, cfg),
        select=loss.select,
        separable=loss.scope == "token",
        aggregation=aggregation(cfg),
        horizon=float(cfg.rollout.max_new_tokens),
        old_logp=old_logp(cfg),
        correction=correction(cfg),
        limits=cfg.correction,
        mask_cut=cfg.shaping.mask_cut,
        staleness=cfg.rollout.staleness,
        chunked=cfg.policy.chunked_loss,
        skip_zero_advantage=advantage_alone(cfg) and algo.skip_zero_advantage,
        needs=wanted,
        state={"kl_coef": algo.kl_coef, "multiplier": cfg.safety.multiplier if "cost" in wanted else 1.0}
        | dict.fromkeys(MOMENTS, 0.0),
    )


def part_weights(specs: tuple[str, ...]) -> dict[str, float] | None:
    """Parse weights such as `("format=1", "answer=2")` into a dict; return None if there are none.

    A name without a number has weight 1.

    Raises:
        ValueError: an entry has no name, or its weight is not a finite number.
    """
    weights = {}
    for spec in specs:
        form = f"--algo.part-weights {spec}: write name=number, such as format=0.5"
        name, weight = name_weight(spec, form, positive=False)
        weights[name] = 1.0 if weight is None else weight
    return weights or None


def settings_of(function: Callable, cfg: Config) -> dict[str, Any]:
    """Return the settings that a function takes as parameters, except settings that are None."""
    values = {name: get(cfg, setting) for name, setting in parameters_of(function).items()}
    if "weights" in values:
        values["weights"] = part_weights(values["weights"])
    return {name: value for name, value in values.items() if value is not None}
