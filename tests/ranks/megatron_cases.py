"""Updates of one batch through either backend, for `test_megatron_policy.py`."""

import dataclasses
import gc
import os
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from spmdrl.config.schema import ParallelConfig
from spmdrl.hub.routing import FREE
from spmdrl.policy.contract import LossResult, Objective, Shared
from spmdrl.policy.models import Models, backend
from spmdrl.rl.compose import compose
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.mesh import world_from_group
from spmdrl.tracking.metrics import Metrics
from spmdrl.weights import safetensors as weights
from spmdrl.weights.reshard import Piece
from spmdrl.weights.safetensors import SafetensorsWriter, on_first
from tests.ranks.cases import bytes_on_disk, config, gradients_of, packed, synthetic_batch, update_models

LIMIT = 100.0


FIRST: set = set()
"""Groups of the rank before its first case."""


def drop_groups() -> None:
    """Ends the groups of earlier cases: each has a thread that wakes a hundred times a second."""
    groups = set(dist.distributed_c10d._world.pg_map)
    if not FIRST:
        FIRST.update(groups)
        # Megatron is imported by here; without this each collection looks at all modules.
        gc.freeze()
    gc.collect()
    for group in groups - FIRST:
        dist.destroy_process_group(group)
    gc.collect()


def open_models(world, axes: dict, sections: dict, folders: dict, kind: str, replay: bool = False):
    """Returns (config, world of these axes, models that the algorithm needs); Megatron's groups are made anew."""
    drop_groups()
    cfg = config(**sections, parallel=axes)
    cfg.model.path, cfg.policy.backend = folders["policy"], kind
    if axes:
        world = world_from_group(ParallelConfig(**axes), 1, torch.device("cpu"), world.rank, timedelta(seconds=LIMIT))
    if kind == "megatron":
        from spmdrl.policy.megatron.model import initialize
        from spmdrl.policy.megatron.policy import layout_of

        initialize(layout_of(cfg))
    make, needs = backend(kind), compose(cfg).needs
    models = Models(make(cfg, world, 100, routing_replay=replay))
    if "reference" in needs:
        models.reference = make(cfg, world, 0, trainable=False, path=folders["reference"])
    if "critic" in needs:
        models.critic = make(cfg, world, 100, path=folders["critic"], head="value")
    return cfg, world, models


def weights_of(world, models: Models) -> dict[str, torch.Tensor]:
    """Gathers whole tensors of all that is trained, by model and HF name, on rank 0. Collective."""
    found = {}
    for name, model in (("policy", models.policy), ("critic", models.critic)):
        for bucket in on_first(model.pieces(), world, torch.float32) if model else ():
            found |= {f"{name}/{k}": v.clone() for k, v in bucket.items()}
    return found


@contextmanager
def forwards(kind: str):
    """Counts calls of attention and of MLPs by name, and of attention with a gradient as `trained`.

    It counts those of Megatron's modules in plain torch; for other kinds of policies nothing.
    """
    counts = Counter()
    if kind != "megatron":
        yield counts
        return
    from megatron.core.transformer.mlp import MLP

    from spmdrl.policy.megatron.attention import CoreAttention

    kept = {CoreAttention: CoreAttention.forward, MLP: MLP.forward}

    def counted(cls, name):
        def forward(self, *args, **kwargs):
            counts[f"forwards/{name}"] += 1
            counts["forwards/trained"] += name == "attention" and torch.is_grad_enabled()
            return kept[cls](self, *args, **kwargs)

        return forward

    CoreAttention.forward, MLP.forward = counted(CoreAttention, "attention"), counted(MLP, "mlp")
    try:
        yield counts
    finally:
        for cls, forward in kept.items():
            cls.forward = forward


def updates(world, cases: list, kind: str) -> dict:
    """Returns case -> (metrics, weights afterwards on rank 0) of one step on the same trajectories everywhere.

    cases: (key, axes, sections, folders).
    """
    out = {}
    for key, axes, sections, folders in cases:
        cfg, here, models = open_models(world, axes, sections, folders, kind)
        with forwards(kind) as counts:
            metrics = update_models(cfg, here, models, synthetic_batch())
        out[key] = metrics | counts, weights_of(here, models)
    return out


def told_batch() -> list:
    """Makes a `synthetic_batch` with random choices of 2 of 4 experts in 2 layers, some tokens free to choose."""
    out = []
    for t in synthetic_batch():
        rng = torch.Generator().manual_seed(100 * t.position + t.sample)
        told = torch.rand(len(t.tokens), 2, 4, generator=rng).argsort(-1)[..., :2].flatten(1).to(torch.int16)
        told[::5] = told[-1] = FREE
        out.append(dataclasses.replace(t, experts=told))
    return out


def replays(world, cases: list, kind: str) -> dict:
    """Returns case -> (logp by sequence on this rank, metrics, weights) of a step with the experts of `told_batch`."""
    out = {}
    for key, axes, sections, folders in cases:
        cfg, here, models = open_models(world, axes, sections, folders, kind, True)
        batch = packed(cfg, here, told_batch(), 4)
        logp = models.policy.logprobs(batch, 1.0)[0].split(batch.lengths.tolist())
        names = zip(batch.seq["position"].tolist(), batch.seq["sample"].tolist(), strict=True)
        metrics = update_models(cfg, here, models, told_batch(), batch)
        out[key] = dict(zip(names, logp, strict=True)), metrics, weights_of(here, models)
    return out


