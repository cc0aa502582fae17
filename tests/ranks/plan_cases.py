"""One job twice, for `test_plan.py`: on real gloo ranks, and by the planner, both counted in the same way."""

import ctypes
import gc
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, Work

from spmdrl.checkpoint.store import saved_models
from spmdrl.config import backends
from spmdrl.config.placement import trainers
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch
from spmdrl.data.distribute import assign_updates
from spmdrl.data.placeholders import COLUMN
from spmdrl.engines.build import build_engine
from spmdrl.hub.build import sees_images
from spmdrl.hub.vision import read_vision
from spmdrl.plan.images import images_of
from spmdrl.plan.kinds import config_of
from spmdrl.plan.paper import Paper
from spmdrl.plan.scale import peak_of, rank_of
from spmdrl.plan.step import full_batch, own_tensors
from spmdrl.plan.substitutes import FINDS_SHAPES, aside
from spmdrl.plan.traffic import Traffic
from spmdrl.policy.models import build_models
from spmdrl.rl.compose import compose
from spmdrl.rl.score import score, serve
from spmdrl.rl.update import update
from spmdrl.session.device_table import Memory
from spmdrl.spmd.mesh import world_from_group
from spmdrl.tracking.metrics import Timer
from spmdrl.weights.boxes import size
from tests.ranks.megatron_cases import drop_groups


class RealPaper(Paper):
    """Counts what a real rank over gloo allocates and sends.

    A thread of gloo's lets go of the tensors of a collective at some time after its end, so they would be counted for
    a while longer, a while that depends on the machine's load. It is given their memory without the tensors.
    """

    def __init__(self):
        super().__init__(device="cpu")
        self.travelling: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run one operation."""
        self.travelling = [(work, held) for work, held in self.travelling if not work.is_completed()]
        if func.namespace != "c10d":
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.traffic.note(func, args)
        out = func(*(of_memory(x) for x in args), **kwargs or {})
        if func.overloadpacket.__name__ in ("send", "recv_"):
            self.travelling.append((Work.unbox(out), args))
            return out
        # gloo copies parts of a whole that it keeps, where a GPU's library writes them to their places.
        return ended(out)


def ended(out: Any) -> Any:
    """Waits for works among the results of a collective, and returns the results with works that ended."""
    if isinstance(out, (list, tuple)):
        return type(out)(ended(x) for x in out)
    if not isinstance(out, torch.ScriptObject):
        return out
    Work.unbox(out).wait()
    return FakeWork().boxed()


def of_memory(x: Any) -> Any:
    """Returns tensors of the same memory, which they do not own; anything else as it is."""
    if isinstance(x, (list, tuple)):
        return type(x)(of_memory(y) for y in x)
    if not isinstance(x, torch.Tensor) or not x.numel():
        return x
    storage = x.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


def steady() -> None:
    """Makes what this process allocates the same in every run, on paper and on a real rank.

    Products are left to torch: the tiles and widened copies of a host's own are not planned. No garbage is collected
    inside a pass: reference cycles hold activations until then, and the moment depends on all that came before.
    """
    from spmdrl_kernels import host

    gc.disable()
    host.AVAILABLE = host.WIDENS = False


@contextmanager
def sharded_by_layer():
    """By `auto`, FSDP gathers layer by layer, as it does models larger than these."""
    with patch.dict(backends.GATHERED, whole=0, once=0):
        yield


@contextmanager
def host_apart():
    """Host memory is another place than the device, as beside a GPU: `--policy.offload host` moves tensors."""
    with patch("spmdrl.policy.learner.moves", lambda place, device: place != "none"):
        yield


@contextmanager
def even_choice():
    """All experts get as many tokens, as the planner takes it: routers of random weights do not spread them evenly."""
    choose = torch.topk

    def topk(x, k, dim=-1, *args, **more):
        values, chosen = choose(x, k, dim, *args, **more)
        if x.dim() != 2 or not x.dtype.is_floating_point:
            return values, chosen
        chosen = (torch.arange(chosen.numel()) % x.shape[dim]).view(chosen.shape)
        return x.gather(dim, chosen), chosen

    with patch.object(torch, "topk", topk):
        yield


@contextmanager
def followed(paper: Paper):
    """Storages that change their size are followed, and tensors by which DTensor finds shapes are not: no rank's."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    find = getattr(ShardingPropagator, FINDS_SHAPES)
    resize = torch.UntypedStorage.resize_

    def resized(self, size):
        out = resize(self, size)
        paper.resized(self)
        return out

    with (
        patch.object(ShardingPropagator, FINDS_SHAPES, aside(paper, find)),
        patch.object(torch.UntypedStorage, "resize_", resized),
    ):
        yield


