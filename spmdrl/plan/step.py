"""Simulates one rank's training step by running the job's own code on a batch of full-length sequences."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from spmdrl.checkpoint.store import saved_models
from spmdrl.config.engines import Part
from spmdrl.config.placement import samplers
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch
from spmdrl.data.episode import Episode, prompt_segment
from spmdrl.data.pack import from_episodes
from spmdrl.hub.lora import are_adapters
from spmdrl.plan.boxes import Everyone
from spmdrl.plan.images import Images
from spmdrl.plan.paper import Paper
from spmdrl.plan.passes import Pass, Work, few_passes
from spmdrl.plan.push import plan_push
from spmdrl.plan.storages import Moment
from spmdrl.policy import learner
from spmdrl.policy.objectives.algorithm import Algorithm
from spmdrl.policy.optimizer import fill_state
from spmdrl.session.device_table import Memory
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Timer


@dataclass
class Step:
    """Memory, FLOPs and traffic of one rank's simulated step."""

    held: dict[str, int]
    """Device bytes by owner when training starts, before the first gradient, as in a run's device table."""
    moments: dict[str, Moment]
    """Phase (`push` for the weight push to engines, `rollout`, `training`) -> live bytes at its peak."""
    works: list[Work]
    push: Pass | None
    parked: dict[str, int]
    """Bytes offloaded while the engine samples, by location (`host`, `disk`)."""
    always: dict[str, int]
    """Bytes that always stay in host memory, by purpose."""
    numbers: int
    """Number of parameters that this rank holds over all models."""
    models: tuple[str, ...]
    """Names of the models that these parameters belong to."""
    moved: tuple[int, int]
    """Bytes that a step moves from the device to the host, and bytes moved back."""
    checkpoint: int
    """Size of a checkpoint, which all ranks write together, or 0 on a rank that does not train."""
    exchanged: int = 0
    """Bytes of pixels that at most reach the rank in the exchange of a step."""

    @property
    def host(self) -> dict[str, int]:
        """Peak bytes on the host or on disk during a step, by purpose."""
        return self.always | {f"off the device ({place})": n for place, n in self.parked.items() if n}


