"""Phases of a step by who owns the device: the engine (rollout phase) or the trainer (training phase).

Only this module orders models on and off the device, in an order that bounds the peak. Into the rollout: whatever the
push does not read leaves (frozen models, critics, gradients, moments), the engine's weights come back and take the
policy's, the policy's parameters leave, and only then the KV cache is allocated. Out of it: the engine sleeps before
the trainer comes back. Under split placement a rank has the one or the other, and nothing moves but the push.

A frozen judge on the run's engine (`judge`) takes the place of the policy's weights within a rollout phase. Before the
policy samples again it comes back (`restore`) by the way that a phase begins with, so that the peak is no higher.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from spmdrl.config.engines import pushed_parts, sleep_level
from spmdrl.config.judging import frozen_judges
from spmdrl.config.schema import Config
from spmdrl.engines.engine import Engine
from spmdrl.health.causes import out_of_memory, requested_bytes
from spmdrl.hub.build import DTYPES
from spmdrl.policy.models import Models
from spmdrl.session.engine_check import EngineCheck
from spmdrl.session.memory_advice import Held, three_flags
from spmdrl.session.meter import Meter
from spmdrl.session.transfer import PushReport, Transfer
from spmdrl.spmd.devices import kind_of
from spmdrl.spmd.exchange import all_reduce, gather_names
from spmdrl.spmd.storage import give_back
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Timer
from spmdrl.weights.folder import Tensors

log = logging.getLogger("spmdrl")

GIB = 1 << 30
Phase = Literal["rollout", "training"]


@dataclass(frozen=True)
class Holding:
    """Bytes of one owner on this rank, and their place."""

    owner: str
    place: Literal["device", "host", "disk", "gone"]
    bytes: int


@dataclass(frozen=True)
class Border:
    """One moment between two moves: the table, the system's count, and its peak since the previous border."""

    table: tuple[Holding, ...]
    measured: int
    peak: int

    @property
    def on_device(self) -> int:
        """Bytes of the table that are on the device."""
        return sum(row.bytes for row in self.table if row.place == "device")


def place_of(name: str, models: Models, cfg: Config) -> Literal["none", "host", "disk"]:
    """Place of a model while the engine samples."""
    return cfg.policy.offload if name == "policy" or name in models.trained() else cfg.reference.offload


@contextmanager
def room_for_engine(models: Models, cfg: Config) -> Iterator[None]:
    """Builds an engine inside, which goes to sleep there: models are off the device meanwhile, as in a rollout.

    vLLM refuses to start where less than its share of the device is free.
    """
    for name, model in models.named():
        if (place := place_of(name, models, cfg)) != "none":
            model.offload(place, True)
    yield
    for _, model in models.named():
        model.onload()