def by_kind(sent: dict[tuple[str, str], int]) -> dict[str, int]:
    """Bytes by kind of collective, over all groups."""
    out: dict[str, int] = {}
    for (_, kind), n in sent.items():
        out[kind] = out.get(kind, 0) + n
    return {kind: n for kind, n in out.items() if n}


def inputs(model: Any) -> list[torch.Tensor]:
    """Returns the inputs that Megatron's chunks of a model keep; none under FSDP."""
    if not hasattr(model, "chunks"):
        return []
    from spmdrl.policy.megatron.convert import unwrapped

    return [x for chunk in model.chunks if (x := unwrapped(chunk).decoder.input_tensor) is not None]


class Watched:
    """Measures the passes of a real model: what a pass takes beyond what is held, and what it sends."""

    def __init__(self, name: str, model: Any, paper: Paper):
        self.name, self.model, self.paper = name, model, paper
        self.found: dict[str, tuple[int, dict[str, int]]] = {}
        self.begun: tuple[int, Traffic] = 0, Traffic()
        numbers, gradient, norm, step = model.numbers, model.gradient, model.gradient_norm, model.step

        def all_numbers(*args):
            self.begin()
            out = [x for x in numbers(*args)]
            self.end("logp")
            return out

        def whole_gradient(*args):
            self.begin()
            return gradient(*args)

        def gradient_norm():
            out = norm()
            self.end("update")
            return out

        def optimizer_step(*args):
            paper.lap()
            self.begun = self.begun[0], paper.traffic.copy()
            step(*args)
            self.end("update")

        model.numbers, model.gradient = all_numbers, whole_gradient
        model.gradient_norm, model.step = gradient_norm, optimizer_step

    def begin(self) -> None:
        """A pass begins; FSDP's root, which may be gathered since an earlier one, is not."""
        # An input that a pass leaves would hide, in a plan, that later passes hold an input too.
        assert not inputs(self.model), "a pass left its last input"
        self.model.reshard()
        gc.collect()
        self.paper.lap()
        self.begun = self.paper.live, self.paper.traffic.copy()

    def end(self, kind: str) -> None:
        """It ended."""
        live, traffic = self.begun
        growth = self.paper.lap().live - live
        before, sent = self.found.get(kind, (0, {}))
        more = by_kind(self.paper.traffic.since(traffic).bytes)
        self.found[kind] = max(growth, before), summed([sent, more])


def real(world, cases: list) -> dict:
    """Returns case -> what this rank holds, takes and sends. cases: (key, config)."""
    steady()
    with even_choice(), host_apart():
        return {key: measured(world, cfg) for key, cfg in cases}


def opened(world, cfg: Config) -> tuple:
    """Returns the world of a case and its algorithm; groups of earlier cases end."""
    drop_groups()
    world = world_from_group(cfg.parallel, cfg.engine_ranks, torch.device("cpu"), world.rank)
    if cfg.policy.backend == "megatron" and (world.trains or world.scores):
        from spmdrl.policy.megatron.model import initialize
        from spmdrl.policy.megatron.policy import layout_of

        initialize(layout_of(cfg), world.role_group)
    return world, compose(cfg)


