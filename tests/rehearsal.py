"""Runs a step of each kind of run on made-up tokens, and records which settings it reads, to test `only_with`.

The functions are those that the run calls, from the composition to the update; models, engine and a user's own
functions are stand-ins.
"""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from spmdrl.config.distillation import DistillationConfig
from spmdrl.config.online_preference import OnlinePreferenceConfig
from spmdrl.config.schema import Config
from tests.watch import watch

if TYPE_CHECKING:
    import torch

    from spmdrl.data.batch import Batch

LATE = 1 << 40
"""Number of a step after every warm-up."""
JUDGED = (
    *("algo", "correction", "shaping", "filter", "critic", "process_reward", "safety", "reference", "lora", "eval"),
    *("reward", "optimizer"),
)
"""Sections about what is learnt. The rehearsal covers all code that reads them, except for the settings ELSEWHERE."""
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
"""Setting of those sections -> the other part of a run that reads it."""


def is_covered(name: str) -> bool:
    """Returns True if the rehearsal covers all code that reads this setting."""
    return name.split(".")[0] in JUDGED and name not in ELSEWHERE


def settings_read(config: Config) -> set[str]:
    """Returns the dotted names of the settings that one rehearsed step reads.

    Raises:
        ValueError, KeyError: the settings cannot be composed.
    """
    watched, seen = watch(config)
    if isinstance(config, DistillationConfig) and isinstance(watched, DistillationConfig):
        rehearse_distillation(watched, config)
    elif isinstance(config, OnlinePreferenceConfig) and isinstance(watched, OnlinePreferenceConfig):
        rehearse_online(watched, config)
    else:
        rehearse(watched, config)
    rehearse_rest(watched, config)
    return set(seen)


def rehearse_rest(cfg: Config, plain: Config) -> None:
    """Rehearses what every run has besides its method: adapters, optimizer, evaluation. Arguments as in `rehearse`."""
    import torch

    from spmdrl.policy.optimizer import make_optimizer
    from spmdrl.rl.evaluation import evaluation_plan

    if cfg.lora.rank:
        # Attaching adapters reads every setting of them.
        _ = [getattr(cfg.lora, field.name) for field in dataclasses.fields(plain.lora)]
    make_optimizer([torch.nn.Parameter(torch.zeros(1, 1))], cfg.optimizer)
    _ = cfg.optimizer.clip_grad_norm, cfg.optimizer.bad_steps
    if cfg.is_evaluated:
        _ = cfg.eval.prompts
        evaluation_plan(cfg, [], 0, "rehearsal")


def rehearse_distillation(cfg: DistillationConfig, plain: DistillationConfig) -> None:
    """Rehearses the update of a distillation, which learns only from its teacher; its rewards are only logged.

    Arguments as in `rehearse`.
    """
    from spmdrl.policy.models import Models
    from spmdrl.policy.optimizer import learning_rate
    from spmdrl.rl.update import refresh_reference

    _ = cfg.reference.path
    stand_in: Any = StandIn(cfg)
    models = Models(stand_in, reference=stand_in)
    learning_rate(cfg.optimizer, LATE, 2 * LATE)
    last = max(1, plain.reference.refresh_every) - 1
    if cfg.reference.refresh_every:
        refresh_reference(models, cfg.reference.refresh_every, last, cfg.reference.mix)
    if cfg.is_evaluated and cfg.reward.model:
        _ = cfg.reward.model_coef


def rehearse_online(cfg: OnlinePreferenceConfig, plain: OnlinePreferenceConfig) -> None:
    """Rehearses a step of preference learning on the policy's samples. Arguments as in `rehearse`."""
    import torch

    from spmdrl.policy.models import Models, wanted_models
    from spmdrl.rl.compose import compose
    from spmdrl.rl.online_preference import OnlinePreference
    from spmdrl.spmd.peers import Peers

    algo, peers = compose(plain), Peers(None, torch.device("cpu"))
    others: dict[str, Any] = {name: StandIn(cfg) for name in wanted_models(cfg, algo.needs)}
    run: Any = SimpleNamespace(cfg=cfg, algo=algo, models=Models(StandIn(cfg), **others), peers=peers)
    method = OnlinePreference(run)
    pairs, _ = method.score(sampled(cfg, plain, algo, peers))
    method.update(pairs, max(1, plain.reference.refresh_every) - 1)


