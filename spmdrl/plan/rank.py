"""Builds one simulated rank of a job: its world, its models (from config.json files only) and its engine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from spmdrl.config.classifier import FLAG, is_classifier, model_path
from spmdrl.config.engines import Part, pushed_parts
from spmdrl.config.schema import Config
from spmdrl.hub.build import language_model_class, sees_images
from spmdrl.hub.resolve import named
from spmdrl.hub.vision import read_vision
from spmdrl.plan.boxes import Everyone
from spmdrl.plan.engine import PaperEngine, at_any_place
from spmdrl.plan.engine_bytes import model_of
from spmdrl.plan.images import images_of, numbers_of
from spmdrl.plan.kinds import config_of, folder_of
from spmdrl.plan.numbers import META
from spmdrl.plan.paper import Paper
from spmdrl.plan.step import PaperRank, own_tensors
from spmdrl.plan.substitutes import install
from spmdrl.plan.traffic import Traffic
from spmdrl.policy import labels, learner
from spmdrl.policy import models as models_of_run
from spmdrl.policy.fsdp import policy as fsdp
from spmdrl.policy.models import build_models
from spmdrl.policy.objectives import distillation
from spmdrl.rl.compose import compose
from spmdrl.session.job import job_of
from spmdrl.spmd.mesh import world_from_group
from spmdrl.spmd.roles import AXES, roles_of
from spmdrl.spmd.world import World


def open_rank(cfg: Config, rank: int, size: int, kind: str, gpu_memory: int | None = None) -> PaperRank:
    """Build one simulated rank of a job. Each process can simulate only one rank.

    Args:
        cfg: validated settings.
        rank: the rank to build.
        size: number of ranks in the job.
        kind: the job's device type, `cuda` or `cpu`.
        gpu_memory: memory of one GPU in bytes, or None for a CPU.
    """
    folders, method = folders_of(cfg), job_of(cfg).method
    assert method is not None, "only jobs with a method can be planned"
    hf_config = config_of(cfg)
    tensors = model_of(hf_config, cfg.model.trust_remote_code)
    paper = Paper()
    install(paper, kind)
    roles, algo = roles_of(cfg.parallel, size), compose(cfg)
    samples = rank in roles.samplers

    def engine_of(place: Any) -> PaperEngine:
        return PaperEngine(cfg, place, hf_config, gpu_memory, tensors)

    elsewhere: dict[Part, Everyone] = {}
    if samples and rank not in roles.trainers:
        # This rank has no policy; build the first training rank's policy to compute what training ranks hold.
        first = open_world(cfg, roles.trainers[0], size)
        with _without_files(folders):
            policy = build_models(cfg, first, algo.needs).policy
        engine_at = at_any_place(engine_of(SimpleNamespace(engine_tp_rank=0)))
        elsewhere = {part: Everyone(first, policy, engine_at, part) for part in pushed_parts(cfg)}
    world = open_world(cfg, rank, size)
    # `paper` counts until the process exits, so its context is never exited.
    paper.__enter__()
    with _without_files(folders), paper.tagged("parameters"):
        models = build_models(cfg, world, algo.needs)
    for name, model in own_tensors(models):
        for owner, tensors_of in model.tensors_by_owner().items():
            paper.retag([x for x in tensors_of if x is not None], f"{name} {owner}")
    _name_axes(paper.traffic, cfg, world)
    engine = engine_of(world) if samples else None
    template = engine or engine_of(SimpleNamespace(engine_tp_rank=0))
    template.sleep(2)
    if engine is not None:
        _tag_memory(engine, paper, awake=models.policy is None)

    @cache
    def boxes(model: Any, part: Part) -> Everyone:
        if model is None:
            return elsewhere[part]
        # `Everyone` builds parts of other ranks' models, which must not count towards this rank's memory.
        with _disable_current_modes():
            return Everyone(world, model, at_any_place(template), part)

    def method_on(run: Any) -> Any:
        with _without_files(folders):
            return method(run)

    made = PaperRank(cfg, world, algo, models, engine, paper, boxes, method_on)
    made.hf_config = hf_config
    with _disable_current_modes(), torch.device("meta"):
        hf = language_model_class(hf_config).from_config(hf_config)
    sizes = {name: p.numel() for name, p in hf.named_parameters()}
    made.numbers = sum(sizes.values())
    made.expert_numbers = sum(n for name, n in sizes.items() if ".experts." in name)
    vision = read_vision(hf_config) if sees_images(hf_config) else None
    numbers = numbers_of(sizes, vision)
    made.tower_numbers = numbers["vision"] + numbers["projector"]
    if vision and all(model.vision for _, model in own_tensors(models)):
        # Prompts of a job with a model that reads text only show no images.
        made.images = images_of(cfg, hf_config, folders[cfg.model.path], numbers)
    return made


def _tag_memory(engine: PaperEngine, paper: Paper, awake: bool) -> None:
    """Tag the engine's allocations on wake-up as weights or KV cache. awake: True to wake it immediately."""
    wake = engine.wake

    def tagged(what: Any) -> None:
        with paper.tagged("engine weights" if what == "weights" else "KV cache"):
            wake(what)

    engine.wake = tagged  # type: ignore[method-assign]
    if awake:
        # On a rank that does not train, the engine never sleeps.
        tagged("weights")
        tagged("kv_cache")


