"""Moves models and the engine on and off the device, which engine and trainer use in turn.

Only this module moves models, in an order that bounds peak memory. `--policy.offload` and `--reference.offload` select
the models to offload. Before a rollout, frozen models, critics, gradients and optimizer moments are offloaded first.
Then the engine's weights are moved back and overwritten with the policy's weights. Finally, the policy's parameters are
offloaded and the KV cache is allocated. After the rollout, the engine is put to sleep, then the trainer's models are
moved back. Under split placement, a rank has either an engine or a trainer, so nothing is moved.

A frozen judge or a teacher on the run's engine replaces the policy's weights within a rollout phase (`lend`). Before
the policy samples again, `restore` sends the policy's weights with the same sequence of moves as before a rollout, so
peak memory does not grow.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from spmdrl.config.engines import pushed_parts, sleep_level
from spmdrl.config.judge import frozen_judges
from spmdrl.config.schema import Config
from spmdrl.engines.engine import Engine
from spmdrl.health.causes import out_of_memory, requested_bytes
from spmdrl.hub.build import DTYPES
from spmdrl.policy.models import Models
from spmdrl.session.engine_check import EngineCheck
from spmdrl.session.memory_advice import GIB, three_flags
from spmdrl.session.meter import Meter
from spmdrl.session.transfer import PushReport, Transfer
from spmdrl.spmd.devices import kind_of
from spmdrl.spmd.exchange import all_reduce, gather_names
from spmdrl.spmd.storage import give_back
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Timer
from spmdrl.weights.folder import Tensors

log = logging.getLogger("spmdrl")


@dataclass(frozen=True)
class Holding:
    """A row of the memory table: the bytes that one owner (such as `KV cache`) has on this rank, and their place."""

    owner: str
    place: Literal["device", "host", "disk", "gone"]
    bytes: int


@dataclass(frozen=True)
class Border:
    """A snapshot between two moves: the table, the measured bytes in use, and their peak since the previous snapshot.

    For the snapshot `logged`, the peak is measured since the previous call of `metrics`.
    """

    table: tuple[Holding, ...]
    measured: int
    peak: int

    @property
    def on_device(self) -> int:
        """Total bytes of the table's rows on the device."""
        return sum(row.bytes for row in self.table if row.place == "device")


def place_of(name: str, models: Models, cfg: Config) -> Literal["none", "host", "disk"]:
    """Return where a model is kept during rollout; `none` if it stays on the device."""
    return cfg.policy.offload if name == "policy" or name in models.trained() else cfg.reference.offload


@contextmanager
def room_for_engine(models: Models, cfg: Config) -> Iterator[None]:
    """Offload models as in a rollout while an engine is built and put to sleep in this context.

    vLLM refuses to start if its configured fraction of device memory is not free.
    """
    for name, model in models.named():
        if (place := place_of(name, models, cfg)) != "none":
            model.offload(place, True)
    yield
    for _, model in models.named():
        model.onload()


