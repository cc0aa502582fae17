"""Reads and writes a sharded model as Hugging Face safetensors."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from spmdrl.spmd.world import World
from spmdrl.weights.boxes import Piece, full_box
from spmdrl.weights.experts import Layout
from spmdrl.weights.folder import FP8, Tensors
from spmdrl.weights.reshard import Reshard, catalogue
from spmdrl.weights.shards import local, pieces_of
from spmdrl.weights.writer import SafetensorsWriter

MASTERS = "masters"
"""Key of the float32 master weights in the optimizer state, present only if the weights in `model/` have a narrower
dtype."""

BUCKET = 256 << 20
"""Maximum number of bytes that rank 0 gathers at once when saving a model. A larger tensor is gathered alone."""


def has_masters(saved: Mapping[str, tuple[int, ...]], named: Sequence[tuple[str, torch.Tensor]], folder: Path) -> bool:
    """Return True if the optimizer state in `folder` has float32 master weights.

    saved: name -> shape of every tensor in the optimizer state. named: (name, parameter) pairs of the model. Raises
    ValueError if the master weights belong to another model.
    """
    if not any(name.startswith(f"{MASTERS}.") for name in saved):
        return False
    for name, param in named:
        if (shape := saved.get(f"{MASTERS}.{name}")) != tuple(param.shape):
            raise ValueError(f"{folder}: {name} has shape {shape or 'none'}, the model needs {tuple(param.shape)}")
    return True


def read_into(
    named: Sequence[tuple[str, torch.Tensor]], folder: Path, layout: Layout, least: torch.dtype | None = None
) -> None:
    """Read this rank's shards of a Shard(0) model from a HF folder. For `least` and the errors, see `fill`."""
    fill(pieces_of(named, layout), Tensors(folder), least)


def fill(pieces: Sequence[Piece], tensors: Tensors, least: torch.dtype | None = None) -> None:
    """Fill pieces from a HF folder, reading only the slice (box) that each piece holds.

    least: narrowest accepted floating-point dtype, or None to accept any. Raises ValueError if a tensor is missing from
    the folder, or has a different shape or a narrower dtype.
    """
    folder = tensors.folder
    for piece in pieces:
        name, shape, stored = piece.name, tensors.shape(piece.name), tensors.dtype(piece.name)
        if shape != piece.shape:
            raise ValueError(f"{folder}: {name} has shape {list(shape)}, the model needs {piece.shape}")
        if least and stored and stored.itemsize < least.itemsize:
            raise ValueError(
                f"{folder}: {name} is {stored}, and the checkpoint holds no {least} weights to resume from: resume "
                "with the --policy.backend that wrote the checkpoint, or choose another --run.dir and start from its "
                "model with --model.path"
            )
        tensors.copy(name, piece.box, piece.tensor)


def on_first(pieces: list[Piece], world: World, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Yield whole tensors bucket by bucket on rank 0, and empty buckets on other ranks.

    pieces: slices that this rank holds. Collective over all ranks of this rank's role.
    """
    group = world.role_group
    entries = catalogue(pieces, group)
    needs = [(i, entry.box) for i, entry in enumerate(entries)] if world.is_first else []
    over = group if world.is_twin else None
    return Reshard(entries, pieces, needs, group, world.device, dtype, BUCKET, over).run(pieces)


def on_host(pieces: list[Piece], dtype: torch.dtype) -> list[Piece]:
    """Copy the current values of the pieces to host memory, cast to `dtype` unless they are exact."""

    def copied(p: Piece) -> Piece:
        tensor = p.tensor.detach()
        return Piece(p.name, p.shape, p.box, tensor.to("cpu", tensor.dtype if p.exact else dtype, copy=True), p.exact)

    return [copied(p) for p in pieces]


def tree_on_host(tree: Any) -> Any:
    """Copy all tensors in nested dicts and lists to host memory. DTensors keep their sharding."""
    if isinstance(tree, dict):
        return {key: tree_on_host(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(tree_on_host(value) for value in tree)
    if isinstance(tree, DTensor):
        # Call the constructor, because `DTensor.from_local` would move the shard to the mesh's device.
        return DTensor(local(tree).to("cpu", copy=True), tree._spec, requires_grad=False)  # type: ignore[call-arg]
    return tree.detach().to("cpu", copy=True) if isinstance(tree, torch.Tensor) else tree


Stored = list[tuple[Path, str]]
"""Stored tensors, as pairs (safetensors file, tensor name)."""


def stored(folder: Path) -> Stored:
    """List all tensors of a HF folder."""
    from safetensors import safe_open

    out: Stored = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            out += [(file, name) for name in handle.keys()]  # noqa: SIM118 (safe_open is not a dict)
    return out


def prediction_heads(folder: Path, config: Any) -> Stored:
    """Find a checkpoint's multi-token prediction (MTP) tensors, which transformers models do not have.

    These tensors belong to layers after the model's last layer (DeepSeek-V3), or their names start with mtp or
    model.mtp. config: the model's transformers config. Raises ValueError if the folder has no such tensors.
    """
    layers = config.get_text_config().num_hidden_layers
    found = []
    for file, name in stored(folder):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if re.match(r"(model\.)?mtp", name) or (layer and int(layer[1]) >= layers):
            found.append((file, name))
    if not found:
        raise ValueError(f"--policy.mtp keep: {folder} has no multi-token prediction heads: use skip")
    return found


def save_model(
    folder: Path,
    pieces: list[Piece],
    world: World,
    dtype: torch.dtype,
    fixed: dict[str, bytes],
    more: Stored | None = None,
    blocks: tuple[int, int] | None = None,
) -> None:
    """Write a model in HF format to an existing folder on rank 0. Collective over all ranks of this rank's role.

    pieces: this rank's slices of the model. dtype: dtype of the saved weights. fixed: name -> content of every other
    file (`policy/model_files.py`). more: tensors to copy from other folders. fp8 weights are dequantised, because the
    saved model is not quantised. blocks: fp8 scale block size in `more`, as in `weights.folder.Tensors`.
    """
    target = folder if world.is_first else None
    if target:
        for name, content in fixed.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(content)
    writer = SafetensorsWriter(target)
    for tensors in on_first(pieces, world, dtype):
        writer.add(tensors)
    by_folder: dict[Path, set[str]] = {}
    for file, name in more or [] if target else []:
        by_folder.setdefault(file.parent, set()).add(name)
    for folder, names in by_folder.items():
        tensors = Tensors(folder, blocks)
        for name in [name for name in tensors.names() if name in names]:
            found = tensors.read(name, full_box(tensors.shape(name)))
            writer.add({name: found.to(dtype) if tensors.dtype(name) in FP8 else found})
    writer.close()
