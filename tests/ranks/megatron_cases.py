"""Updates of one batch through either backend, for `test_megatron_policy.py`."""

import os
from datetime import timedelta
from pathlib import Path

import torch

from spmdrl.compose import compose
from spmdrl.config.schema import ParallelConfig
from spmdrl.models import Models
from spmdrl.policy.backends import backend
from spmdrl.policy.weights import on_first
from spmdrl.spmd.mesh import world_from_group
from tests.ranks.cases import config, synthetic_batch, update_models

LIMIT = 100.0


def open_models(world, axes: dict, sections: dict, folders: dict, kind: str):
    """(config, world of these axes, models that the algorithm needs); Megatron's groups are made anew."""
    cfg = config(**sections, parallel=axes)
    cfg.model.path, cfg.policy.backend = folders["policy"], kind
    if axes:
        world = world_from_group(ParallelConfig(**axes), 1, torch.device("cpu"), world.rank, timedelta(seconds=LIMIT))
    if kind == "megatron":
        from spmdrl.policy.megatron.model import initialize
        from spmdrl.policy.megatron.policy import layout_of

        initialize(layout_of(cfg))
    make, needs = backend(kind), compose(cfg).needs
    models = Models(make(cfg, world, 100))
    if "reference" in needs:
        models.reference = make(cfg, world, 0, trainable=False, path=folders["reference"])
    if "critic" in needs:
        models.critic = make(cfg, world, 100, path=folders["critic"], head="value")
    return cfg, world, models


def weights_of(world, models: Models) -> dict[str, torch.Tensor]:
    """Whole tensors of what is trained, by model and HF name; on rank 0. Collective."""
    weights = {}
    for name, model in (("policy", models.policy), ("critic", models.critic)):
        for bucket in on_first(model.pieces(), world, torch.float32) if model else ():
            weights |= {f"{name}/{k}": v.clone() for k, v in bucket.items()}
    return weights


def updates(world, cases: list, kind: str) -> dict:
    """Case -> (metrics, weights afterwards on rank 0) of one step on the same trajectories everywhere.

    cases: (key, axes, sections, folders).
    """
    out = {}
    for key, axes, sections, folders in cases:
        cfg, here, models = open_models(world, axes, sections, folders, kind)
        metrics = update_models(cfg, here, models, synthetic_batch())
        out[key] = metrics, weights_of(here, models)
    return out


def saves(world, cases: list, root: str) -> dict:
    """Case -> (metrics, weights) of the step after two that were saved under root; children that are left."""
    out = {}
    for key, axes, sections, folders in cases:
        cfg, here, models = open_models(world, axes, sections, folders, "megatron")
        for _ in range(2):
            update_models(cfg, here, models, synthetic_batch())
        before = weights_of(here, models)
        models.policy.save(Path(root) / key)
        metrics = update_models(cfg, here, models, synthetic_batch())
        out[key] = metrics, weights_of(here, models), before
    return out | {"children": children()}


def loads(world, cases: list, root: str) -> dict:
    """Case -> (metrics, weights) of the step after what `saves` left."""
    out = {}
    for key, axes, sections, folders in cases:
        cfg, here, models = open_models(world, axes, sections, folders, "megatron")
        models.policy.load(Path(root) / key)
        before = weights_of(here, models)
        metrics = update_models(cfg, here, models, synthetic_batch())
        out[key] = metrics, weights_of(here, models), before
    return out


def children() -> list[str]:
    """Processes that this one started and that still are."""
    me = os.getpid()
    return (Path("/proc") / str(me) / "task" / str(me) / "children").read_text().split()


def parked(world, axes: dict, sections: dict, folders: dict) -> tuple:
    """(metrics, weights) of two steps, without and with a stay on disk between them; bytes before, away, after."""
    out = []
    for away in (False, True):
        cfg, here, models = open_models(world, axes, sections, folders, "megatron")
        update_models(cfg, here, models, synthetic_batch())
        sizes = [models.policy.bytes_by_owner()]
        if away:
            for _, model in models.named():
                model.offload("disk")
            sizes.append(models.policy.bytes_by_owner())
            for _, model in models.named():
                model.onload()
            sizes.append(models.policy.bytes_by_owner())
        metrics = update_models(cfg, here, models, synthetic_batch())
        out.append((metrics, weights_of(here, models), sizes))
    return tuple(out)