class Memory:
    """Switches between the rollout and training phases of a run, and tracks memory by owner."""

    def __init__(self, cfg: Config, models: Models, engine: Engine | None, timer: Timer, world: World):
        """Set up the memory table. Collective. models.policy is None on ranks that do not train; engine may be None."""
        self.cfg, self.models, self.policy, self.engine, self.timer = cfg, models, models.policy, engine, timer
        self.world, self.shared = world, models.policy is not None and engine is not None
        dtype, bucket_bytes = DTYPES[cfg.model.dtype], cfg.rollout.push_bucket_mib << 20
        self.transfer = Transfer(world, models.policy, engine, dtype, bucket_bytes, pushed_parts(cfg))
        self.last_push: PushReport | None = None
        self.version = -1
        """Policy version at the start of the rollout phase, on every rank. Engines sample with these weights."""
        self.phases: dict[str, Border] = {}
        """Latest snapshot for each moment of a step, by name (such as `pushed`), in chronological order."""
        self.meter, self.peak = Meter(world.device), 0
        self.short = kind_of(world.device) == "cuda" or "disk" in (cfg.policy.offload, cfg.reference.offload)
        """True if the allocator must return freed memory to the device or the operating system."""
        self.full: dict[str, int] = {}
        self.sent: dict[str, Any] = {}
        self.lent = bool(frozen_judges(cfg) or cfg.engine_teachers())
        """True if an engine may hold the weights of a judge or teacher, so that versions can differ between engines."""
        self.check: EngineCheck | None = None
        """Check that compares the engine with the policy in the first step, or None for jobs without this check."""
        self.owners = gather_names((row.owner for row in self.table()), world.host_group)

    @contextmanager
    def rollout_phase(self) -> Iterator[None]:
        """Wake the engine with the policy's weights, and offload the trainer as configured. Collective."""
        self._give_engine(dict(self.models.named()))
        with self._room("rollout", "sampling"):
            if self.check and self.check.due:
                with self.timer("push"):
                    self.check.sample(self.version)
            yield
        self._border("sampled")

    def _give_engine(self, present: dict[str, Any]) -> None:
        """Send the policy's weights to the engine. Collective.

        If trainer and engine share the device, also offload the trainer's models and wake the engine, in the order
        described in the module docstring. present: models currently on the device.
        """
        engine = self.engine if self.shared else None
        with self.timer("push"):
            if engine:
                for name, model in present.items():
                    self._offload(name, model, parameters=model is not self.policy)
                self._border("idle trainer off")
                with self._room("rollout", "the engine's weights", "engine weights"):
                    engine.wake("weights")
                self._returned("engine weights")
                self._border("engine weights on")
            with self._room("rollout", "the weight push"):
                self._push()
            self._border("pushed")
            if engine:
                self._offload("policy", self.policy, parameters=True)
                self._border("trainer off")
        with self.timer("wake"):
            if engine:
                with self._room("rollout", "the KV cache", "KV cache"):
                    engine.wake("kv_cache")
                self._returned("KV cache")
            self._border("rollout")

    def lend(self, folder: Tensors, version: int, whose: str) -> None:
        """Load other weights into the engine within a rollout phase. Collective over the ranks of the engine.

        version: a number below -1, since policy versions start at 0. whose: owner of the weights, such as `judge`, for
        messages.
        """
        assert self.lent and version < -1
        with self.timer("push"), self._room("rollout", f"the {whose}'s weights"):
            self._give_back(self.transfer.load(folder, version))

    def restore(self) -> None:
        """Send the policy's weights to engines that hold other weights, within a rollout phase. Collective."""
        assert self.engine and self.shared
        if not self._stale()[1]:
            return
        with self.timer("push"):
            self._put_to_sleep(self.engine)
            with self._room("rollout", "the policy", "policy"):
                self.policy.onload()
            self._returned("policy")
        self._give_engine({"policy": self.policy})

    @contextmanager
    def training_phase(self) -> Iterator[None]:
        """Put the engine to sleep and move the trainer back to the device, if the rank has both. Collective."""
        engine = self.engine if self.shared else None
        with self.timer("sleep"):
            if engine:
                self._put_to_sleep(engine)
                for name, model in self.models.named():
                    with self._room("training", f"the {name.replace('_', ' ')}", name):
                        model.onload()
                    self._returned(name)
            self._border("training")
        with self._room("training", "training"):
            if self.check and self.check.due:
                with self.timer("push"):
                    self.check.compare()
            yield
        self._border("trained")

    def _put_to_sleep(self, engine: Engine) -> None:
        level = sleep_level(self.cfg, kind_of(self.world.device) == "cpu")
        held = engine.bytes_by_owner()
        engine.sleep(level)
        self._give_back(sum(held.values()))
        self._sent(held, {"KV cache": "gone", "engine weights": "gone" if level == 2 else "host"})
        self._border("engine asleep")

    def _offload(self, name: str, model: Any, parameters: bool) -> None:
        place = place_of(name, self.models, self.cfg)
        if place != "none":
            held = {f"{name} {kind}": size for kind, size in model.bytes_by_owner().items()}
            model.offload(place, parameters)
            self._sent(held, {owner: "gone" if owner.endswith(" gradients") else place for owner in held})

    def _push(self) -> None:
        """Send the policy's weights to all engines if at least one engine lacks them. Collective."""
        version, stale = self._stale()
        self.version = version
        if stale:
            first = self.last_push is None
            self.last_push = self.transfer.push(version)
            if first and self.engine:
                how = "is summed" if self.last_push.deep else "is not summed: checksums cover the transport alone"
                log.info(f"after a push the engine's own memory {how}")
            self._give_back(self.last_push.bytes)

    def _stale(self) -> tuple[int, bool]:
        """Return the policy version, and True if an engine has other weights. Collective."""
        if self.shared and self.engine and not self.lent:
            return self.policy.version, self.engine.version != self.policy.version
        # A rank may lack a policy or an engine, and engines lent to other models may have different versions.
        held = torch.tensor([self.policy.version if self.policy else -1])
        version = int(all_reduce(held, "max", self.world.host_group))
        lacks = torch.tensor([int(self.engine is not None and self.engine.version != version)])
        return version, bool(all_reduce(lacks, "max", self.world.host_group))

    def _give_back(self, size: int) -> None:
        if self.short:
            give_back(self.world.device, size)

    def table(self) -> list[Holding]:
        """Return this rank's bytes by owner and location. Offloaded models count with their size on the device."""
        held = dict(self.engine.bytes_by_owner()) if self.engine else {}
        for name, model in self.models.named():
            learns = name == "policy" or name in self.models.trained()
            kinds = model.bytes_by_owner().items()
            held |= {f"{name} {kind}": size for kind, size in kinds if learns or kind == "parameters"}
        rows = []
        for owner, size in held.items():
            place, gone = self.sent.get(owner), self.full.get(owner, 0) - size
            if place and gone > 0:
                rows.append(Holding(owner, place, gone))
            elif size:
                self.full[owner] = size
            if size or not place:
                rows.append(Holding(owner, "device", size))
        return rows

    def _sent(self, held: dict[str, int], places: dict[str, Any]) -> None:
        """Record where bytes were moved. `table` computes how many of them stayed on the device."""
        for owner, size in held.items():
            if size:
                self.full[owner], self.sent[owner] = size, places[owner]

    def _returned(self, name: str) -> None:
        self.sent = {owner: place for owner, place in self.sent.items() if not _belongs(owner, name)}

    def metrics(self) -> dict[str, float]:
        """Return memory metrics in GiB: each owner's maximum over all snapshots, and the measured peak.

        On a GPU, `memory/unaccounted_gib` is the memory in use without an owner, such as the CUDA context, CUDA graphs
        and NCCL buffers. The names are equal on all ranks.
        """
        self._border("logged")
        border, self.peak = self.phases["logged"], 0
        held = dict.fromkeys(self.owners, 0)
        for row in [row for each in self.phases.values() for row in each.table if row.place == "device"]:
            held[row.owner] = max(held[row.owner], row.bytes)
        values = {f"memory/{owner.replace(' ', '_')}_gib": size / GIB for owner, size in held.items()}
        values["memory/peak_gib"] = border.peak / GIB
        if self.world.device.type == "cuda":
            values["memory/unaccounted_gib"] = (border.measured - border.on_device) / GIB
        return values

    def _border(self, name: str) -> None:
        measured, peak = self.meter.lap()
        self.peak = max(self.peak, peak)
        if name == "logged":
            peak = self.peak
        self.phases[name] = Border(tuple(self.table()), measured, peak)

    @contextmanager
    def _room(self, phase: Literal["rollout", "training"], what: str, owner: str = "") -> Iterator[None]:
        """Convert an out-of-memory error in this context to one that lists memory by owner, and flags that would help.

        phase: the current phase. what: purpose of the memory, for the message. owner: the model or table row that is
        being moved to the device; empty if nothing is moved.
        """
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not out_of_memory(error) or isinstance(error, NoRoomError):
                raise
            whole = sum(size for name, size in self.full.items() if owner and _belongs(name, owner))
            size = max(whole, requested_bytes(error))
            wanted = f" ({size / GIB:.2f} GiB needed)" if size else ""
            measured, _ = self.meter.lap()
            rows = [row for row in self.table() if row.bytes]
            places: dict[str, list[str]] = {}
            for row in rows:
                places.setdefault(row.place, []).append(f"{row.owner} {row.bytes / GIB:.2f} GiB")
            report = "; ".join(f"{place}: {', '.join(owners)}" for place, owners in places.items()) or "nothing"
            held = {row.owner: row.bytes for row in rows if row.place == "device"}
            trained, last = {"policy", *self.models.trained()}, self.phases.get("trained")
            training = max(0, last.peak - last.on_device) if last else 0
            engine = self.full if self.engine else {}
            flags = three_flags(self.cfg, self.world, phase, held, engine, trained, training, self.shared)
            raise NoRoomError(
                f"no room for {what}{wanted}. Memory by owner: {report}; the system counts {measured / GIB:.2f} GiB "
                f"in use. Flags that would help most: {'; '.join(flags)}"
            ) from error


def _belongs(owner: str, name: str) -> bool:
    """Return True if `owner` is the row `name`, or a row of the model `name`."""
    return owner == name or owner.startswith(name + " ")


class NoRoomError(MemoryError):
    """An allocation failed. The message lists memory by owner and the flags to change."""
