"""Low-rank adapters on a policy (LoRA, https://arxiv.org/abs/2106.09685): W + (alpha / r) B A with W frozen.

PEFT adds the adapters to the HF model; only they have gradients and optimizer state. By default, `pieces()` returns the
full model with adapters merged in, so engines need no LoRA support. A reference model with the policy's path is the
same model with adapters disabled, unless it runs on scoring ranks. Adapters in checkpoints can be loaded by PEFT.

Shapes: r LoRA rank, D input size of a layer, O output size of a layer.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spmdrl.data.batch import Batch
from spmdrl.hub.lora import PREFIX, partner, without_adapters
from spmdrl.policy.contract import HeadFunction, OutputHead, Second
from spmdrl.spmd.exchange import all_gather_rows
from spmdrl.spmd.world import World
from spmdrl.weights.experts import Layout, Slot
from spmdrl.weights.reshard import Piece
from spmdrl.weights.shards import local, shard_box, shard_rows

FILE, BASE = "adapter_model.safetensors", "base.json"
Named = list[tuple[str, Any]]
"""(name, shard) pairs of parameters, as `FsdpPolicy.named_weights` returns them."""


class BaseOf:
    """The frozen base model of a policy with adapters, as a `Policy` that shares the policy's weights in memory."""

    version = updates_done = updates_due = 0

    def __init__(self, policy: Any):
        """policy: a policy with adapters."""
        self.policy = policy

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        """Disable the policy's adapters and routing replay inside this context."""
        routers, self.policy.routers = self.policy.routers, None
        try:
            with without_adapters(self.policy.model):
                yield
        finally:
            self.policy.routers = routers

    def logprobs(
        self, batch: Batch, temperature: float, second: Second = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implements `Policy.logprobs` with adapters disabled."""
        with self._without_adapters():
            return self.policy.logprobs(batch, temperature, second)

    def read(self, batch: Batch, temperature: float, function: HeadFunction) -> tuple[torch.Tensor, ...]:
        """Implements `Policy.read` with adapters disabled."""
        with self._without_adapters():
            return self.policy.read(batch, temperature, function)

    def output_head(self) -> OutputHead:
        """Implements `Policy.output_head`; adapters do not change the head."""
        return self.policy.output_head()

    def exclude(self, ids: tuple[int, ...]) -> None:
        """Implements `Policy.exclude`, for the policy too, because both have the same head."""
        self.policy.exclude(ids)

    def bytes_by_owner(self) -> dict[str, int]:
        """Implements `Policy.bytes_by_owner`; the result is empty, because the policy counts these weights."""
        return {}

    def offload(self, place: str, parameters: bool = True) -> None:
        """Implements `Policy.offload` as a no-op, because the weights are offloaded with the policy."""

    def onload(self) -> None:
        """Implements `Policy.onload` as a no-op."""


# ── pieces ───────────────────────────────────────────────────────────────────


class Merged(Piece):
    """A slice of W + (alpha / r) B A, computed at each access, so sending weights only needs memory for one bucket."""

    def __init__(self, slot: Slot, weight: torch.Tensor, b_Or: torch.Tensor, a_rD: torch.Tensor):
        """slot: the slice of the weight to compute. weight, b_Or: this rank's rows of W and of (alpha / r) B."""
        self.name, self.shape, self.box, self.exact = slot.name, slot.shape, slot.box, False
        self.index, self.weight, self.b_Or, self.a_rD = slot.index, weight, b_Or, a_rD

    @property
    def tensor(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The merged values, in the adapters' dtype."""
        return (self.weight.to(self.b_Or.dtype) + self.b_Or @ self.a_rD)[self.index]


def gathered(named: Named, world: World) -> dict[str, torch.Tensor]:
    """All-gather parameters sharded in dimension 0; return name -> full tensor. Collective over the sharding ranks."""
    shards = world.shard_mesh.size(world.shard_mesh.ndim - 1)
    if not named:
        return {}
    mine = torch.cat([local(p).flatten() for _, p in named])
    everyone = all_gather_rows(mine[:, None], world.shard_group)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name, _ in named}
    for index, row in enumerate(everyone):
        rows = [shard_rows(p.shape[0], shards, index) for _, p in named]
        sizes = [(last - first) * p.shape[1] for (first, last), (_, p) in zip(rows, named, strict=True)]
        for (name, p), part in zip(named, row[:, 0].split(sizes), strict=True):
            parts[name].append(part.view(-1, p.shape[1]))
    return {name: torch.cat(part) for name, part in parts.items()}


def merged_pieces(base: Named, adapters: Named, scale: float, layout: Layout, world: World) -> list[Piece]:
    """Return this rank's rows of every model weight, with adapters merged in, as pieces. Collective.

    Raises:
        ValueError: an adapter cannot be merged because its parameter is not the weight of a linear layer.
    """
    apart = {name for name, _ in adapters} - {n for name, _ in base if name.endswith(".weight") for n in partner(name)}
    if apart:
        raise ValueError(
            f"{min(apart)} does not adapt a linear layer, so it cannot be merged into the model when a checkpoint is "
            "saved or weights are sent to the engine: choose other --lora.targets"
        )
    whole, out = gathered(adapters, world), []
    for name, param in base:
        a, b = (whole.get(n) for n in partner(name))
        box = shard_box(param)
        for slot in layout.slots(name, tuple(param.shape), box):
            if a is None or b is None:
                out.append(Piece(slot.name, slot.shape, slot.box, local(param)[slot.index]))
            else:
                out.append(Merged(slot, local(param), scale * b[box[0][0] : box[0][1]], a))
    return out


def adapter_pieces(adapters: Named, scale: float, layout: Layout) -> list[Piece]:
    """Return A and (alpha / r) B of every layer as pieces, so that engines need not know alpha."""
    return [
        Piece(slot.name, slot.shape, slot.box, (local(p) * scale if ".lora_B." in name else local(p))[slot.index])
        for name, p in adapters
        for slot in layout.slots(name, tuple(p.shape), shard_box(p))
    ]


# ── checkpoints ──────────────────────────────────────────────────────────────


def file_pieces(adapters: Named) -> list[Piece]:
    """Return A and B of every layer, unscaled, as pieces under PEFT's checkpoint names."""
    return [
        Piece(PREFIX + name, tuple(p.shape), box, local(p))
        for name, p in adapters
        if (box := shard_box(p))[0][0] < box[0][1]
    ]


def write_adapter(folder: Path, config: Any, tensors: dict[str, torch.Tensor], base: dict) -> None:
    """Write a folder for `PeftModel.from_pretrained(model, folder)`. base: path and checksum of the base model."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    saved = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(saved, folder / FILE, metadata={"format": "pt"})
    config.base_model_name_or_path = base["path"]
    if isinstance(config.target_modules, set):
        # Sets have no fixed order. Sort, so that two runs of the same command write identical files.
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)
    (folder / BASE).write_text(json.dumps(base))


@torch.no_grad()
def read_adapter(adapters: Named, folder: Path, config: Any, base: dict) -> None:
    """Load this rank's adapter shards from a folder written by `write_adapter`.

    Raises:
        ValueError: the folder is missing, or its adapters have a different config or were trained on different weights.
    """
    from safetensors import safe_open

    if not (folder / FILE).is_file():
        raise ValueError(
            f"{folder.parent} was written without adapters: resume with --lora.rank 0, or choose another --run.dir and "
            "start from its model with --model.path"
        )
    saved = json.loads((folder / "adapter_config.json").read_text())
    flags = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets", "target_parameters": "targets"}
    for key, name in flags.items():
        ours, theirs = getattr(config, key), saved.get(key)
        if sorted(ours or ()) != sorted(theirs or ()) if name == "targets" else ours != theirs:
            raise ValueError(
                f"{folder} was made with --lora.{name} {theirs}, but this run has {ours}: use the same value"
            )
    with safe_open(folder / FILE, framework="pt") as file:
        for piece, (_, p) in zip(file_pieces(adapters), [x for x in adapters if local(x[1]).numel()], strict=True):
            rows = piece.box[0]
            local(p).copy_(file.get_slice(piece.name)[rows[0] : rows[1]])
    saved = json.loads((folder / BASE).read_text())
    if saved["sum"] != base["sum"]:
        raise ValueError(
            f"{folder} was trained on --model.path {saved['path']}, whose weights differ from those in "
            f"{base['path']}: resume with that model"
        )
