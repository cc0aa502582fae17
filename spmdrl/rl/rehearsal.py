"""One step of a run's method on made-up tokens, before anything is built: which settings does it look at?

The functions are those that the run will call, from the composition to the update; models, engine and a user's own
functions are stand-ins. A setting that a user gave and that nothing here read would be silently without effect, so it
is refused, with the settings that would make something read it. Sections that say where and how fast a run computes
are not judged here: `config/` has rules for them.
"""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from spmdrl.config.distillation import DistillationConfig
from spmdrl.config.fields import ConfigError, flag, get, is_optional, leaves, shown
from spmdrl.config.load import Loaded, from_command_line
from spmdrl.config.online_preference import OnlinePreferenceConfig
from spmdrl.config.presets import OF_ADVANTAGE, OF_LOSS, settings_of_preset
from spmdrl.config.schema import Config
from spmdrl.config.watch import watch

if TYPE_CHECKING:
    import torch

    from spmdrl.data.batch import Batch

JUDGED = (
    *("algo", "correction", "shaping", "filter", "critic", "process_reward", "safety", "reference", "lora", "eval"),
    *("reward", "optimizer"),
)
"""Sections that say what is learnt."""
ELSEWHERE = {
    "reference.offload": "memory of frozen models",
    "reward.workers": "grading processes",
    "reward.timeout": "grading processes",
    "reward.on_timeout": "grading processes",
    "reward.function": "the sampling loop",
    "reward.more": "the sampling loop",
    "reward.gate": "the sampling loop",
    "reward.kwargs": "grading processes",
    "reward.max_ungraded": "the sampling loop",
    "filter.bad_sample": "the sampling loop",
    "algo.preset": "the layer that it is",
}
"""Settings of those sections that other parts of a run read, each with that part."""
LATE = 1 << 40
"""A step behind every warm-up."""
MOST_SHOWN = 3


