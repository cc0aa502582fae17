"""Moves models and the engine on and off the device: in a rollout phase the engine owns it, in training the trainer.

Only this module moves models, in an order that bounds the peak. Before a rollout everything that the push does not read
leaves (frozen models, critics, gradients, moments), the engine's weights come back, the push writes the policy's into
them, the policy's parameters leave, and only then the KV cache is allocated. After it the engine sleeps before the
trainer comes back. Under split placement a rank has one of the two, and only the push moves anything.

A frozen judge on the run's engine replaces the policy's weights within a rollout phase (`lend`). Before the policy
samples again, `restore` brings it back with the moves that begin a phase, so that the peak is no higher.
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
    """Bytes of one owner on this rank, and their place."""

    owner: str
    place: Literal["device", "host", "disk", "gone"]
    bytes: int


@dataclass(frozen=True)
class Border:
    """The table at a moment between two moves, the system's count, and its peak since the previous border."""

    table: tuple[Holding, ...]
    measured: int
    peak: int

    @property
    def on_device(self) -> int:
        """The bytes of the table that are on the device."""
        return sum(row.bytes for row in self.table if row.place == "device")


def place_of(name: str, models: Models, cfg: Config) -> Literal["none", "host", "disk"]:
    """Return the place of a model while the engine samples."""
    return cfg.policy.offload if name == "policy" or name in models.trained() else cfg.reference.offload


class Memory:
    """The phases of a run with its models and its engine, and the table of the bytes that each of them holds."""

    def __init__(self, cfg: Config, models: Models, engine: Engine | None, timer: Timer, world: World):
        """models.policy is None on a rank that does not train, engine on one that does not sample. Collective."""
        self.cfg, self.models, self.policy, self.engine, self.timer = cfg, models, models.policy, engine, timer
        self.world, self.shared = world, models.policy is not None and engine is not None
        dtype, bucket_bytes = DTYPES[cfg.model.dtype], cfg.rollout.push_bucket_mib << 20
        self.transfer = Transfer(world, models.policy, engine, dtype, bucket_bytes, pushed_parts(cfg))
        self.last_push: PushReport | None = None
        self.version = -1
        """Version of the policy when the rollout phase began, on every rank: engines sample from it."""
        self.phases: dict[str, Border] = {}
        """Last border of each name, in the order in which `rollout_phase` and `training_phase` pass them."""
        self.meter, self.peak = Meter(world.device), 0
        self.short = kind_of(world.device) == "cuda" or "disk" in (cfg.policy.offload, cfg.reference.offload)
        """True if freed memory goes back to the device."""
        self.full: dict[str, int] = {}
        self.sent: dict[str, Any] = {}
        self.lent = bool(frozen_judges(cfg) or cfg.engine_teachers())
        """True if engines may hold the weights of a judge or a teacher; a rank then knows only its own engine."""
        self.check: EngineCheck | None = None
        """Compares engine and policy in the first phases; None: no comparison."""
        self.owners = gather_names((row.owner for row in self.table()), world.host_group)

    @contextmanager
    def rollout_phase(self) -> Iterator[None]:
        """Wake the engine with the policy's weights in it, and offload the trainer as set. Collective."""
        self._give_engine(dict(self.models.named()))
        with self._room("rollout", "sampling"):
            if self.check and self.check.due:
                with self.timer("push"):
                    self.check.sample(self.version)
            yield
        self._border("sampled")

    def _give_engine(self, present: dict[str, Any]) -> None:
        """Begin a rollout phase. present: the models that are on the device. Collective."""
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

        version: below 0, unlike those of policies. whose: the owner in messages, such as `judge`.
        """
        assert self.lent and version < -1
        with self.timer("push"), self._room("rollout", f"the {whose}'s weights"):
            self._give_back(self.transfer.load(folder, version))

    def restore(self) -> None:
        """Push the policy's weights again into engines that hold a judge's, within a rollout phase. Collective."""
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
        """Put the engine to sleep and the trainer on the device. Collective."""
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
        """Push the policy's weights into every engine, if one lacks them. Collective."""
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
        """Return the policy's version, and True if an engine lacks it. Collective."""
        if self.shared and self.engine and not self.lent:
            return self.policy.version, self.engine.version != self.policy.version
        # A rank has the facts of its own side only.
        held = torch.tensor([self.policy.version if self.policy else -1])
        version = int(all_reduce(held, "max", self.world.host_group))
        lacks = torch.tensor([int(self.engine is not None and self.engine.version != version)])
        return version, bool(all_reduce(lacks, "max", self.world.host_group))

    def _give_back(self, size: int) -> None:
        if self.short:
            give_back(self.world.device, size)

    def table(self) -> list[Holding]:
        """Return the bytes of each owner on this rank and their place; parked ones with their size on the device."""
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
        """Record the places to which bytes were moved; `table` finds those that stayed on the device."""
        for owner, size in held.items():
            if size:
                self.full[owner], self.sent[owner] = size, places[owner]

    def _returned(self, name: str) -> None:
        self.sent = {owner: place for owner, place in self.sent.items() if not _belongs(owner, name)}

    def metrics(self) -> dict[str, float]:
        """Return GiB for the step's log: the most of each owner at any border, and the peak between them.

        On a GPU also the used memory that has no owner: CUDA's context, graphs, buffers of NCCL. Names are equal on all
        ranks.
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
        """Turn a failed allocation into an error with the table and the flags that would help.

        phase: the current one. what: the purpose of the memory. owner: row, or model, that comes back.
        """
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not out_of_memory(error) or isinstance(error, NoRoomError):
                raise
            whole = sum(size for name, size in self.full.items() if owner and _belongs(name, owner))
            size = max(whole, requested_bytes(error))
            wanted = f" ({size / GIB:.2f} GiB wanted)" if size else ""
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
                f"no room for {what}{wanted}. Held in GiB: {report}; {measured / GIB:.2f} GiB taken as the "
                f"system counts. What would help most: {'; '.join(flags)}"
            ) from error


def _belongs(owner: str, name: str) -> bool:
    """Return True for a row of `name`: the row itself, or one of a model's rows."""
    return owner == name or owner.startswith(name + " ")


class NoRoomError(MemoryError):
    """The device has no room; the message holds the table and what to change."""