class Memory:
    """Phases of one run over its models and its engine, with the table that records who holds how many bytes."""

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
        """True where engines may hold the weights of a judge or a teacher: a rank then knows only of its own."""
        self.check: EngineCheck | None = None
        """Compares engine and policy in the first phases; None: nothing is compared."""
        self.owners = gather_names((row.owner for row in self.table()), world.host_group)

    # ── phases ───────────────────────────────────────────────────────────────

    @contextmanager
    def rollout_phase(self) -> Iterator[None]:
        """Wakes the engine with the policy's weights in it; moves the trainer off the device if asked. Collective."""
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
        """Gives the engine other weights within a rollout phase. Collective over the ranks of the engine.

        version: below 0, which no policy has.
        """
        assert self.lent and version < -1
        with self.timer("push"), self._room("rollout", f"the {whose}'s weights"):
            self._give_back(self.transfer.load(folder, version))

    def restore(self) -> None:
        """Gives engines that hold a judge's weights the policy's again, within a rollout phase. Collective."""
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
        """Puts the engine to sleep and the trainer on the device. Collective."""
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
        level = self._sleep_level()
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
        """Pushes the policy's weights into every engine, if one lacks them. Collective."""
        version, stale = self._stale()
        self.version = version
        if stale:
            first = self.last_push is None
            self.last_push = self.transfer.push(version)
            if first and self.engine:
                how = "is summed" if self.last_push.deep else "is not summed: what is sent is checked on its way only"
                log.info(f"after a push the engine's own memory {how}")
            # Its buckets were freed, and the KV cache comes next.
            self._give_back(self.last_push.bytes)

    def _stale(self) -> tuple[int, bool]:
        """The policy's version, and whether an engine lacks it. Collective."""
        if self.shared and self.engine and not self.lent:
            return self.policy.version, self.engine.version != self.policy.version
        # A rank knows only its own side.
        held = torch.tensor([self.policy.version if self.policy else -1])
        version = int(all_reduce(held, "max", self.world.host_group))
        lacks = torch.tensor([int(self.engine is not None and self.engine.version != version)])
        return version, bool(all_reduce(lacks, "max", self.world.host_group))

    def _sleep_level(self) -> int:
        return sleep_level(self.cfg, kind_of(self.world.device) == "cpu")

    def _give_back(self, size: int) -> None:
        if self.short:
            give_back(self.world.device, size)

    # ── the table ────────────────────────────────────────────────────────────

    def table(self) -> list[Holding]:
        """Bytes of each owner on this rank and their place, at this moment; parked ones with the size they had."""
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
        """Notes where the bytes held until this moment were sent; `table` finds those that stayed on the device."""
        for owner, size in held.items():
            if size:
                self.full[owner], self.sent[owner] = size, places[owner]

    def _returned(self, name: str) -> None:
        self.sent = {owner: place for owner, place in self.sent.items() if not belongs(owner, name)}

    def report(self) -> str:
        """The table in words."""
        places: dict[str, list[str]] = {}
        for row in self.table():
            if row.bytes:
                places.setdefault(row.place, []).append(f"{row.owner} {row.bytes / GIB:.2f} GiB")
        return "; ".join(f"{place}: {', '.join(rows)}" for place, rows in places.items()) or "nothing"

    def metrics(self) -> dict[str, float]:
        """GiB for the step's log: the most that each owner had of the device at any border, and the peak between them.

        On a GPU also what the device says is taken and no owner has: CUDA's context, graphs, buffers of NCCL. Names are
        alike on all ranks.
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

    # ── no room ──────────────────────────────────────────────────────────────

    @contextmanager
    def _room(self, phase: Phase, what: str, owner: str = "") -> Iterator[None]:
        """Turns an allocator's refusal into the table and the flags that would help.

        phase: where the run is. what: what was being done. owner: row, or model, that was to come back.
        """
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not out_of_memory(error) or isinstance(error, NoRoomError):
                raise
            whole = sum(size for name, size in self.full.items() if owner and belongs(name, owner))
            asked = max(whole, requested_bytes(error))
            wanted = f" ({asked / GIB:.2f} GiB asked for)" if asked else ""
            measured, _ = self.meter.lap()
            raise NoRoomError(
                f"no room for {what}{wanted}. Held in GiB: {self.report()}; {measured / GIB:.2f} GiB taken as the "
                f"system counts. What would help most: {'; '.join(self.advice(phase))}"
            ) from error

    def advice(self, phase: Phase) -> list[str]:
        """The three flags that would free most in this phase, by the table and the settings as they are."""
        last = self.phases.get("trained")
        held = Held(
            on_device={row.owner: row.bytes for row in self.table() if row.place == "device"},
            cache=self.full.get("KV cache", 0),
            weights=self.full.get("engine weights", 0),
            trained={"policy", *self.models.trained()},
            training=max(0, last.peak - last.on_device) if last else 0,
            shared=self.shared,
            samples=self.engine is not None,
        )
        return three_flags(self.cfg, self.world, held, phase)


def belongs(owner: str, name: str) -> bool:
    """True for a row of `name`: the row itself, or a row of a model's."""
    return owner == name or owner.startswith(name + " ")


class NoRoomError(MemoryError):
    """The device has no room; the message holds the table and what to change."""
