"""Runs one rank of a job on paper: its models, its engine, and the phases of a step, by the job's own code."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

from spmdrl.config.engines import Part, pushed_parts
from spmdrl.config.schema import Config
from spmdrl.plan.batch import alike, full_batch
from spmdrl.plan.boxes import Everyone, Known
from spmdrl.plan.paper import Paper
from spmdrl.plan.passes import Pass, Work, few_passes
from spmdrl.plan.push import plan_push
from spmdrl.plan.storages import Moment
from spmdrl.policy.objectives.algorithm import Algorithm
from spmdrl.spmd.roles import roles_of
from spmdrl.spmd.world import World


@dataclass
class Step:
    """The counts of one rank's step on paper."""

    held: dict[str, int]
    """Bytes by owner while the rank trains, as the device table counts them, before the first gradient."""
    moments: dict[str, Moment]
    """The peak of each phase: push, rollout, training."""
    works: list[Work]
    push: Pass | None
    parked: dict[str, int]
    """Bytes off the device while the engine samples, by place."""
    host: dict[str, int]
    """Bytes that are always in host memory, by purpose."""
    numbers: int
    """Parameters that this rank holds, of all its models."""
    models: tuple[str, ...]
    """The names of these models."""
    moved: tuple[int, int]
    """Bytes moved to the host, and back."""
    checkpoint: int
    """Bytes of a checkpoint of all ranks; 0 on a rank that does not train."""