def open_world(cfg: Config, rank: int, size: int) -> World:
    """Make this process one of `size` simulated ranks and return its world, which uses torch's meta device."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    return replace(world_from_group(cfg.parallel, cfg.engine_ranks, torch.device("cpu")), device=META)


def _name_axes(traffic: Traffic, cfg: Config, world: World) -> None:
    """Record the mesh axis of each of this rank's process groups. If axes share a group, the last one wins."""
    everyone: Any = dist.group.WORLD
    traffic.call(everyone, "all ranks")
    if world.data_group is not None:
        traffic.call(world.data_group, "data")
    if world.trains:
        for axis in AXES:
            traffic.call(world.mesh.get_group(axis), axis)
        for axis in range(world.shard_mesh.ndim):
            name = ("dp_replicate", "dp_shard")[axis - world.shard_mesh.ndim]
            traffic.call(world.shard_mesh.get_group(axis), name)
    if cfg.policy.backend == "megatron" and world.trains:
        from megatron.core import parallel_state as state

        groups = {
            "data": [state.get_data_parallel_group(), state.get_data_parallel_group(with_context_parallel=True)],
            "expert data": [state.get_expert_data_parallel_group()],
            "cp": [state.get_context_parallel_group()],
            "tp x ep": [state.get_expert_tensor_and_model_parallel_group()],
            "ep": [state.get_expert_model_parallel_group()],
            "tp": [state.get_tensor_model_parallel_group()],
            "pp": [state.get_pipeline_model_parallel_group(), state.get_embedding_group(check_initialized=False)],
        }
        for axis, several in groups.items():
            for group in several:
                # Pipeline stages other than the first and the last have no embedding group.
                if group is not None:
                    traffic.call(group, axis)


def folders_of(cfg: Config) -> dict[str, Path]:
    """Map each model path in the settings to its folder, for the policy and all other models of a run."""
    paths = {
        "--model.path": cfg.model.path,
        "--reference.path": cfg.reference.path,
        "--critic.path": cfg.critic.path,
        "--process-reward.path": cfg.process_reward.path,
        "--safety.cost-model": cfg.safety.cost_model,
    }
    paths |= {f"--distill.more-teachers {t.path}": t.path for t in cfg.further_teachers().values()}
    scorer = cfg.reward.model
    paths[f"{FLAG} {scorer}: path" if is_classifier(scorer) else FLAG] = model_path(scorer)
    folders = {}
    for flag, path in paths.items():
        with named(flag):
            folders |= {path: folder_of(path, cfg.model.trust_remote_code)} if path else {}
    return folders


@contextmanager
def _without_files(folders: dict[str, Path]) -> Iterator[None]:
    """Inside this context, policies read only config.json from these folders, and no weights."""

    def find(path: str, *_: Any) -> Path:
        return folders[path]

    places: list[tuple[Any, str, Any]] = [
        (learner, "resolve", find),
        (fsdp, "fill_model", lambda model, *_: model.to(META)),
        (fsdp, "prediction_heads", lambda *_: []),
        (models_of_run, "resolve", find),
        (models_of_run, "check_head", lambda *_: None),
        (models_of_run, "check_same_tokens", lambda *_: None),
        (distillation, "resolve", find),
        (labels, "resolve", find),
        (labels, "check_head", lambda *_: None),
        (labels, "differing_tokens", lambda *_: ([], 0)),
    ]
    if find_spec("megatron") is not None:
        from spmdrl.policy.megatron import convert
        from spmdrl.policy.megatron import policy as megatron

        places += [
            (megatron, "prediction_heads", lambda *_: []),
            (megatron, "stored", lambda *_: []),
            (convert, "load", lambda *_: None),
        ]
    with ExitStack() as stack:
        for module, name, value in places:
            stack.enter_context(patch.object(module, name, value))
        yield
