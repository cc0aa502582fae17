"""Low-rank adapters on a policy (LoRA, https://arxiv.org/abs/2106.09685): W + (alpha / r) B A with W frozen.

PEFT puts the adapters into the HF model; only they have gradients and moments. `pieces()` returns the full model with
the adapters merged in, as for any policy; the reference policy is the same model without them; PEFT can open the
adapters of a checkpoint.

r rank, D input width of a layer, O its output width.
"""

import json
from pathlib import Path
from typing import Any

import torch

from spmdrl.data.batch import Batch
from spmdrl.hub.lora import PREFIX, partner
from spmdrl.policy.contract import HeadFunction, OutputHead, Second
from spmdrl.spmd.exchange import all_gather_rows
from spmdrl.spmd.world import World
from spmdrl.weights.experts import Layout, Slot
from spmdrl.weights.reshard import Piece
from spmdrl.weights.shards import local, shard_box, shard_rows

FILE, BASE = "adapter_model.safetensors", "base.json"
Named = list[tuple[str, Any]]
"""Names and shards, in the form of `FsdpPolicy.named_weights`."""


class BaseOf:
    """The frozen model that a policy with adapters started from, as a Policy without a second copy in memory."""

    version = updates_done = updates_due = 0

    def __init__(self, policy: Any):
        """policy: a policy with adapters."""
        self.policy = policy

    def logprobs(
        self, batch: Batch, temperature: float, second: Second = "entropy"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self.policy.base():
            return self.policy.logprobs(batch, temperature, second)

    def read(self, batch: Batch, temperature: float, function: HeadFunction) -> tuple[torch.Tensor, ...]:
        with self.policy.base():
            return self.policy.read(batch, temperature, function)

    def output_head(self) -> OutputHead:
        return self.policy.output_head()

    def bytes_by_owner(self) -> dict[str, int]:
        """See the contract: empty, because the policy counts these weights."""
        return {}

    def offload(self, place: str, parameters: bool = True) -> None:
        """See the contract: does nothing, because the weights move with the policy."""

    def onload(self) -> None:
        """See the contract: does nothing."""


# ── pieces ───────────────────────────────────────────────────────────────────


class Merged(Piece):
    """A part of W + (alpha / r) B A, computed at each access, so that a push holds at most one bucket of it."""

    def __init__(self, slot: Slot, weight: torch.Tensor, b_Or: torch.Tensor, a_rD: torch.Tensor):
        """weight: this rank's rows; b_Or: the same rows of (alpha / r) B; slot: the part of these rows to compute."""
        self.name, self.shape, self.box, self.exact = slot.name, slot.shape, slot.box, False
        self.index, self.weight, self.b_Or, self.a_rD = slot.index, weight, b_Or, a_rD

    @property
    def tensor(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The merged values, in the adapters' type."""
        return (self.weight.to(self.b_Or.dtype) + self.b_Or @ self.a_rD)[self.index]


def gathered(named: Named, world: World) -> dict[str, torch.Tensor]:
    """Gather Shard(0) parameters into whole tensors, by name, in one exchange. Collective over the ranks that shard."""
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
    """Return the pieces of the full model: the rows of each weight that this rank holds. Collective.

    Raises:
        ValueError: an adapter on a parameter that is not a linear layer's weight, which would be left out.
    """
    apart = {name for name, _ in adapters} - {n for name, _ in base if name.endswith(".weight") for n in partner(name)}
    if apart:
        raise ValueError(
            f"{min(apart)} belongs to no linear layer's weight, so the model cannot be saved or pushed with it: choose "
            "other --lora.targets"
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
    """Return A and (alpha / r) B of every layer, so that an engine needs no alpha and holds exactly the values sent."""
    return [
        Piece(slot.name, slot.shape, slot.box, (local(p) * scale if ".lora_B." in name else local(p))[slot.index])
        for name, p in adapters
        for slot in layout.slots(name, tuple(p.shape), shard_box(p))
    ]


# ── checkpoints ──────────────────────────────────────────────────────────────


def file_pieces(adapters: Named) -> list[Piece]:
    """Return A and B unscaled, under the names of PEFT's files."""
    return [
        Piece(PREFIX + name, tuple(p.shape), box, local(p))
        for name, p in adapters
        if (box := shard_box(p))[0][0] < box[0][1]
    ]


def write_adapter(folder: Path, config: Any, tensors: dict[str, torch.Tensor], base: dict) -> None:
    """Write a folder for `PeftModel.from_pretrained(model, folder)`. base: path and checksum of the model."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    saved = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(saved, folder / FILE, metadata={"format": "pt"})
    config.base_model_name_or_path = base["path"]
    if isinstance(config.target_modules, set):
        # Sorted, so that two runs of one command write the same file.
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)
    (folder / BASE).write_text(json.dumps(base))


@torch.no_grad()
def read_adapter(adapters: Named, folder: Path, config: Any, base: dict) -> None:
    """Fill this rank's shards from a folder that `write_adapter` made.

    Raises:
        ValueError: the folder is missing, or holds adapters of other settings or of other weights than `base`.
    """
    from safetensors import safe_open

    if not (folder / FILE).is_file():
        raise ValueError(
            f"{folder.parent} was made without adapters: resume with --lora.rank 0, or choose another --run.dir and "
            "start from its model with --model.path"
        )
    saved = json.loads((folder / "adapter_config.json").read_text())
    flags = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets", "target_parameters": "targets"}
    for key, name in flags.items():
        ours, theirs = getattr(config, key), saved.get(key)
        if sorted(ours or ()) != sorted(theirs or ()) if name == "targets" else ours != theirs:
            raise ValueError(f"{folder} was made with --lora.{name} {theirs}, this run has {ours}; take that")
    with safe_open(folder / FILE, framework="pt") as file:
        for piece, (_, p) in zip(file_pieces(adapters), [x for x in adapters if local(x[1]).numel()], strict=True):
            rows = piece.box[0]
            local(p).copy_(file.get_slice(piece.name)[rows[0] : rows[1]])
    saved = json.loads((folder / BASE).read_text())
    if saved["sum"] != base["sum"]:
        raise ValueError(
            f"{folder} was trained on --model.path {saved['path']} with other weights than {base['path']} holds: "
            "resume with that model"
        )