class PaperRank:
    """A simulated rank of a job, with its models and its engine."""

    hf_config: Any
    numbers = expert_numbers = tower_numbers = 0
    """Parameter counts of the full policy, of its routed experts, and of its vision tower with the projectors."""
    images: Images | None = None
    """Images of each prompt."""

    def __init__(
        self,
        cfg: Config,
        world: World,
        algo: Algorithm,
        models: Any,
        engine: Any,
        paper: Paper,
        boxes: Callable[[Any, Part], Everyone],
        method: Callable[[Any], Any],
    ):
        """Store the arguments and plan the weight transfer. `rank.py` sets `hf_config`, the parameter counts and
        `images`.

        Args:
            cfg: the job's settings.
            world: this rank's process groups.
            algo: the algorithm that the settings select.
            models: this rank's models.
            engine: this rank's engine, or None if the rank does not sample.
            paper: counts the step's memory, FLOPs and traffic.
            boxes: maps (model, part) to the boxes that all ranks hold and need. A model of None means the policy.
            method: builds the learning method from an object with the components of a run.
        """
        self.cfg, self.world, self.algo, self.models, self.engine, self.paper = cfg, world, algo, models, engine, paper
        self.boxes, self.method, self.works = boxes, method, list[Work]()
        self.memory = Memory(cfg, models, engine, Timer(), world)
        self.memory.meter = self  # type: ignore[assignment]
        self.laps: list[Moment] = []
        if models.policy is not None or engine is not None:
            plan_push(paper, self.memory.transfer, lambda part: boxes(models.policy, part))
            # A real job exchanges versions to detect stale engine weights; a plan assumes that they are stale.
            self.memory._stale = lambda: (0, True)  # type: ignore[method-assign]

    def checkpoint(self) -> int:
        """Return the checkpoint size in bytes, as computed by the models."""
        total = 0
        for model in saved_models(self.models):

            def listed(pieces: list, group: Any, model: Any = model) -> list:
                adapted = are_adapters(p.name for p in pieces)
                part: Part = "adapter" if adapted else "base"
                return self.boxes(model, part).entries

            with patch.object(learner, "catalogue", listed):
                total += model.checkpoint_bytes()
        return total

    def lap(self) -> tuple[int, int]:
        """Return the live bytes and the peak since the last call. The device table calls this method as its meter."""
        self.laps.append(self.paper.lap())
        return self.paper.live, self.laps[-1].live

    def step(self, rounds: tuple[int, ...] = (1, 2)) -> Step:
        """Simulate one step. rounds: lengths of the measured passes (see `few_passes`)."""
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
            # The first lap ends when the engine goes to sleep, so its peak belongs to the rollout.
            del self.laps[: self.engine is not None and self.world.trains]
            held = {row.owner: row.bytes for row in self.memory.table() if row.place == "device"}
            self._train(rounds)
        peaks = [p.peak for work in self.works for p in work.passes]
        moments["training"] = max([*self.laps, *peaks], key=lambda m: m.live)
        own = own_tensors(self.models)
        numbers = sum(getattr(p, "_local_tensor", p).numel() for _, m in own for p in _parameters(m))
        names, moved = tuple(name for name, _ in own), (self.paper.to_host, self.paper.from_host)
        host, exchanged = dict(self.paper.host), self._prompts_learnt() * self._prompt_bytes()
        if pixels := self._prompts_sampled() * self._prompt_bytes() + exchanged:
            host["pixels of images"] = pixels
        return Step(held, moments, self.works, push, parked, host, numbers, names, moved, self.checkpoint(), exchanged)

    def _prompt_bytes(self) -> int:
        """Return the bytes of the pixels of a prompt, or 0 without images."""
        return self.images.bytes if self.images else 0

    def _prompts_sampled(self) -> int:
        """Return the number of prompts that this rank's engine samples in a step."""
        if self.engine is None:
            return 0
        engines = samplers(self.cfg, self.world.size) // self.cfg.engine_ranks
        return -(-self.cfg.rollout.prompts_per_step // engines)

    def _sequences(self) -> int:
        """Return the number of sequences that this rank's models run in a step."""
        rollout = self.cfg.rollout
        if not (self.world.trains or self.world.scores):
            return 0
        shares = self.world.data_size
        if not self.world.trains:
            # Scoring-only ranks split the sequences among themselves.
            shares = max((len(model.scorers) for _, model in self.models.named()), default=1)
        return -(-rollout.prompts_per_step * rollout.samples_per_prompt // shares)

    def _prompts_learnt(self) -> int:
        """Return the number of prompts whose sequences this rank's models run in a step."""
        mine = self._sequences()
        return -(-mine // min(mine, self.cfg.rollout.samples_per_prompt)) if mine else 0

    def _ready(self) -> None:
        """Create the optimizer states, as the first optimizer step of a real run does."""
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
        mine, peers = self._sequences(), self.world.data_peers
        if not mine:
            return
        samples = min(mine, self.cfg.rollout.samples_per_prompt)
        vocab = min(128, self.hf_config.get_text_config().vocab_size)
        batch = full_batch(self.cfg, self.algo, self._prompts_learnt(), samples, vocab, self.images)
        updates = self.cfg.algo.updates_per_step
        one = replace(self.cfg, algo=replace(self.cfg.algo, updates_per_step=1))
        parts = {"cfg": one, "algo": self.algo, "models": self.models, "peers": peers} | _parts_of(one)
        method = self.method(SimpleNamespace(**parts))
        with alike(), few_passes(own_tensors(self.models), self.paper, self.works, updates, rounds):
            if self.world.trains:
                batch, _ = method.score(batch)
                batch = method.advantages(batch)
                if updates > 1:
                    # Keep all samples of a prompt in the same update.
                    batch.seq["update"] = batch.seq["position"] * updates // (int(batch.seq["position"].max()) + 1)
                method.update(batch, 1 << 30)
            else:
                method.answer(batch)


def _parts_of(cfg: Config) -> dict[str, Any]:
    """Return a run's prompts, which cycle through the teachers' `data_source`s, and None as the tokenizer."""
    sources = ["", *sorted({teacher.source for teacher in cfg.further_teachers().values()} - {""})]
    prompts = [
        SimpleNamespace(index=i, data_source=sources[i % len(sources)]) for i in range(cfg.rollout.prompts_per_step)
    ]
    return {"prompts": SimpleNamespace(prompts=prompts), "tokenizer": None}


def own_tensors(models: Any) -> list[tuple[str, Any]]:
    """Return (name, model) pairs for the models on this rank that own tensors.

    The base of a LoRA policy is omitted, because it shares the policy's tensors. A frozen model that other ranks query
    is returned without its `RemotePolicy` wrapper.
    """
    from spmdrl.policy.fsdp.lora import BaseOf
    from spmdrl.policy.remote import RemotePolicy

    here = [(name, m.model if isinstance(m, RemotePolicy) else m) for name, m in models.named()]
    return [(name, m) for name, m in here if m is not None and not isinstance(m, BaseOf)]


def _parameters(model: Any) -> list[Any]:
    return list(model.shards) if hasattr(model, "shards") else [p for chunk in model.chunks for p in chunk.parameters()]


def full_batch(
    cfg: Config, algo: Algorithm, groups: int, samples: int, vocab: int, images: Images | None = None
) -> Batch:
    """Return a batch of `groups` prompts with `samples` responses each, all of maximum length.

    Rewards and tokens vary within each group, so that every sequence gets a gradient. vocab: vocabulary size. images:
    images of each prompt.
    """
    rollout = cfg.rollout
    words = [token for token in range(vocab) if images is None or token not in images.vision.never]
    episodes = []
    for position in range(groups):
        prompt, shown = [words[(position + i) % len(words)] for i in range(rollout.max_prompt_tokens)], ()
        if images is not None:
            prompt, shown = images.prompt(position, prompt)
        for sample in range(samples):
            made = Episode(position, sample, position, [prompt_segment(prompt, shown)], "length", float(sample % 2))
            made.add_sampled([words[1 + sample % 2]] * rollout.max_new_tokens, [-1.0] * rollout.max_new_tokens, 0)
            made.parts = {"a_part": float(sample % 2)}
            episodes.append(made)
    placeholder = images.vision.image if images else None
    batch = from_episodes(episodes, ("a_part",), turns="turns" in algo.needs, placeholder=placeholder)
    batch.seq["seed"] = torch.arange(len(batch))
    batch.seq["work"] = batch.lengths
    batch.seq["update"] = torch.zeros(len(batch), dtype=torch.int64)
    return batch


@contextmanager
def alike() -> Iterator[None]:
    """Reuse micro-batches that have the same lengths and prompt boundaries inside this context, to save time."""
    found: dict[tuple, Batch] = {}
    split, select = learner.microbatches, Batch.select

    def chosen(batch: Batch, index: torch.Tensor) -> Batch:
        prompts = batch.seq["position"][index].diff().tolist()
        key = id(batch), tuple(batch.lengths[index].tolist()), tuple(step > 0 for step in prompts)
        if key not in found:
            found[key] = select(batch, index)
        return found[key]

    def microbatches(*args) -> list[Batch]:
        # Drop entries of earlier batches, because Python may reuse the id of a freed batch.
        found.clear()
        with patch.object(Batch, "select", chosen):
            return split(*args)

    with patch.object(learner, "microbatches", microbatches):
        yield
