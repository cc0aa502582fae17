"""LoRA adapters in vLLM: loads base weights into the layers that vLLM wraps, and loads adapters directly from tensors.

Written against vLLM 0.32 (`vllm/lora`), and checked against the code of 0.25.1. vLLM keeps N adapters in buffers of
each wrapped layer: [N, 1, rank, in] for A and [N, 1, out, rank] for B. Each fused projection has its own pair of
buffers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch

from spmdrl.config.schema import Config
from spmdrl.engines.needs import Needs
from spmdrl.hub.build import DTYPES
from spmdrl.hub.lora import PREFIX, is_adapter, linear_names
from spmdrl.hub.resolve import resolve
from spmdrl.spmd.checksum import word_sum
from spmdrl.weights.reshard import Entry

NUMBER = 1
"""vLLM's id of the only adapter."""


def lora_options(cfg: Config, config: Any, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's LLM that enable LoRA. config: the model's transformers config.

    Raises:
        ValueError: vLLM does not support adapters for this model on this device.
    """
    from vllm.config.lora import MaxLoRARanks

    if on_cpu and getattr(config, "num_experts_per_tok", None):
        raise ValueError("--lora.push adapter: vLLM's CPU build has no adapters for mixtures of experts; take merged")
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= cfg.lora.rank),
        "lora_dtype": DTYPES[cfg.model.dtype],
        "lora_target_modules": linear_names(folder, cfg.model.trust_remote_code, cfg.lora.targets),
    }


def rename_mapper(mapper: Any) -> Any:
    """Return the part of vLLM's weight mapper that renames layers without fusing them.

    The mapper's method has a different name in vLLM 0.25. mapper: None if layer names equal checkpoint names.
    """
    if mapper is None:
        return None
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()


def refill(model: Any) -> None:
    """Rewrite two tables of vLLM's LoRA layers. The tables are not buffers, so sleeping at level 2 drops them.

    The first table maps the TP ranks' logits to the vocabulary. The second table flags active adapters, and all of its
    flags are cleared.
    """
    for module in model.modules():
        places = getattr(module, "sharded_to_full_mapping_gpu", None)
        if places is not None:
            places.copy_(torch.tensor(module.sharded_to_full_mapping))
        active = getattr(module, "adapter_enabled", None)
        if active is not None:
            active.zero_()


class Adapters:
    """The LoRA adapter of an engine. Finds where the adapter's tensors belong in vLLM's layers, and installs them
    there.
    """

    def __init__(self, runner: Any, cfg: Config):
        """runner: vLLM's model runner with wrapped layers."""
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.request import LoRARequest

        self.manager = runner.lora_manager._adapter_manager
        self.rank, self.dtype, self.alone = cfg.lora.rank, DTYPES[cfg.model.dtype], cfg.rollout.tp == 1
        # Adapters arrive already scaled, so alpha is set to the rank and vLLM's scale is 1. vLLM never reads the path
        # "pushed", because the adapter is installed before the first request.
        self.helper = PEFTHelper(r=self.rank, lora_alpha=self.rank, target_modules=list(cfg.lora.targets))
        self.request = LoRARequest("policy", NUMBER, "pushed")
        self.mapper = rename_mapper(getattr(self.manager.model, "hf_to_vllm_mapper", None))
        self.places: dict[str, tuple[Any, int]] = {}
        """Layer name before fusion -> (vLLM's wrapper of the fused layer, index among its projections)."""
        for name, module in self.manager.modules.items():
            for i, part in enumerate(self.manager.packed_modules.get(name, [name])):
                self.places[part] = (module, i)
        self.counted: list[tuple[str, tuple[int, ...]]] = []
        self.taken: dict[str, torch.Tensor] = {}

    def _place(self, name: str) -> tuple[Any, int] | None:
        """Return the wrapper and projection index that an adapter tensor belongs to."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        return self.places.get(parse_fine_tuned_lora_name(PREFIX + name, self.mapper)[0])

    @contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Temporarily remove the wrappers, so that the model's loader finds the layers by name."""
        model = self.manager.model

        def put(inner: bool) -> None:
            for name, wrapper in self.manager.modules.items():
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, wrapper.base_layer if inner else wrapper)

        put(True)
        try:
            yield
        finally:
            put(False)

    def _buffer(self, name: str) -> torch.Tensor:
        """Return the slice of a layer's buffer for an adapter tensor, without rank padding. Works only without TP."""
        place = self._place(name)
        assert place
        module, i = place
        slot = self.manager.lora_index_to_id.index(NUMBER) if NUMBER in self.manager.lora_index_to_id else 0
        if ".lora_A." in name:
            return module.lora_a_stacked[i][slot, 0, : self.rank]
        return module.lora_b_stacked[i][slot, 0, :, : self.rank]

    def needs(self, entries: list[Entry]) -> Needs:
        """Implements `Engine.needs`. The result contains complete tensors, from which vLLM's layers take their slices.

        Raises:
            ValueError: vLLM has no adapter for one of the layers.
        """
        strange = [entry.name for entry in entries if self._place(entry.name) is None]
        if strange:
            raise ValueError(f"--lora.push adapter: vLLM has no adapter for {strange[0]}; take --lora.push merged")
        alike = [self.alone and tuple(self._buffer(e.name).shape) == e.shape for e in entries]
        self.counted = [(e.name, e.shape) for e, yes in zip(entries, alike, strict=True) if yes]
        return Needs([(i, entry.box) for i, entry in enumerate(entries)], alike)

    def take(self, bucket: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Keep a bucket's adapters for `install`, and return its other tensors."""
        # The tensors are copied, because vLLM keeps them but the trainer frees the bucket's memory.
        self.taken |= {name: x.to("cpu", self.dtype, copy=True) for name, x in bucket.items() if is_adapter(name)}
        return {name: x for name, x in bucket.items() if not is_adapter(name)}

    def install(self) -> None:
        """Install the adapters kept by `take`, replacing earlier adapters."""
        from vllm.lora.lora_model import LoRAModel

        taken, self.taken = self.taken, {}
        tensors = {PREFIX + name: x for name, x in taken.items()}
        adapter = LoRAModel.from_lora_tensors(
            NUMBER, tensors, self.helper, device="cpu", dtype=self.dtype, weights_mapper=self.mapper
        )
        self.manager.remove_adapter(NUMBER)
        refill(self.manager.model)
        self.manager.add_adapter(adapter)
        self.manager.activate_adapter(NUMBER)

    def words(self) -> int:
        """Return the checksum of the adapter tensors that `needs` marked as counted, read from the layers' buffers."""
        return word_sum(self._buffer(name) for name, _ in self.counted)

    def buffers(self) -> list[torch.Tensor]:
        """Return all of vLLM's adapter buffers."""
        return [x for module, _ in self.places.values() for x in (*module.lora_a_stacked, *module.lora_b_stacked)]