class Nothing(Objective):
    """Computes a loss of 0."""

    columns, temperature = frozenset(), 1.0

    def prepare(self, share, index):
        return Shared()

    def loss(self, micro, first_T, second_T, shared):
        return LossResult(0.0 * (first_T.sum() + second_T.sum()), Metrics())


def balances(world, cases: list) -> dict:
    """Returns case -> (metrics, weights) of an update whose only loss is that for evenly used experts."""
    out = {}
    for key, axes, sections, folders in cases:
        cfg, here, models = open_models(world, axes, sections, folders, "megatron")

        batch = packed(cfg, here, synthetic_batch())
        metrics = models.policy.update(batch, Nothing())
        metrics = metrics.reduce(partial(all_reduce, group=here.data_group), here.device)
        out[key] = metrics, weights_of(here, models)
    return out


def halves(world, cases: list, kind: str) -> dict:
    """Returns case -> (logp by sequence on this rank, whole gradients on rank 0) of an update; nothing is clipped."""
    out = {}
    for key, axes, sections, folders in cases:
        cfg, here, models = open_models(world, axes, sections, folders, kind)
        policy, batch = models.policy, packed(cfg, here, synthetic_batch())
        logp = policy.logprobs(batch, 1.0)[0].split(batch.lengths.tolist())
        names = zip(batch.seq["position"].tolist(), batch.seq["sample"].tolist(), strict=True)
        step = partial(update_models, cfg, here, models, synthetic_batch(), batch)
        if kind == "fsdp":
            gradients = gradients_of(policy, step)[-1]
        else:
            from spmdrl.policy.megatron.convert import slots

            step()
            held = slots(policy.trainer.models, lambda p: p.main_grad)
            pieces = [Piece(h.name, h.shape, h.box, h.view) for h in held]
            gradients = {k: v.clone() for some in on_first(pieces, here, torch.float32) for k, v in some.items()}
        out[key] = dict(zip(names, logp, strict=True)), gradients
    return out


def keeps(world, cases: list, kind: str, root: str) -> None:
    """Saves models under root, in files of a few tensors each."""
    weights.SafetensorsWriter = partial(SafetensorsWriter, shard_bytes=1 << 15)
    for key, axes, sections, folders in cases:
        _, _, models = open_models(world, axes, sections, folders, kind)
        models.policy.save(Path(root) / f"{kind} {key}")
    weights.SafetensorsWriter = SafetensorsWriter


def by_backend(
    world, kind: str, root: str, steps=(), told=(), balanced=(), half=(), kept=(), moves=(), grows=()
) -> tuple:
    """Runs all cases in one group of ranks: several save `moves`, which one loads; `grows` the other way round."""
    keeps(world, kept, kind, root)
    return (
        updates(world, steps, kind),
        replays(world, told, kind),
        balances(world, balanced),
        halves(world, half, kind),
        (saves if world.size > 1 else loads)(world, moves, root)
        | (loads if world.size > 1 else saves)(world, grows, root),
    )


def saves(world, cases: list, root: str) -> dict:
    """Returns case -> (metrics, weights) of the step after two that are saved under root, and remaining children."""
    out = {}
    for key, axes, sections, folders in cases:
        cfg, here, models = open_models(world, axes, sections, folders, "megatron")
        for _ in range(2):
            update_models(cfg, here, models, synthetic_batch())
        before = weights_of(here, models)
        for name, model in models.named():
            if name in ("policy", "critic"):
                model.save(Path(root) / key / name)
        metrics = update_models(cfg, here, models, synthetic_batch())
        out[key] = metrics, weights_of(here, models), before
    return out | ({"children": children()} if world.size > 1 else {})


def loads(world, cases: list, root: str) -> dict:
    """Returns case -> (metrics, weights) of the step after those that `saves` left."""
    out = {}
    for key, axes, sections, folders in cases:
        cfg, here, models = open_models(world, axes, sections, folders, "megatron")
        for name, model in models.named():
            if name in ("policy", "critic"):
                model.load(Path(root) / key / name)
        before = weights_of(here, models)
        metrics = update_models(cfg, here, models, synthetic_batch())
        out[key] = metrics, weights_of(here, models), before
    return out


def children() -> list[str]:
    """Processes that this one started and that still run."""
    me = os.getpid()
    return (Path("/proc") / str(me) / "task" / str(me) / "children").read_text().split()


def without_tokens(world, folders: dict, axes: dict, kind: str) -> tuple[torch.Tensor, ...]:
    """Returns logp and entropy where some tokens are excluded, and the tokens."""
    cfg, here, models = open_models(world, axes, {"algo": {"preset": "grpo", "kl_coef": 0.0}}, folders, kind)
    batch = packed(cfg, here, synthetic_batch(), 4)
    models.policy.exclude((2, 30, 46))
    return *models.policy.logprobs(batch, 0.8), batch.token["tokens"]


def parked(world, axes: dict, sections: dict, folders: dict) -> tuple:
    """Returns (metrics, weights) of two steps, without and with a stay on disk, and the bytes in each state."""
    out = []
    for away in (False, True):
        cfg, here, models = open_models(world, axes, sections, folders, "megatron")
        update_models(cfg, here, models, synthetic_batch())
        sizes = [models.policy.bytes_by_owner()]
        if away:
            for _, model in models.named():
                model.offload("disk")
            sizes.append(models.policy.bytes_by_owner())
            on_disk = bytes_on_disk(models.policy)
            for _, model in models.named():
                model.onload()
            sizes += [models.policy.bytes_by_owner(), on_disk]
        metrics = update_models(cfg, here, models, synthetic_batch())
        out.append((metrics, weights_of(here, models), sizes))
    return tuple(out)