class PaperRank:
    """A rank of the job, with its models and its engine."""

    def __init__(
        self, cfg: Config, world: World, algo: Algorithm, models: Any, engine: Any, paper: Paper, everyone: Known
    ):
        """engine: this rank's; None if it does not sample. everyone: finds the boxes that all ranks hold of a model."""
        self.cfg, self.world, self.algo, self.models, self.engine, self.paper = cfg, world, algo, models, engine, paper
        self.everyone = everyone
        from spmdrl.session.device_table import Memory
        from spmdrl.tracking.metrics import Timer

        self.works: list[Work] = []
        self.hf_config: Any = None
        self.numbers = self.expert_numbers = 0
        self.memory = Memory(cfg, models, engine, Timer(), world)
        self.memory.meter = self  # type: ignore[assignment]
        self.laps: list[Moment] = []
        if models.policy is not None or engine is not None:
            plan_push(paper, self.memory.transfer, lambda part: everyone(models.policy, part))
            # In a real job, a rank that only trains or only samples gets this from the other ranks.
            self.memory._stale = lambda: (0, True)  # type: ignore[method-assign]

    def checkpoint(self) -> int:
        """Return the bytes of a checkpoint, by the models' own count."""
        from spmdrl.checkpoint.store import saved_models
        from spmdrl.hub.lora import are_adapters
        from spmdrl.policy import learner

        total = 0
        for model in saved_models(self.models):

            def listed(pieces: list, group: Any, model: Any = model) -> list:
                adapted = are_adapters(p.name for p in pieces)
                part: Part = "adapter" if adapted else "base"
                return self.everyone(model, part).entries

            with patch.object(learner, "catalogue", listed):
                total += model.checkpoint_bytes()
        return total

    def lap(self) -> tuple[int, int]:
        """Meter of the device table: return the bytes at this moment, and the peak since the last call."""
        self.laps.append(self.paper.lap())
        return self.paper.live, self.laps[-1].live

    # ── a step ───────────────────────────────────────────────────────────────

    def step(self, rounds: tuple[int, ...] = (1, 2)) -> Step:
        """Run one step. rounds: numbers of rounds of micro-batches to measure, from which a whole step is scaled."""
        self._ready()
        moments: dict[str, Moment] = {}
        before, began = self.paper.traffic.copy(), self.paper.flops
        self.paper.lap()
        self.laps.clear()
        self.paper.tag = "push buffers"
        with self.memory.rollout_phase():
            self.paper.tag = "activations"
            *pushing, sampling = self.laps
            moments["push"] = max(pushing, key=lambda m: m.live, default=sampling)
            pushed = self.paper.traffic.since(before)
            parked = dict(self.paper.parked)
        moments["rollout"] = max(sampling, self.laps[-1], key=lambda m: m.live)
        self.laps.clear()
        push = Pass(1, moments["push"], self.paper.flops - began, pushed) if self.memory.last_push else None
        with self.memory.training_phase():
            # The first lap ends with the engine's sleep, and its peak is the rollout's.
            del self.laps[: self.engine is not None and self.world.trains]
            held = {row.owner: row.bytes for row in self.memory.table() if row.place == "device"}
            self._train(rounds)
        peaks = [p.peak for work in self.works for p in work.passes]
        moments["training"] = max([*self.laps, *peaks], key=lambda m: m.live)
        own = own_tensors(self.models)
        numbers = sum(getattr(p, "_local_tensor", p).numel() for _, m in own for p in parameters_of(m))
        names, moved = tuple(name for name, _ in own), (self.paper.to_host, self.paper.from_host)
        host = dict(self.paper.host)
        return Step(held, moments, self.works, push, parked, host, numbers, names, moved, self.checkpoint())

    def _ready(self) -> None:
        """Create the state of every optimizer, as after a first step."""
        from spmdrl.policy.optimizer import fill_state

        for name, model in self.models.learning().items():
            if getattr(model, "optimizer", None) is not None:
                with self.paper.tagged(f"{name} optimizer"):
                    fill_state(model.optimizer)
            trainer = getattr(model, "trainer", None)
            if trainer is not None:
                with self.paper.tagged(f"{name} optimizer"):
                    model.trainer.zero()
                    model.gradient_norm()
                    model.step(0.0, 1.0)
            for kind, tensors in model.tensors_by_owner().items():
                self.paper.retag([x for x in tensors if x is not None], f"{name} {kind}")

    def _train(self, rounds: tuple[int, ...]) -> None:
        from spmdrl.rl.run import PolicyGradient

        if not (self.world.trains or self.world.scores):
            return
        rollout, peers = self.cfg.rollout, self.world.data_peers
        sequences = rollout.prompts_per_step * rollout.samples_per_prompt
        mine = -(-sequences // (self.world.data_size if self.world.trains else scorers(self.models)))
        samples = min(mine, rollout.samples_per_prompt)
        batch = full_batch(self.cfg, self.algo, -(-mine // samples), samples, 128)
        updates = self.cfg.algo.updates_per_step
        one = replace(self.cfg, algo=replace(self.cfg.algo, updates_per_step=1))
        run: Any = SimpleNamespace(cfg=one, algo=self.algo, models=self.models, peers=peers)
        method = PolicyGradient(run)
        with alike(), few_passes(own_tensors(self.models), self.paper, self.works, updates, rounds):
            if self.world.trains:
                batch, _ = method.score(batch)
                batch = method.advantages(batch)
                if updates > 1:
                    # Each update gets whole groups.
                    batch.seq["update"] = batch.seq["position"] * updates // (int(batch.seq["position"].max()) + 1)
                method.update(batch, 1 << 30)
            else:
                method.answer(batch)


def scorers(models: Any) -> int:
    """Return the number of shares into which scoring ranks divide a step's sequences."""
    return max((len(model.scorers) for _, model in models.named()), default=1)


def own_tensors(models: Any) -> list[tuple[str, Any]]:
    """Return the models of a rank that have tensors of their own, by name; a policy's base has none.

    For a frozen model that other ranks query, return the model itself.
    """
    from spmdrl.policy.fsdp.lora import BaseOf
    from spmdrl.policy.remote import RemotePolicy

    here = [(name, m.model if isinstance(m, RemotePolicy) else m) for name, m in models.named()]
    return [(name, m) for name, m in here if m is not None and not isinstance(m, BaseOf)]


def parameters_of(model: Any) -> list[Any]:
    """Return a policy's parameters on this rank."""
    return list(model.shards) if hasattr(model, "shards") else [p for chunk in model.chunks for p in chunk.parameters()]


def open_rank(cfg: Config, rank: int, size: int, kind: str, gpu_memory: int | None = None) -> PaperRank:
    """Build one rank of a job on paper. This process can hold no other rank afterwards.

    Args:
        cfg: settings that passed their checks.
        rank: of `size`.
        size: ranks of the job.
        kind: `cuda` or `cpu`, the type of its devices.
        gpu_memory: bytes of one GPU; None for a CPU.
    """
    from transformers import AutoConfig

    from spmdrl.plan.engine import PaperEngine, at_any_place
    from spmdrl.plan.engine_weights import model_of
    from spmdrl.plan.readers import folders_of, without_files
    from spmdrl.plan.substitutes import install
    from spmdrl.plan.world import name_axes, open_world
    from spmdrl.policy.models import build_models
    from spmdrl.rl.compose import compose

    folders = folders_of(cfg)
    hf_config = AutoConfig.from_pretrained(folders[cfg.model.path], trust_remote_code=cfg.model.trust_remote_code)
    tensors = model_of(hf_config, cfg.model.trust_remote_code)

    paper = Paper()
    install(paper, kind)
    roles, algo = roles_of(cfg.parallel, size), compose(cfg)
    samples = rank in roles.samplers

    def engine_of(place: Any) -> PaperEngine:
        return PaperEngine(cfg, place, hf_config, gpu_memory, tensors)

    elsewhere: dict[Part, Everyone] = {}
    if samples and rank not in roles.trainers:
        # The first training rank's place gives the boxes that training ranks hold.
        first = open_world(cfg, roles.trainers[0], size)
        with without_files(folders):
            policy = build_models(cfg, first, algo.needs).policy
        engine_at = at_any_place(engine_of(SimpleNamespace(engine_tp_rank=0)))
        elsewhere = {part: Everyone(first, policy, engine_at, part) for part in pushed_parts(cfg)}
    world = open_world(cfg, rank, size)
    # One for the whole job, until the process ends.
    paper.__enter__()
    with without_files(folders), paper.tagged("parameters"):
        models = build_models(cfg, world, algo.needs)
    for name, model in own_tensors(models):
        for owner, tensors_of in model.tensors_by_owner().items():
            paper.retag([x for x in tensors_of if x is not None], f"{name} {owner}")
    name_axes(paper.traffic, cfg, world)
    made = engine_of(world) if samples else None
    template = made or engine_of(SimpleNamespace(engine_tp_rank=0))
    template.sleep(2)
    if made is not None:
        wake = made.wake

        def tagged(what: Any) -> None:
            with paper.tagged("engine weights" if what == "weights" else "KV cache"):
                wake(what)

        made.wake = tagged  # type: ignore[method-assign]
        if models.policy is None:
            # Without a trainer on this rank the engine never sleeps.
            tagged("weights")
            tagged("kv_cache")
    known = Known(world, at_any_place(template), elsewhere)
    rank_on_paper = PaperRank(cfg, world, algo, models, made, paper, known)
    rank_on_paper.hf_config = hf_config
    rank_on_paper.numbers, rank_on_paper.expert_numbers = count_numbers(hf_config)
    return rank_on_paper


def count_numbers(hf_config: Any) -> tuple[int, int]:
    """Return the number of a model's parameters, and of those in routed experts."""
    from transformers import AutoModelForCausalLM

    with _disable_current_modes(), torch.device("meta"):
        named = [(n, p.numel()) for n, p in AutoModelForCausalLM.from_config(hf_config).named_parameters()]
    return sum(n for _, n in named), sum(n for name, n in named if ".experts." in name)
