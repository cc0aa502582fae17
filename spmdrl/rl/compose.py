"""From settings to an `Algorithm`: functions by name or from a user's file, each given the settings it takes."""

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdrl.algos.estimators import ADVANTAGES, NEEDS, READS
from spmdrl.algos.losses import AGGREGATION_OF, LOSSES, SEQUENCE_LOSSES
from spmdrl.algos.selection import SELECTIONS
from spmdrl.config.classifier import scores_steps
from spmdrl.config.learning import AlgoConfig
from spmdrl.config.schema import Config
from spmdrl.rl.algorithm import MOMENTS, Algorithm


def compose(cfg: Config) -> Algorithm:
    """The algorithm of a run.

    Raises:
        ValueError: unknown names.
    """
    algo, process = cfg.algo, cfg.process_reward
    advantage, loss = load_function(algo.advantage, ADVANTAGES), load_function(algo.loss, LOSSES)
    wanted = needs(cfg, advantage)
    source = old_logp(cfg, wanted)
    elsewhere = {"kl_coef": lambda: algo.cov_kl_coef, "weights": lambda: part_weights(algo.part_weights)}
    for_advantage = elsewhere | {name: partial(getattr, process, name) for name in ("process_coef", "outcome_coef")}
    return Algorithm(
        settings=algo,
        advantage=advantage,
        advantage_settings=settings_of(advantage, algo, for_advantage),
        loss=loss,
        loss_settings=settings_of(loss, algo, elsewhere),
        select=SELECTIONS.get(algo.loss),
        aggregation=aggregation(cfg),
        horizon=float(cfg.rollout.max_new_tokens),
        old_logp=source,
        correction=correction(cfg, source),
        limits=cfg.correction,
        mask_cut=cfg.shaping.mask_cut,
        staleness=cfg.rollout.staleness,
        chunked=cfg.policy.chunked_loss,
        skip_zero_advantage=advantage_alone(cfg) and algo.skip_zero_advantage,
        needs=wanted,
        state={"kl_coef": algo.kl_coef, "multiplier": cfg.safety.multiplier if "cost" in wanted else 1.0}
        | dict.fromkeys(MOMENTS, 0.0),
    )


def advantage_alone(cfg: Config) -> bool:
    """Tells whether a sequence without advantage contributes nothing to an update.

    A user's own loss may have terms that no advantage multiplies; loss and bias for evenly used experts are of every
    token.
    """
    algo, policy = cfg.algo, cfg.policy
    more = algo.kl_coef or algo.entropy_coef or algo.positive_coef or policy.moe_aux_loss or policy.moe_bias_rate
    return algo.loss in LOSSES and algo.loss not in SEQUENCE_LOSSES | SELECTIONS.keys() | {"dro"} and not more


def aggregation(cfg: Config) -> str:
    """`--algo.aggregation`, or what the loss's paper does."""
    default = AGGREGATION_OF.get(cfg.algo.loss, "token-mean")
    return default if cfg.algo.loss in SEQUENCE_LOSSES else cfg.algo.aggregation or default


def needs(cfg: Config, advantage: Callable) -> frozenset[str]:
    """Inputs of a step beside the samples.

    A user's own estimator names the fields of `Samples` that it cannot do without in an attribute `needs`.

    Raises:
        ValueError: there is no such field, or nothing in the run fills it.
    """
    algo, safety = cfg.algo, cfg.safety
    fields = (*NEEDS.get(algo.advantage, ()), *READS.get(algo.advantage, ())) or getattr(advantage, "needs", ())
    known = dict.fromkeys(name for table in (NEEDS, READS) for names in table.values() for name in names)
    if isinstance(fields, str) or (unknown := [name for name in fields if name not in known]):
        given = repr(fields) if isinstance(fields, str) else ", ".join(map(repr, unknown))
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


def old_logp(cfg: Config, wanted: frozenset[str]) -> str:
    """Source of old_logp: `update`, `policy` or `rollout`. wanted: as `needs` returns it."""
    algo = cfg.algo
    if algo.old_logp != "auto":
        return algo.old_logp
    if cfg.filter.replay_steps:
        return "rollout"
    in_reward = "reference" in wanted and algo.kl_in == "reward"
    before = in_reward or wanted & {"logp", "collision"} or algo.loss in SELECTIONS
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


def settings_of(function: Callable, algo: AlgoConfig, elsewhere: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """The values that a function takes by name and that are set; no other setting is looked at (`rl/rehearsal.py`).

    elsewhere: what stands under another name than the parameter's, or in another section.
    """
    names = [name for name in inspect.signature(function).parameters if name in elsewhere or hasattr(algo, name)]
    values = {name: elsewhere[name]() if name in elsewhere else getattr(algo, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def load_function(spec: str, table: dict[str, Callable]) -> Callable:
    """A function by name, or the user's own by `path/to/file.py:function`.

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