def rehearse(cfg: Config, plain: Config) -> None:
    """Rehearses a step: sampling and filters, score, advantages, update, coefficients.

    cfg: the settings, whose reads are recorded. plain: the same settings unrecorded, for the rehearsal itself.
    """
    import torch

    from spmdrl.algos.estimators import ADVANTAGES
    from spmdrl.algos.losses import LOSSES
    from spmdrl.policy.models import Models, wanted_models
    from spmdrl.rl.compose import compose
    from spmdrl.rl.score import score
    from spmdrl.rl.update import adapt_coefficients, update
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
    adapt_coefficients(algo, cfg, stats.reduce(lambda x, op: x), len(batch))


def sampled(cfg: Config, plain: Config, algo: Any, peers: Any) -> "Batch":
    """Returns the batch of a step, after sampling and filters. Arguments as in `rehearse`."""
    import torch

    from spmdrl.data.distribute import assign_updates
    from spmdrl.data.pack import from_episodes
    from spmdrl.data.step_batch import ReplayBuffer
    from spmdrl.rl.fill_batch import Filling
    from spmdrl.rl.rollout_plan import Experience, RolloutPlan

    made = list(episodes(plain))
    prompts = 1 + max(e.position for e in made)
    world: Any = SimpleNamespace(rollout_group=None, engine_tp_rank=0, engine_index=0, engine_count=1)
    # Only reads of this section are recorded, because the code reads the others even if they have no effect.
    sampling = dataclasses.replace(
        plain, filter=cfg.filter, rollout=dataclasses.replace(plain.rollout, prompts_per_step=prompts, oversample=1.0)
    )
    everything = (lambda score_B, group_B, **_: torch.ones_like(group_B, dtype=torch.bool)) if cfg.filter.keep else None
    filling = Filling(sampling, world, everything, 0, [])
    for _ in range(filling.most_rounds):
        filling.order(plan := RolloutPlan("rehearsal", [], 1, (0, 0), 0, 1, 1.0))
        filling.take(plan, Experience(made))
        if filling.is_full:
            break
    names = tuple(sorted({name for e in made for name in e.parts}))
    batch = from_episodes(filling.experience().episodes, names, turns="turns" in algo.needs)
    batch.seq["seed"] = torch.arange(len(batch))
    batch = ReplayBuffer(cfg.filter, prompts).mix(batch, 0, 0, peers)
    return assign_updates(batch, cfg.algo.updates_per_step, prompts, list(range(prompts)))


def episodes(plain: Config) -> Iterator[Any]:
    """Yields two samples of each of two prompts, one right and one wrong, with every reward part that settings name."""
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
    """A model that never learns: the part of the Policy contract that a step uses, equal numbers for all tokens."""

    def __init__(self, cfg: Config):
        self.cfg, self.version, self.updates_done = cfg, 0, 0

    def logprobs(self, batch: "Batch", temperature: float, second: str = "entropy"):
        """See the contract."""
        return (-1.0 * batch.token["mask"]).double(), (0.5 * batch.token["mask"]).double()

    def values(self, batch: "Batch") -> "torch.Tensor":
        """See the contract."""
        return (0.5 * batch.token["mask"]).double()

    def update(self, batch: "Batch", objective: Any, steps: int = 1):
        """See the contract; this is one optimizer step that changes nothing."""
        from spmdrl.policy.optimizer import learning_rate

        first_T, second_T = self.logprobs(batch, objective.temperature)
        shared = objective.prepare(batch, 0)
        stats = objective.loss(batch, first_T.requires_grad_(), second_T, shared).stats
        # A step after the warm-up and before the end.
        learning_rate(self.cfg.optimizer, LATE, 2 * LATE)
        return stats

    def take_over(self, other: Any, share: float = 1.0) -> None:
        """See the contract."""
