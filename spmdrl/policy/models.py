"""Builds the models that an algorithm needs, on the ranks that run them."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch

from spmdrl.config.classifier import is_classifier, model_path
from spmdrl.config.schema import Config, PolicyConfig, is_average
from spmdrl.hub.build import check_head, never_sampled
from spmdrl.hub.folder import read_config
from spmdrl.hub.resolve import named, resolve
from spmdrl.hub.tokenizer import check_same_tokens
from spmdrl.policy.contract import Head, Policy
from spmdrl.policy.labels import Labels, check_alone, labels_of
from spmdrl.policy.remote import RemotePolicy
from spmdrl.policy.self_check import choose_form
from spmdrl.spmd.mesh import scoring_world
from spmdrl.spmd.world import World

log = logging.getLogger("spmdrl")
ALIGN = "; or let the teacher read the student's text: --distill.align uld"


def backend(name: str) -> Any:
    """Return the backend class, `FsdpPolicy` or `MegatronPolicy`; both take the same arguments."""
    if name == "megatron":
        from spmdrl.policy.megatron.policy import MegatronPolicy

        return MegatronPolicy
    from spmdrl.policy.fsdp.policy import FsdpPolicy

    return FsdpPolicy


def shares_prompts(cfg: PolicyConfig) -> bool:
    """Return True if the policy computes a prompt once for all its samples. All ranks return the same result."""
    return cfg.share_prompts and backend(cfg.backend).can_share


@dataclass
class Models:
    """The policy and the other models of a run. A model is None if it is not needed or is not on this rank.

    Trained models live on the training ranks. Frozen models live there too, or on separate scoring ranks. If there are
    scoring ranks, they and the training ranks hold a `RemotePolicy` for each frozen model: training ranks send
    requests, and scoring ranks answer them.
    """

    policy: Any
    """The trained `Policy`, or None on a rank that does not train."""
    reference: Policy | None = None
    """The reference model of the KL term, or the first teacher in distillation."""
    critic: Policy | None = None
    cost_critic: Policy | None = None
    process: Policy | None = None
    """The implicit process reward model of PRIME, which is a language model."""
    process_reference: Policy | None = None
    reward_model: Policy | None = None
    cost_model: Policy | None = None
    labels: Labels | None = None
    """The labels of the reward model, or None if it is not configured by a file."""
    reading: Any = None
    """How the reward model scores responses (`rl/reading.py`), or None for the score at the last token of a
    response."""
    cost_reading: Any = None
    """How the cost model scores responses, like `reading`."""
    teachers: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Distillation teachers by name, except the first one (`reference`)."""

    def named(self) -> Iterator[tuple[str, Policy]]:
        """Yield (name, model) for each model on this rank; a model with two roles appears once."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        seen: dict[int, str] = {}
        for name, model in (fields | self.teachers).items():
            if model is None or name in ("labels", "reading", "cost_reading", "teachers"):
                continue
            if seen.setdefault(id(model), name) == name:
                yield name, model

    def language_models(self) -> dict[str, Policy]:
        """Return the language models on this rank by name."""
        names = {"policy", "reference", "process", "process_reference", *self.teachers}
        return {name: model for name, model in self.named() if name in names}

    keep_reference = False
    """True if checkpoints include the reference model, because it is updated from the policy's weights during the
    run."""

    def saved(self) -> dict[str, Policy]:
        """Return the models saved in checkpoints by name, except the policy."""
        reference = {"reference": self.reference} if self.keep_reference and self.reference else {}
        return self.trained() | reference

    def trained(self) -> dict[str, Policy]:
        """Return the trained models by name, except the policy."""
        return {name: m for name, m in self.named() if name in ("critic", "cost_critic", "process")}

    def learning(self) -> dict[str, Any]:
        """Return the trained models by name, including the policy, or an empty dict on a rank that does not train."""
        return self.trained() | ({"policy": self.policy} if self.policy else {})


@dataclass(frozen=True)
class ModelPlan:
    """Path and head of one model of a run, and its learning rate if it is trained."""

    flag: str
    """The flag that sets the model path."""
    path: str
    """The model path, in any form that `--model.path` accepts; empty to use `--model.path`."""
    head: Head
    lr: float | None = None
    """Peak learning rate, or None for a frozen model."""


def wanted_models(cfg: Config, needs: frozenset[str]) -> dict[str, ModelPlan]:
    """Return a `ModelPlan` for each model, other than the policy, that an algorithm needs.

    Keys are fields of `Models` or names in `Models.teachers`, in build order. needs: the result of `compose.needs`.
    """
    wanted: dict[str, ModelPlan] = {}
    scorer = model_path(cfg.reward.model)
    on_engine = cfg.engine_teachers()
    if "reference" in needs and not on_engine:
        wanted["reference"] = ModelPlan("--reference.path", cfg.reference.path, "lm")
    for name, teacher in cfg.further_teachers().items() if not on_engine else ():
        wanted[name] = ModelPlan("--distill.more-teachers", teacher.path, "lm")
    for name in ("critic", "cost_critic"):
        if name in needs:
            wanted[name] = ModelPlan("--critic.path", cfg.critic.path, "value", cfg.critic.lr)
    if "process" in needs:
        start = cfg.process_reward.path or cfg.model.path
        wanted["process"] = ModelPlan("--process-reward.path", start, "lm", cfg.process_reward.lr)
        wanted["process_reference"] = ModelPlan("--process-reward.path", start, "lm")
    if scorer:
        wanted["reward_model"] = ModelPlan("--reward.model", scorer, "score")
    if cfg.safety.cost_model:
        wanted["cost_model"] = ModelPlan("--safety.cost-model", cfg.safety.cost_model, "score")
    return wanted


def build_models(cfg: Config, world: World, needs: frozenset[str]) -> Models:
    """Build this rank's models for an algorithm with the given needs (`compose.needs`). Collective.

    In a run of 0 steps, the policy is frozen too.

    Raises:
        ValueError: a folder is missing or does not fit its role.
    """
    from spmdrl.policy.fsdp.lora import BaseOf

    total, warmup = cfg.run.steps * cfg.algo.updates_per_step, 0
    if "critic" in needs:
        # The policy's learning rate schedule excludes the critic warm-up steps, in which the policy is not trained.
        warmup = min(cfg.critic.warmup_steps, cfg.run.steps) * cfg.algo.updates_per_step
    wanted = wanted_models(cfg, needs)
    scoring = scoring_world(world, cfg.parallel, timedelta(seconds=cfg.run.timeout))
    models = Models(None)
    if is_classifier(cfg.reward.model):
        models.labels = labels_of(cfg.reward.model, cfg.model.path, cfg.model.trust_remote_code)
    check_wanted(cfg, wanted, models.labels)
    if world.trains:
        more = {"routing_replay": cfg.rollout.routing_replay, "adapt": bool(total)}
        models.policy = backend(cfg.policy.backend)(cfg, world, total - warmup, trainable=total > 0, **more)
    models.keep_reference = "reference" in wanted and cfg.reference.refresh_every > 0
    for name, each in wanted.items():
        if each.lr is not None:
            settings = dict(path=each.path, head=each.head, optimizer=dataclasses.replace(cfg.optimizer, lr=each.lr))
            model: Any = backend(cfg.policy.backend)(cfg, world, total, **settings) if world.trains else None
        elif name == "reference" and cfg.lora.rank and each.path in ("", cfg.model.path) and scoring is world:
            model = BaseOf(models.policy) if models.policy else None
        elif name == "process_reference" and models.reference and _is_fixed_reference(cfg, each.path):
            model = models.reference
        else:
            outputs = models.labels.outputs if models.labels and name == "reward_model" else 1
            average = name == "reference" and is_average(cfg.reference)
            model = frozen(cfg, world, scoring, each, outputs, average)
        if each.flag == "--distill.more-teachers":
            models.teachers[name] = model
        else:
            setattr(models, name, model)
    if models.keep_reference and models.policy and models.reference:
        check_alike(models.policy, models.reference)
    return models


def frozen(cfg: Config, world: World, scoring: World, each: ModelPlan, outputs: int, average: bool) -> Any:
    """Build a frozen model, or a `RemotePolicy` if it runs on scoring ranks. Collective.

    each: the plan of the model. outputs: number of outputs that a reward model has per token. average: True if the
    model tracks a moving average of the policy's weights.
    """
    model = None
    if world.scores:
        more: dict[str, Any] = dict(path=each.path, head=each.head, labels=outputs, average=average)
        model = backend(cfg.policy.backend)(cfg, scoring, 0, trainable=False, **more)
    if scoring is world or world.samples:
        return model
    answers = torch.float64 if cfg.model.dtype == "float64" else torch.float32
    share = shares_prompts(cfg.policy) and each.head != "score"
    return RemotePolicy(model, world, scoring.holders, answers, share, outputs)


def check_wanted(cfg: Config, wanted: dict[str, ModelPlan], labels: Labels | None) -> None:
    """Check that each model folder fits its role; warn if there is no model for the scoring ranks.

    labels: the reward model's labels, or None. If there are labels, `labels_of` has already checked the reward model's
    tokenizer.

    Raises:
        ValueError: a head is missing, or the tokenizer differs from the policy's; the message names the flag.
    """
    if cfg.parallel.scoring_ranks and all(each.lr is not None for each in wanted.values()):
        log.warning(
            "--parallel.scoring-ranks %d: this run has no frozen model (no reference, teacher, reward or cost model), "
            "so these ranks have nothing to do",
            cfg.parallel.scoring_ranks,
        )
    trust = cfg.model.trust_remote_code
    for name, each in wanted.items():
        if each.head != "lm" and cfg.policy.backend == "fsdp":
            with named(each.flag):
                check_head(resolve(each.path or cfg.model.path, trust), each.head, trust)
        if each.path and not (labels and name == "reward_model"):
            with named(each.flag):
                if not (name == "reference" and cfg.aligns_tokens):
                    way = ALIGN if name == "reference" and cfg.has_teacher else ""
                    check_same_tokens(each.path, cfg.model.path, each.flag, trust, way)
                if each.head == "score":
                    check_alone(each.path, each.flag, trust)


def check_models(models: Models, cfg: Config, needs: frozenset[str], say: Callable[[str], None]) -> None:
    """Run the self-check of every model with weights on this rank; raise the errors of `self_check.choose_form`.

    Models that use the weights of another model are not checked. Collective over the ranks of each model. say: callback
    that prints one line per model.
    """
    from spmdrl.policy.fsdp.lora import BaseOf

    wanted = wanted_models(cfg, needs)
    for name, each in models.named():
        model = each.model if isinstance(each, RemotePolicy) else each
        if model is not None and not isinstance(model, BaseOf):
            path = f"{wanted[name].flag} {wanted[name].path}" if name in wanted and wanted[name].path else ""
            choose_form(model, name.replace("_", " "), path or f"--model.path {cfg.model.path}", say)


def exclude_placeholders(models: Models, cfg: Config) -> None:
    """Give placeholders of images probability 0 in the language models of a run, because engines never sample them.

    All models exclude the placeholders of `--model.path`, even models that read text only, because a divergence is
    infinite if only one of two models excludes a token. A teacher with another tokenizer excludes its own placeholders.
    """
    for name, model in models.language_models().items():
        other = name == "reference" and cfg.aligns_tokens
        model.exclude(placeholders(cfg, cfg.reference.path if other else cfg.model.path))


def placeholders(cfg: Config, path: str) -> tuple[int, ...]:
    """Return the ids that models over the tokens of the model at `path` exclude in a run with these settings."""
    trust = cfg.model.trust_remote_code
    return never_sampled(read_config(resolve(path, trust), trust))


def check_alike(model: Any, reference: Any) -> None:
    """Raise ValueError unless a reference has the model's architecture and so can take over the model's weights."""
    mine, theirs = ([(piece.name, piece.shape) for piece in each.pieces()] for each in (model, reference))
    if mine != theirs:
        odd = next((a or b for a, b in zip_longest(mine, theirs) if a != b), ("", ()))
        raise ValueError(
            f"--reference.refresh-every: --reference.path must have the policy's architecture, but differs in {odd[0]} "
            f"{tuple(odd[1])}"
        )


def _is_fixed_reference(cfg: Config, path: str) -> bool:
    return (cfg.reference.path or cfg.model.path) == path and not cfg.reference.refresh_every
