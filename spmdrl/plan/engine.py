"""Simulates an engine: implements the memory and weight-loading methods of `Engine` with a real engine's sizes.

A plan cannot start vLLM or SGLang, so `PaperEngine` takes their place and samples nothing. It allocates one meta tensor
for the weights and one for the KV cache, each as large as in a real engine, so that the planner's memory counter sees
them being allocated and freed. The HF engine gets no cache tensor, because its cache grows while it samples.
"""

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

import torch

from spmdrl.config.engines import sleep_level
from spmdrl.config.schema import Config
from spmdrl.engines.engine import Completion, Key, Owner, Request
from spmdrl.engines.needs import Needs
from spmdrl.hub.lora import are_adapters
from spmdrl.plan.engine_boxes import EngineLayout
from spmdrl.plan.engine_bytes import Model, cache_of, kind_of, longest_of, model_of, weights_of, workspace_of
from spmdrl.weights.boxes import Entry


class PaperEngine:
    """A simulated engine that implements `Engine` (`engines/engine.py`)."""

    def __init__(self, cfg: Config, world: Any, hf_config: Any, gpu_memory: int | None, model: Model | None = None):
        """Compute and allocate the memory. Like a newly started engine, it is awake and has no weight version yet.

        Args:
            cfg: the run's settings.
            world: an object with `engine_tp_rank`, this rank's index within its engine.
            hf_config: the model's transformers config; the weights are not needed.
            gpu_memory: memory of one GPU in bytes, or None for a CPU engine.
            model: the checkpoint's tensors if already known, or None to derive them from `hf_config`.

        Raises:
            ValueError: the engine cannot shard this model over its ranks.
        """
        rollout, self.on_cpu = cfg.rollout, gpu_memory is None
        self.cfg, self.kind = cfg, kind_of(cfg, not self.on_cpu)
        self.place = world.engine_tp_rank
        self.layout = EngineLayout(self.kind, hf_config, rollout.tp, rollout.dp, rollout.ep)
        self.layout.check()
        self.capacity, self.longest = rollout.max_sequences, longest_of(cfg, hf_config)
        self.version: int | None = None
        model = model or model_of(hf_config, cfg.model.trust_remote_code)
        found = weights_of(cfg, self.layout, model, self.place, self.on_cpu)
        self.weight_bytes, self.packed_bytes, self.unknown = found.bytes, found.packed, found.unknown
        """`weight_bytes`: size of the parameters, including padding. `packed_bytes`: additional bytes that vLLM's CPU
        build allocates when it first samples. `unknown`: names of tensors that match no rule and are counted at full
        size."""
        self.workspace: dict[str, int] = {}
        """Estimated bytes that sampling needs in addition to weights and cache, by purpose, or an empty dict on a
        CPU."""
        if gpu_memory is not None:
            self.workspace = workspace_of(cfg, self.layout, self.longest, gpu_memory)
            if found.beside:
                self.workspace["absorbed matrices"] = found.beside
        # `--rollout.gpu-memory-utilization` limits weights plus cache in SGLang, and weights, cache and workspace in
        # vLLM.
        held = self.weight_bytes + (found.beside if self.kind == "sglang" else self.workspace_bytes)
        cache = cache_of(cfg, self.layout, self.longest, held, gpu_memory)
        self.cache_bytes, self.cache_tokens, self.sequences, self.lack = (
            cache.bytes,
            cache.tokens,
            cache.sequences,
            cache.lack,
        )
        """`cache_bytes`: KV cache size. `cache_tokens`, `sequences`: how many tokens and how many maximum-length
        sequences fit. `lack`: additional bytes needed to fit one maximum-length sequence, or 0 if it fits."""
        self.grows = self.kind == "hf"
        """True if the KV cache exists only during sampling; `cache_bytes` is then its peak size."""
        self.weights: torch.Tensor | None = None
        self.cache: torch.Tensor | None = None
        self.wake("weights")
        self.wake("kv_cache")

    @property
    def workspace_bytes(self) -> int:
        """Total estimated workspace size in bytes."""
        return sum(self.workspace.values())

    def sampling_bytes(self) -> dict[str, int]:
        """Return the bytes, by purpose, that are allocated only while sampling and not included in `bytes_by_owner`."""
        return {"engine workspace": self.workspace_bytes, "KV cache": self.cache_bytes if self.grows else 0}

    def submit(self, request: Request) -> None:
        """Raise NotImplementedError, because a simulated engine does not sample."""
        raise NotImplementedError("a simulated engine does not sample")

    def poll(self) -> list[Completion]:
        """Implements `Engine.poll`; returns an empty list, because nothing is sampled."""
        return []

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """Implements `Engine.abort`; returns an empty list, because no request is in progress."""
        return []

    def needs(self, entries: list[Entry]) -> Needs:
        """Implements `Engine.needs`. vLLM needs full adapters, and full weights if it quantizes them."""
        whole = bool(entries) and are_adapters(entry.name for entry in entries)
        if self.kind == "vllm" and self.cfg.rollout.quantization != "none":
            whole = True
        if self.kind == "sglang" and self.cfg.rollout.sglang_push == "broadcast" and self.layout.ranks > 1:
            # SGLang's first rank receives full tensors and forwards them to the engine's other ranks.
            whole = True
            entries = entries if self.place == 0 else []
        boxes = []
        for i, entry in enumerate(entries):
            cut = [entry.box] if whole else self.layout.cut(entry.name, entry.shape, self.place).boxes
            boxes += [(i, box) for box in cut]
        return Needs(boxes, [False] * len(boxes), exact=False)

    def load(self, buckets: Iterable[dict[str, torch.Tensor]], version: int) -> None:
        """Implements `Engine.load`: consumes the buckets one by one without keeping any tensor."""
        self.version = None
        if self.kind == "hf":
            self.wake("weights")
        for _ in buckets:
            pass
        self.version = version

    def reset_prefix_cache(self) -> None:
        """Implements `Engine.reset_prefix_cache`; does nothing, because nothing is sampled."""

    def sleep(self, level: int) -> None:
        """Implements `Engine.sleep`: frees the device memory that a real engine of this type frees."""
        forgets = level == 2
        if self.kind == "sglang" and level == 1 and not self.on_cpu:
            # SGLang copies weights from the GPU to the host only if it was started for sleep level 1.
            forgets = sleep_level(self.cfg, False) != 1
        if forgets:
            self.version = None
        if level:
            self.cache = None
        if level == 2 or (level == 1 and not self.on_cpu):
            self.weights = None

    def wake(self, what: Owner) -> None:
        """Implements `Engine.wake`; allocates whatever is not allocated yet, except the HF engine's cache."""
        if what == "weights" and self.weights is None:
            self.weights = torch.empty(self.weight_bytes, dtype=torch.uint8, device="meta")
        if what == "kv_cache" and self.cache is None and not self.grows:
            self.cache = torch.empty(self.cache_bytes, dtype=torch.uint8, device="meta")

    def bytes_by_owner(self) -> dict[str, int]:
        """Implements `Engine.bytes_by_owner` with the bytes that are currently allocated."""
        return {
            "engine weights": 0 if self.weights is None else self.weights.nbytes,
            "KV cache": 0 if self.cache is None else self.cache.nbytes,
        }

    def held_words(self) -> int | None:
        """Implements `Engine.held_words`; returns None, because meta tensors have no data to sum."""
        return None

    def close(self) -> None:
        """Implements `Engine.close`; frees all memory."""
        self.sleep(2)


def at_any_place(engine: PaperEngine) -> Callable[[int], PaperEngine]:
    """Return a function that copies a sleeping engine for a given rank within it, to compute that rank's boxes."""

    def at(place: int) -> PaperEngine:
        other = copy(engine)
        other.place = place
        return other

    return at