def check_use(loaded: Loaded[Any]) -> list[str]:
    """Refuse settings that a user gave and that the run would not look at; lines to tell of those that may stand.

    Settings of presets, of a run folder's own config.yaml and at their defaults are not judged. A file's may stand that
    the file itself makes use of and a flag beside it does not: `--config run.yaml --eval.every 0`.

    Raises:
        ConfigError: one line for each such setting: its flag, its value and the settings that would be read beside it.
    """
    config = loaded.config
    asked = [name for name in sorted(loaded.given) if is_judged(name) and not at_rest(config, name)]
    if not asked:
        return []
    try:
        seen = settings_read(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    unread = [name for name in asked if name not in seen]
    moot = turned_off(loaded, unread) if unread else []
    unread = [name for name in unread if name not in moot]
    if unread:
        count = "1 setting" if len(unread) == 1 else f"{len(unread)} settings"
        readers: dict[str, list[tuple[str, Any]]] = {name: [] for name in unread}
        for change, value in single_changes(config):
            then = read_after(config, change, value)
            for name in unread:
                if name in then and name != change:
                    readers[name].append((change, value))
        lines = [f"{flag(name)} {shown(get(config, name))}: {advice(config, name, readers[name])}" for name in unread]
        raise ConfigError("\n  ".join([f"{count} without effect:", *lines]))
    return [f"{flag(name)} {shown(get(config, name))} has no effect beside these flags" for name in moot]


def turned_off(loaded: Loaded[Any], unread: list[str]) -> list[str]:
    """Returns those that a file gives and that the run of the files alone, without flags, would read."""
    if not loaded.files:
        return []
    schema = type(loaded.config)
    alone = from_command_line([word for file in loaded.files for word in ("--config", file)], schema=schema)
    theirs = [n for n in unread if n in alone.given and get(alone.config, n) == get(loaded.config, n)]
    try:
        seen = settings_read(alone.config) if theirs else set()
    except ValueError:
        return []
    return [name for name in theirs if name in seen]


def is_judged(name: str) -> bool:
    """Tells whether the rehearsal covers everything that reads this setting."""
    return name.split(".")[0] in JUDGED and name not in ELSEWHERE


def at_rest(config: Config, name: str) -> bool:
    """The setting has its default, or the value that the preset gives it."""
    algo, default = config.algo, get(type(config)(), name)
    preset = settings_of_preset(algo.preset, algo.loss, algo.advantage)
    return get(config, name) in (default, preset.get(name, default))


def settings_read(config: Config) -> set[str]:
    """Dotted names of the settings that one rehearsed step looks at.

    Raises:
        ValueError: the settings cannot be composed.
    """
    watched, seen = watch(config)
    if isinstance(config, DistillationConfig) and isinstance(watched, DistillationConfig):
        rehearse_distillation(watched, config)
    elif isinstance(config, OnlinePreferenceConfig) and isinstance(watched, OnlinePreferenceConfig):
        rehearse_online(watched, config)
    else:
        rehearse(watched, config)
    look(watched, config)
    return set(seen)


def look(cfg: Config, plain: Config) -> None:
    """What every run has beside its method: adapters, an optimizer, evaluation. Arguments as in `rehearse`."""
    import torch

    from spmdrl.policy.optimizer import make_optimizer
    from spmdrl.rl.evaluation import evaluation_plan, is_evaluated

    if cfg.lora.rank:
        # Attaching adapters reads every setting of them.
        _ = [getattr(cfg.lora, field.name) for field in dataclasses.fields(plain.lora)]
    make_optimizer([torch.nn.Parameter(torch.zeros(1, 1))], cfg.optimizer)
    _ = cfg.optimizer.clip_grad_norm, cfg.optimizer.bad_steps
    if is_evaluated(cfg):
        _ = cfg.eval.prompts
        evaluation_plan(cfg, [], 0, "rehearsal")


def rehearse_distillation(cfg: DistillationConfig, plain: DistillationConfig) -> None:
    """The update of a distillation, which learns from its teacher alone: rewards are for the log.

    Arguments as in `rehearse`.
    """
    from spmdrl.policy.models import Models
    from spmdrl.policy.optimizer import learning_rate
    from spmdrl.rl.evaluation import is_evaluated
    from spmdrl.rl.update import refresh_reference

    _ = cfg.reference.path
    stand_in: Any = StandIn(cfg)
    models = Models(stand_in, reference=stand_in)
    learning_rate(cfg.optimizer, LATE, 2 * LATE)
    last = max(1, plain.reference.refresh_every) - 1
    if cfg.reference.refresh_every:
        refresh_reference(models, cfg.reference.refresh_every, last, cfg.reference.mix)
    if is_evaluated(cfg) and cfg.reward.model:
        _ = cfg.reward.model_coef


def rehearse_online(cfg: OnlinePreferenceConfig, plain: OnlinePreferenceConfig) -> None:
    """One step of preference learning on own samples. Arguments as in `rehearse`."""
    import torch

    from spmdrl.policy.models import Models, wanted_models
    from spmdrl.rl.compose import compose
    from spmdrl.rl.online_preference import OnlinePreference
    from spmdrl.spmd.peers import Peers

    algo, peers = compose(plain), Peers(None, torch.device("cpu"))
    others: dict[str, Any] = {name: StandIn(cfg) for name in wanted_models(cfg, algo.needs)}
    run: Any = SimpleNamespace(cfg=cfg, algo=algo, models=Models(StandIn(cfg), **others), peers=peers)
    lesson = OnlinePreference(run)
    pairs, _ = lesson.compare(sampled(cfg, plain, algo, peers))
    lesson.learn(pairs, max(1, plain.reference.refresh_every) - 1)


def rehearse(cfg: Config, plain: Config) -> None:
    """One step: sampling and filters, score, advantages, update, what steers it.

    cfg: the settings that are watched; plain: the same ones, for what the rehearsal itself wants to know.
    """
    import torch

    from spmdrl.algos.estimators import ADVANTAGES
    from spmdrl.algos.losses import LOSSES
    from spmdrl.policy.models import Models, wanted_models
    from spmdrl.rl.compose import compose
    from spmdrl.rl.score import score
    from spmdrl.rl.update import steer, update
    from spmdrl.spmd.peers import Peers

    algo, peers = compose(cfg), Peers(None, torch.device("cpu"))
    if plain.algo.loss not in LOSSES:
        algo.loss = lambda x, **_: (x.logp * 0.0, {})
    if plain.algo.advantage not in ADVANTAGES:
        algo.advantage = lambda x, **_: (torch.zeros_like(x.rewards), torch.zeros_like(x.rewards))
    others: dict[str, Any] = {name: StandIn(cfg) for name in wanted_models(cfg, algo.needs)}
    models = Models(StandIn(cfg), **others)
    batch = sampled(cfg, plain, algo, peers)
    stats = score(batch, models, algo, cfg, peers)
    batch = algo.advantages(batch, peers)
    stats.merge(update(batch, models, algo, cfg, LATE, peers))
    steer(algo, cfg, stats.reduce(lambda x, op: x), len(batch))


def sampled(cfg: Config, plain: Config, algo: Any, peers: Any) -> "Batch":
    """The batch of a step: sampling and filters. Arguments as in `rehearse`."""
    import torch

    from spmdrl.data.batch import from_episodes, share_out
    from spmdrl.rl.quota import Quota
    from spmdrl.rl.replay_buffer import ReplayBuffer
    from spmdrl.rl.rollout_plan import RolloutPlan, RolloutResult

    made = list(episodes(plain))
    prompts = 1 + max(e.position for e in made)
    world: Any = SimpleNamespace(rollout_group=None, engine_tp_rank=0, engine_index=0, engine_count=1)
    # Of this section only, as the others are looked at whether they are of use or not.
    sampling = dataclasses.replace(
        plain, filter=cfg.filter, rollout=dataclasses.replace(plain.rollout, prompts_per_step=prompts, oversample=1.0)
    )
    everything = (lambda score_B, group_B, **_: torch.ones_like(group_B, dtype=torch.bool)) if cfg.filter.keep else None
    quota = Quota(sampling, world, everything, 0, [])
    for _ in range(quota.most_rounds):
        quota.take(quota.order(RolloutPlan("rehearsal", [], 1, (0, 0), 0, 1, 1.0)), RolloutResult(made, []))
        if quota.is_full:
            break
    names = tuple(sorted({name for e in made for name in e.parts}))
    batch = from_episodes(quota.experience().episodes, names, turns="turns" in algo.needs)
    batch.seq["seed"] = torch.arange(len(batch))
    batch = ReplayBuffer(cfg.filter, prompts).mix(batch, 0, 0, peers)
    return share_out(batch, cfg.algo.updates_per_step, prompts, list(range(prompts)))


def episodes(plain: Config) -> Iterator[Any]:
    """Two prompts with two samples each, one of them right, with every reward part that a setting names."""
    from spmdrl.algos.advantages import SCORE
    from spmdrl.data.episode import Episode, prompt_segment

    named = [plain.safety.cost, plain.filter.metric, *(spec.partition("=")[0] for spec in plain.algo.part_weights)]
    for position in range(2):
        for sample in range(2):
            made = Episode(position, sample, position, [prompt_segment([0])], "stop", float(sample))
            made.add_sampled([1, 2, 3], [-1.0] * 3, 0)
            made.parts = {name: float(sample) for name in ["a_part", *named] if name not in ("", SCORE)}
            yield made


class StandIn:
    """A model that says the same of every token and learns nothing; the Policy contract as far as a step uses it."""

    def __init__(self, cfg: Config):
        self.cfg, self.version, self.updates_done = cfg, 0, 0

    def logprobs(self, batch: "Batch", temperature: float, second: str = "entropy"):
        """See the contract."""
        return (-1.0 * batch.token["mask"]).double(), (0.5 * batch.token["mask"]).double()

    def values(self, batch: "Batch") -> "torch.Tensor":
        """See the contract."""
        return (0.5 * batch.token["mask"]).double()

    def update(self, batch: "Batch", objective: Any, steps: int = 1):
        """See the contract: one optimizer step, of which nothing comes."""
        from spmdrl.policy.optimizer import learning_rate

        first_T, second_T = self.logprobs(batch, objective.temperature)
        shared = objective.prepare(batch, 0)
        stats = objective.loss(batch, first_T.requires_grad_(), second_T, shared).stats
        # A step after the warm-up and before the end.
        learning_rate(self.cfg.optimizer, LATE, 2 * LATE)
        return stats

    def take_over(self, other: Any, share: float = 1.0) -> None:
        """See the contract."""


# ── what would read a setting ────────────────────────────────────────────────


def single_changes(config: Config) -> Iterator[tuple[str, Any]]:
    """Settings that may make a run look at others, each with a value that it does not have."""
    from spmdrl.algos.estimators import ADVANTAGES
    from spmdrl.algos.filters import FILTERS
    from spmdrl.algos.losses import LOSSES

    tables = {"algo.advantage": ADVANTAGES, "algo.loss": LOSSES, "filter.keep": FILTERS}
    for name, hint in leaves(type(config)).items():
        if not (is_judged(name) or name == "data.eval"):
            continue
        value, default = get(config, name), get(type(config)(), name)
        if name in tables:
            choices = list(tables[name])
        elif get_origin(hint) is Literal:
            choices = list(get_args(hint))
        elif hint is bool:
            choices = [not value]
        elif hint in (int, float):
            choices = [1] if value == 0 else [default]
        elif hint is str:
            choices = ["..."] if value == "" else [default]
        else:
            choices = [None] if is_optional(hint) else []
        yield from ((name, choice) for choice in choices if choice != value)


def read_after(config: Config, name: str, value: Any) -> set[str]:
    """`settings_read` with one setting changed; nothing where that cannot be composed."""
    section, _, leaf = name.partition(".")
    changed = dataclasses.replace(getattr(config, section), **{leaf: value})
    try:
        return settings_read(dataclasses.replace(config, **{section: changed}))
    except (ValueError, KeyError):
        return set()


def advice(config: Config, name: str, readers: list[tuple[str, Any]]) -> str:
    """Says what to do with a setting that nothing reads."""
    leaf = name.partition(".")[2]
    for own, leaves_of in ((config.algo.loss, OF_LOSS), (config.algo.advantage, OF_ADVANTAGE)):
        if ".py:" in own and name.startswith("algo.") and leaf in leaves_of and leaf != "aggregation":
            return f"nothing in this run reads it; let {own} take a parameter of that name, or leave it out"
    by_flag: dict[str, list[Any]] = {}
    # A setting of the same section is the likeliest to be meant.
    for change, value in sorted(readers, key=lambda reader: reader[0].split(".")[0] != name.split(".")[0]):
        by_flag.setdefault(change, []).append(value)
    ways = []
    for change, values in list(by_flag.items())[:MOST_SHOWN]:
        if values == [1] or values == ["..."]:
            ways.append(f"{flag(change)}" + (" above 0" if values == [1] else ""))
        else:
            more = ", ..." if len(values) > MOST_SHOWN else ""
            ways.append(f"{flag(change)} {' | '.join(map(shown, values[:MOST_SHOWN]))}{more}")
    needs = f"it needs {' or '.join(ways)}; give one of these, or leave it out" if ways else "leave it out"
    log = isinstance(config, DistillationConfig) and name.startswith("reward.")
    return f"{'rewards are for the log alone, and ' if log else ''}nothing in this run reads it; {needs}"