def measured(world, cfg: Config) -> dict:
    """Measures a second step of a job on this rank: its optimizers have their state."""
    world, algo = opened(world, cfg)
    paper, watched = RealPaper(), []
    with paper, followed(paper), sharded_by_layer(), boxes_seen() as boxes:
        models = build_models(cfg, world, algo.needs)
        engine = build_engine(cfg, world, {2}) if world.samples else None
        if engine:
            # At its first weights alone it compares two ways of decoding. A plan is of a step in the middle of a run;
            # and where experts follow a token's place in the batch, as here, no two ways agree.
            engine.decoder.checked = True
        memory = Memory(cfg, models, engine, Timer(), world)
        out: dict[str, Any] = {}
        for again in (False, True):
            push = pushed(memory, paper)
            with memory.training_phase():
                if again:
                    out["held"] = {row.owner: row.bytes for row in memory.table() if row.place == "device"}
                    watched = [Watched(name, model, paper) for name, model in own_tensors(models)]
                train(cfg, world, models, algo)
            # The first push plans its routes; by the second one optimizers have moments, which leave the device.
            out |= {"away": push["away"]} if again else push
        out["boxes"] = boxes
        if not (world.trains or world.samples):
            # Such a rank gathers the boxes of others on the host, and neither sends nor receives.
            out |= {"boxes": [], "push": 0}
    for phase in ("logp", "update"):
        found = [w.found[phase] for w in watched if phase in w.found]
        out[phase] = max((growth for growth, _ in found), default=0)
        out[phase + " sent"] = summed([sent for _, sent in found])
    return out


def saves(world, cases: list) -> dict:
    """Returns case -> bytes of a real checkpoint; 0 on ranks that write none. cases: (key, config)."""
    return {key: saved(world, cfg) for key, cfg in cases}


def saved(world, cfg: Config) -> int:
    """Saves all that a checkpoint holds in the run's folder; returns the bytes of its files. Collective."""
    world, algo = opened(world, cfg)
    for i, model in enumerate(saved_models(build_models(cfg, world, algo.needs))):
        # Beside it are a model's settings and its tokenizer, which these models lack.
        model.fixed = {"config.json": b"{}"} if world.is_first else {}
        model.save(Path(cfg.run.dir) / str(i))
    dist.barrier()
    return sum(file.stat().st_size for file in Path(cfg.run.dir).rglob("*") if file.is_file())


def planned_save(cfg: Config, ranks: int) -> int:
    """Returns the bytes of a checkpoint as the planner says. It needs a process of its own."""
    from spmdrl.plan.rank import open_rank

    return open_rank(cfg, 0, ranks, "cpu", None).checkpoint()


def summed(counts: list[dict[str, int]]) -> dict[str, int]:
    """Adds counts up."""
    return {key: sum(c.get(key, 0) for c in counts) for key in {key for c in counts for key in c}}


def pushed(memory: Memory, paper: Paper) -> dict[str, Any]:
    """Goes through a rollout phase without rollouts; returns what its push received, sent and took, and what left."""
    from spmdrl.weights.reshard import Reshard

    start, received = Reshard._start, 0

    def counted(self, bucket, pieces):
        nonlocal received
        received += sum(
            size(box) * self.dtypes[i].itemsize for regions in bucket.receive.values() for i, box in regions
        )
        return start(self, bucket, pieces)

    push, out = memory._push, {}

    def measured_push():
        paper.lap()
        live, traffic = paper.live, paper.traffic.copy()
        push()
        out["push"] = paper.lap().live - live
        out["push sent"] = by_kind(paper.traffic.since(traffic).bytes).get("send", 0)

    counting = patch.object(Reshard, "_start", counted)
    with counting, patch.object(memory, "_push", measured_push), memory.rollout_phase():
        out["away"] = summed([{row.place: row.bytes} for row in memory.table() if row.place in ("host", "disk")])
    return out | {"received": received}


@contextmanager
def boxes_seen():
    """Notes the boxes that all ranks hold and need, from which a push is planned: by name, whatever the order."""
    from spmdrl.weights import reshard

    seen: list = []
    routes = reshard.Routes

    def noted(held, wanted, me, pieces, entries, buckets):
        of_all = [
            [sorted([entries[row[0]].name, *row[1:]] for row in sets.rows[i].tolist()) for i in sets.of.tolist()]
            for sets in (held, wanted)
        ]
        seen.append(of_all)
        return routes(held, wanted, me, pieces, entries, buckets)

    with patch.object(reshard, "Routes", noted):
        yield seen


