"""From settings to an `Algorithm`: functions by name or from a user's file, each given the settings it takes."""

import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdrl.algos.estimators import ADVANTAGES, Advantage, own_advantage
from spmdrl.algos.losses import LOSSES, Loss, own_loss
from spmdrl.config.classifier import scores_steps
from spmdrl.config.fields import get
from spmdrl.config.parameters import parameters_of
from spmdrl.config.schema import Config
from spmdrl.policy.objectives.algorithm import MOMENTS, Algorithm


def compose(cfg: Config) -> Algorithm:
    """The algorithm of a run.

    Raises:
        ValueError: unknown names.
    """
    algo, advantage, loss = cfg.algo, advantage_of(cfg), loss_of(cfg)
    wanted = needs(cfg, advantage)
    source = old_logp(cfg, wanted, loss)
    return Algorithm(
        settings=algo,
        advantage=advantage.function,
        advantage_settings=settings_of(advantage.function, cfg),
        loss=loss.function,
        loss_settings=settings_of(loss.function, cfg),
        select=loss.select,
        separable=loss.scope == "token",
        aggregation=aggregation(cfg, loss),
        horizon=float(cfg.rollout.max_new_tokens),
        old_logp=source,
        correction=correction(cfg, source),
        limits=cfg.correction,
        mask_cut=cfg.shaping.mask_cut,
        staleness=cfg.rollout.staleness,
        chunked=cfg.policy.chunked_loss,
        skip_zero_advantage=advantage_alone(cfg, loss) and algo.skip_zero_advantage,
        needs=wanted,
        state={"kl_coef": algo.kl_coef, "multiplier": cfg.safety.multiplier if "cost" in wanted else 1.0}
        | dict.fromkeys(MOMENTS, 0.0),
    )


def advantage_of(cfg: Config) -> Advantage:
    """The row of `--algo.advantage`. Raises as `load_function` does."""
    name = cfg.algo.advantage
    return ADVANTAGES[name] if name in ADVANTAGES else own_advantage(load_function(name, ADVANTAGES))


def loss_of(cfg: Config) -> Loss:
    """The row of `--algo.loss`. Raises as `load_function` does."""
    name = cfg.algo.loss
    return LOSSES[name] if name in LOSSES else own_loss(load_function(name, LOSSES))


def advantage_alone(cfg: Config, loss: Loss) -> bool:
    """Tells whether a sequence without advantage contributes nothing to an update.

    A user's own loss may have terms that no advantage multiplies; loss and bias for evenly used experts are of every
    token.
    """
    algo, policy = cfg.algo, cfg.policy
    more = algo.kl_coef or algo.entropy_coef or algo.positive_coef or policy.moe_aux_loss or policy.moe_bias_rate
    return loss.skips and not more


def aggregation(cfg: Config, loss: Loss) -> str:
    """`--algo.aggregation`, or what the loss's paper does."""
    return loss.aggregation if loss.scope == "one per sequence" else cfg.algo.aggregation or loss.aggregation


def needs(cfg: Config, advantage: Advantage) -> frozenset[str]:
    """Inputs of a step beside the samples.

    Raises:
        ValueError: there is no such field, or nothing in the run fills it.
    """
    algo, safety = cfg.algo, cfg.safety
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
    critic = "values" in fields
    cost = bool(safety.cost or safety.cost_model)
    wanted = {
        "reference": cfg.has_reference,
        "critic": critic,
        "cost": cost,
        "cost_critic": cost and critic,
        "process": "process" in fields and not steps,
        "scored steps": steps,
        "greedy": "baseline" in fields,
        "collision": "collision" in fields,
        "logp": "logp" in fields,
        "turns": not {"turn", "state", "parent"}.isdisjoint(fields),
    }
    return frozenset(name for name, value in wanted.items() if value)


def old_logp(cfg: Config, wanted: frozenset[str], loss: Loss) -> str:
    """Source of old_logp: `update`, `policy` or `rollout`. wanted: as `needs` returns it."""
    algo = cfg.algo
    if algo.old_logp != "auto":
        return algo.old_logp
    if cfg.filter.replay_steps:
        return "rollout"
    in_reward = "reference" in wanted and algo.kl_in == "reward"
    before = in_reward or wanted & {"logp", "collision"} or loss.select
    return "policy" if algo.updates_per_step > 1 or before else "update"


def correction(cfg: Config, source: str) -> str:
    """`--correction.kind`, or whether samples may come from other weights than the trainer's.

    source: of old_logp, as `old_logp` returns it.
    """
    if cfg.correction.kind != "auto":
        return cfg.correction.kind
    rollout = cfg.rollout
    other = rollout.staleness or rollout.partial_steps or rollout.quantization != "none"
    # Against the engine's own logp the loss's ratio is the correction already.
    return "tis_token" if other and source != "rollout" else "none"


def part_weights(specs: tuple[str, ...]) -> dict[str, float] | None:
    """`("format=1", "answer=2")` as a dict; None for none.

    Raises:
        ValueError: an entry that is not `name=number`.
    """
    weights = {}
    for spec in specs:
        name, _, number = spec.partition("=")
        try:
            weights[name] = float(number or "1")
        except ValueError:
            raise ValueError(f"--algo.part-weights {spec}: write name=number, such as format=0.5") from None
    return weights or None


def settings_of(function: Callable, cfg: Config) -> dict[str, Any]:
    """The values that a function takes by name and that are set; no other setting is looked at (`rl/rehearsal.py`)."""
    values = {name: get(cfg, setting) for name, setting in parameters_of(function).items()}
    if "weights" in values:
        values["weights"] = part_weights(values["weights"])
    return {name: value for name, value in values.items() if value is not None}


def load_function(spec: str, table: Mapping[str, Any]) -> Any:
    """An entry of the table by name, or the user's own function by `path/to/file.py:function`.

    Raises:
        ValueError: no such name, file or function, or a file that fails when it is run.
    """
    if spec in table:
        return table[spec]
    path, _, name = spec.partition(":")
    if not path.endswith(".py") or not name:
        raise ValueError(f"{spec!r} is none of {', '.join(table)}, nor path/to/file.py:function")
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist (from {spec!r})")
    try:
        module = _module(path, Path(path).stat().st_mtime_ns)
    except Exception as error:
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error} (from {spec!r})") from error
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name} (from {spec!r})")
    return getattr(module, name)


@cache
def _module(path: str, changed: int) -> ModuleType:
    """A user's file, run once. changed: when it was written."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
