"""Every model of a run besides the engine: which ones an algorithm needs, where each starts, on which ranks it is."""

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from spmdrl.config.schema import Config
from spmdrl.policy.backends import backend
from spmdrl.policy.contract import Policy
from spmdrl.policy.load import check_same_tokens
from spmdrl.policy.remote import RemotePolicy
from spmdrl.spmd.mesh import World, scoring_world

log = logging.getLogger("spmdrl")


@dataclass
class Models:
    """The policy and its company. None: the algorithm does not need it, or it is not on this rank.

    What learns is on the ranks that train. What is frozen is with it, or on ranks of its own: then those who train hold
    a `RemotePolicy`, and so do those who score, who answer it.
    """

    policy: Any
    """The Policy that learns; None on a rank that does not train."""
    reference: Policy | None = None
    """Of the KL term; a teacher, in distillation."""
    critic: Policy | None = None
    cost_critic: Policy | None = None
    process: Policy | None = None
    """PRIME's implicit process reward model, a language model."""
    process_reference: Policy | None = None
    reward_model: Policy | None = None
    cost_model: Policy | None = None

    def named(self) -> Iterator[tuple[str, Policy]]:
        """Those that are there; a model with two roles once."""
        seen = []
        for field in dataclasses.fields(self):
            model = getattr(self, field.name)
            if model is not None and not any(model is other for other in seen):
                seen.append(model)
                yield field.name, model

    keep_reference = False
    """A reference that is refreshed belongs to a checkpoint."""

    def saved(self) -> dict[str, Policy]:
        """What a checkpoint holds beside the policy, by name."""
        reference = {"reference": self.reference} if self.keep_reference and self.reference else {}
        return self.trained() | reference

    def trained(self) -> dict[str, Policy]:
        """Those that learn, the policy apart."""
        return {name: m for name, m in self.named() if name in ("critic", "cost_critic", "process")}

    def learning(self) -> dict[str, Any]:
        """Those and the policy, on a rank that trains."""
        return self.trained() | ({"policy": self.policy} if self.policy else {})


def build_models(cfg: Config, world: World, needs: frozenset[str]) -> Models:
    """Build what an algorithm needs (see `compose.needs`) of what belongs on this rank. Collective.

    Raises:
        ValueError: a folder that is missing or does not fit its role.
    """
    from spmdrl.policy.lora import BaseOf

    make = backend(cfg.policy.backend)

    total, warmup = cfg.run.steps * cfg.algo.updates_per_step, 0
    if "critic" in needs:
        # The policy's schedule begins where it does.
        warmup = min(cfg.critic.warmup_steps, cfg.run.steps) * cfg.algo.updates_per_step
    any_frozen = needs & {"reference", "process"} or cfg.reward.model or cfg.safety.cost_model
    if cfg.parallel.scoring_ranks and not any_frozen:
        log.warning(
            "--parallel.scoring-ranks %d: this run has no frozen model (no KL, teacher, reward or cost model), so "
            "these ranks have nothing to do",
            cfg.parallel.scoring_ranks,
        )
    scoring = scoring_world(world, timedelta(seconds=cfg.run.timeout))

    def trained(path: str, lr: float, head: str) -> Policy | None:
        if not world.trains:
            return None
        optimizer = dataclasses.replace(cfg.optimizer, lr=lr)
        return make(cfg, world, total, path=path, head=head, optimizer=optimizer)  # type: ignore[arg-type]

    def frozen(path: str, head: str = "lm") -> Any:
        model = None
        if world.scores:
            model = make(cfg, scoring, 0, trainable=False, path=path, head=head)  # type: ignore[arg-type]
        if scoring is world or world.samples:
            return model
        answers = torch.float64 if cfg.model.dtype == "float64" else torch.float32
        return RemotePolicy(model, world, scoring.holders, answers, cfg.policy.share_prompts and head != "score")

    others = {
        "--reference.path": cfg.reference.path,
        "--critic.path": cfg.critic.path,
        "--process-reward.path": cfg.process_reward.path,
        "--reward.model": cfg.reward.model,
        "--safety.cost-model": cfg.safety.cost_model,
    }
    for flag, path in others.items():
        if path:
            check_same_tokens(path, cfg.model.path, flag, cfg.model.trust_remote_code)
    replay = cfg.rollout.routing_replay
    models = Models(make(cfg, world, total - warmup, routing_replay=replay, adapt=True) if world.trains else None)
    if "reference" in needs:
        if cfg.lora.rank and cfg.reference.path in ("", cfg.model.path) and scoring is world:
            free: Any = BaseOf(models.policy) if models.policy else None
            models.reference = free
        else:
            models.reference = frozen(cfg.reference.path)
    models.keep_reference = cfg.reference.refresh_every > 0
    if "critic" in needs:
        models.critic = trained(cfg.critic.path, cfg.critic.lr, "value")
    if "cost_critic" in needs:
        models.cost_critic = trained(cfg.critic.path, cfg.critic.lr, "value")
    if "process" in needs:
        start = cfg.process_reward.path or cfg.model.path
        models.process = trained(start, cfg.process_reward.lr, "lm")
        same = (cfg.reference.path or cfg.model.path) == start and not cfg.reference.refresh_every
        models.process_reference = models.reference if models.reference and same else frozen(start)
    if cfg.reward.model:
        models.reward_model = frozen(cfg.reward.model, "score")
    if cfg.safety.cost_model:
        models.cost_model = frozen(cfg.safety.cost_model, "score")
    return models