def batch_of(cfg: Config, world, algo) -> Batch:
    """The batch of the planner, on a real rank; tokens differ, so that gradients of a group do not cancel out."""
    sequences = cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt
    mine = -(-sequences // world.data_size)
    samples = min(mine, cfg.rollout.samples_per_prompt)
    groups = -(-mine // samples)
    hf_config = config_of(cfg)
    vision = read_vision(hf_config) if sees_images(hf_config) else None
    images = vision and images_of(cfg, hf_config, Path(cfg.model.path), {"vision": 0, "projector": 0})
    batch = full_batch(cfg, algo, groups, samples, 128, images)
    words = torch.arange(batch.n_tokens) * 7 % 101 + 13
    batch.token["tokens"] = torch.where(batch.token[COLUMN] > 0, batch.token["tokens"], words) if images else words
    if batch.images is not None:
        # Pixels of a plan have no values. A batch holds an image once.
        pixels = {image.name: torch.ones(image.pixels.shape) for row in batch.images for image in row}
        batch.images = [tuple(replace(image, pixels=pixels[image.name]) for image in row) for row in batch.images]
    return assign_updates(batch, cfg.algo.updates_per_step, groups, list(range(groups)))


def train(cfg: Config, world, models, algo) -> None:
    """Scores a batch and updates on it; a rank that scores answers for the frozen models."""
    if not (world.trains or world.scores):
        return
    batch = batch_of(cfg, world, algo)
    if not world.trains:
        return serve(batch.select(torch.zeros(0, dtype=torch.int64)), models, algo, cfg.rollout.temperature)
    score(batch, models, algo, cfg, world.data_peers)
    batch = algo.advantages(batch, world.data_peers)
    update(batch, models, algo, cfg, 1 << 30, world.data_peers)


def planned(cfg: Config, rank: int, ranks: int) -> dict:
    """Returns what the planner says of a rank, in the words of `measured`. It needs a process of its own."""
    from spmdrl.plan.rank import open_rank

    steady()
    stage, stages, virtual = 0, 1, cfg.parallel.virtual_stages
    if cfg.policy.backend == "megatron":
        stages = cfg.parallel.pp
        stage = rank // (trainers(cfg, ranks) // stages)
    with sharded_by_layer(), host_apart(), boxes_seen() as boxes:
        made = open_rank(cfg, rank, ranks, "cpu", None)
        live: list[int] = []
        push = made.memory._push

        def measured_push():
            made.paper.lap()
            live.append(made.paper.live)
            push()
            live.append(made.paper.lap().live)

        made.memory._push = measured_push
        begun = begins(made)
        step = made.step()
        plan = rank_of(step, stage, stages, virtual, {})
    held = step.held
    if moved := step.always.get("optimizer on the host"):
        # The table of a real rank counts an optimizer on the host among the tensors of a CPU.
        held = held | {"policy optimizer": moved}
    out: dict[str, Any] = {"held": held, "push": live[1] - live[0], "boxes": boxes}
    carried = by_kind(step.push.traffic.bytes) if step.push else {}
    out |= {"received": carried.get("receive", 0), "push sent": carried.get("send", 0)}
    out |= {"away": {place: n for place, n in step.parked.items() if n}}
    for phase in ("logp", "update"):
        passes = [work for work in step.works if work.kind == phase]
        peaks = [sum(peak_of(w, stage, stages, virtual).values()) - begun[w.model, phase] for w in passes]
        out[phase] = max(peaks, default=0)
        out[phase + " sent"] = by_kind(plan.loads[phase].sent) if phase in plan.loads else {}
    return out


def begins(made: Any) -> dict[tuple[str, str], int]:
    """Returns (model, phase) -> bytes that live where its first pass begins; filled while a step runs on paper."""
    found: dict[tuple[str, str], int] = {}
    for name, model in own_tensors(made.models):
        for method, phase in (("numbers", "logp"), ("gradient", "update")):
            own = getattr(model, method)

            def run(*args, own=own, key=(name, phase)):
                found.setdefault(key, made.paper.live)
                return own(*args)

            setattr(model, method, run)
    return found
