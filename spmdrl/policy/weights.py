"""Weights leave and enter a sharded model here: digests, gathered buckets, HF safetensors."""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from spmdrl.policy.contract import Bucket
from spmdrl.spmd.gloo import swap

_LANES = 4096
"""Words that share one weight by row in a digest's sum."""
_BY_ROW = 2 * 0x9E3779B1
"""Factor of the weights by row: even, so that the weight of every word (its column's plus its row's) stays odd."""
_CPU_ROWS = 16
"""Rows that a CPU widens at a time: they stay in its cache, and no temporary of the tensor's size is made."""


def words(tensor: torch.Tensor, widest: int = 8) -> torch.Tensor:
    """The tensor's bytes as the widest integers that divide them: int64, int32, int16 or uint8 [n].

    widest: bytes of the widest integer to use. The width depends on the number of bytes alone, not on where they lie.
    """
    # Not view(-1): a single element may have any stride, and then its bytes cannot be viewed.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    for dtype, width in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if width <= widest and flat.numel() % width == 0:
            # A view wants an aligned start, which a range of rows of another tensor may not have.
            return (flat if flat.storage_offset() % width == 0 else flat.clone()).view(dtype)
    return flat


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Position-weighted sum of the tensor's bytes modulo 2**64: int64 scalar, on the tensor's device.

    Words of at most 32 bits under odd weights, summed in 64 bits: any one changed element changes it, its sign bit
    too, and so do two exchanged ones.
    """
    w = words(tensor, 4)
    whole = w.numel() // _LANES * _LANES
    total = torch.zeros((), dtype=torch.int64, device=w.device)
    if whole:
        grid = w[:whole].view(-1, _LANES)
        on_cpu = w.device.type == "cpu"
        columns, rows = torch.zeros(_LANES, dtype=torch.int64, device=w.device), []
        for part in grid.split(_CPU_ROWS if on_cpu else len(grid)):
            wide = part.long() if on_cpu else part
            columns += wide.sum(0, dtype=torch.int64)
            rows.append(wide.sum(1, dtype=torch.int64))
        total += (columns * _odd(_LANES, w.device)).sum()
        total += (torch.cat(rows) * _odd(len(grid), w.device)).sum() * _BY_ROW
    if w.numel() > whole:
        total += (w[whole:].long() * _odd(w.numel() - whole, w.device)).sum() * 0x85EBCA77
    return total


@lru_cache(maxsize=256)
def _odd(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int64, device=device) * 2 + 1


def word_sum(tensors) -> int:
    """Sum of all words of all tensors modulo 2**64: the same for a model whose engine fuses q, k, v or gate and up.

    A second check beside the digests: it is taken from what the engine holds, not from what it was handed.
    """
    total = 0
    for tensor in tensors:
        total += int(words(tensor).sum(dtype=torch.int64)) if tensor.numel() else 0
    return total % (1 << 64)


def shard_rows(rows: int, shards: int, index: int) -> tuple[int, int]:
    """First and last + 1 row of one shard of dim 0, as torch.chunk and FSDP2's Shard(0) cut it."""
    size = -(-rows // shards)
    return min(index * size, rows), min((index + 1) * size, rows)


def shard_digests(full: torch.Tensor, shards: int) -> torch.Tensor:
    """Digest of every shard's rows of a whole tensor: int64 [shards]."""
    rows = [shard_rows(full.shape[0] if full.dim() else 1, shards, i) for i in range(shards)]
    table = full if full.dim() else full[None]
    return torch.stack([digest(table[a:b]) for a, b in rows])


def gathered_buckets(named: list[tuple[str, DTensor]], bucket_bytes: int, dtype: torch.dtype) -> Iterator[Bucket]:
    """Whole tensors of a Shard(0) model, one all_gather per bucket. Collective.

    named: HF name and DTensor, in the same order on every rank. dtype: floating tensors are cast before they travel.
    """
    bucket: list[tuple[str, DTensor]] = []
    size = 0
    for name, param in named:
        nbytes = param.numel() * torch.empty((), dtype=dtype).element_size()
        if bucket and size + nbytes > bucket_bytes:
            yield _gather(bucket, dtype)
            bucket, size = [], 0
        bucket.append((name, param))
        size += nbytes
    if bucket:
        yield _gather(bucket, dtype)


@torch.no_grad()
def _gather(bucket: list[tuple[str, DTensor]], dtype: torch.dtype) -> Bucket:
    mesh = bucket[0][1].device_mesh
    # The last mesh dimension shards; under HSDP the one before it replicates.
    group, shards, me = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    names, params = [name for name, _ in bucket], [param for _, param in bucket]
    if shards == 1:
        tensors = [param.to_local().to(dtype).contiguous() for param in params]
        return Bucket(
            dict(zip(names, tensors, strict=True)),
            {name: digest(x)[None] for name, x in zip(names, tensors, strict=True)},
        )
    gather = _gather_by_rows if dist.get_backend(group) == "gloo" else _gather_flat
    tensors, mine = gather(params, dtype, group, shards, me)
    digests = mine.new_empty((shards, len(mine)))
    dist.all_gather_into_tensor(digests.view(-1), mine, group=group)
    return Bucket(dict(zip(names, tensors, strict=True)), {name: digests[:, i] for i, name in enumerate(names)})


def _gather_by_rows(params, dtype, group, shards: int, me: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every shard is a range of rows of the whole tensor: sent from there and received there, without a copy."""
    fulls = [torch.empty(param.shape, dtype=dtype, device=param.device) for param in params]
    rows = [[full[slice(*shard_rows(full.shape[0], shards, r))] for r in range(shards)] for full in fulls]
    for own, param in zip(rows, params, strict=True):
        own[me].copy_(param.to_local())
    mine = torch.stack([digest(own[me]) for own in rows])
    swap([own[me] for own in rows for _ in range(shards)], [part for own in rows for part in own], group)
    return fulls, mine


def _gather_flat(params, dtype, group, shards: int, me: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """One all_gather of the shards end to end; whole tensors are put together from its rows."""
    locals_ = [param.to_local().to(dtype).contiguous() for param in params]
    mine = torch.stack([digest(x) for x in locals_])
    # Not param[0].numel(): indexing a DTensor gathers it.
    sizes = [-(-param.shape[0] // shards) * (param.numel() // param.shape[0]) for param in params]
    outgoing = torch.empty(sum(sizes), dtype=dtype, device=locals_[0].device)
    for slot, local in zip(outgoing.split(sizes), locals_, strict=True):
        slot[: local.numel()] = local.view(-1)
    everyone = outgoing.new_empty((shards, len(outgoing)))
    dist.all_gather_into_tensor(everyone.view(-1), outgoing, group=group)
    # Shards are whole rows, padded only at the end of the last ones: end to end they are the tensor.
    parts = zip(params, everyone.split(sizes, 1), strict=True)
    return [part.reshape(-1)[: param.numel()].view(param.shape) for param, part in parts], mine


@torch.no_grad()
def read_into(named: list[tuple[str, DTensor]], folder: Path) -> None:
    """Fill this rank's shards from HF safetensors, reading only the rows it owns.

    Raises:
        ValueError: a parameter that the folder does not hold, or one of another shape.
    """
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"] if index.exists() else None
    handles: dict[str, Any] = {}
    for name, param in named:
        file = files.get(name, "") if files else "model.safetensors"
        if not file:
            raise ValueError(f"{folder}: no tensor {name}; the folder is of another model")
        if file not in handles:
            handles[file] = safe_open(folder / file, framework="pt")
        if name not in handles[file].keys():  # noqa: SIM118 (safe_open has no __contains__)
            raise ValueError(f"{folder}/{file}: no tensor {name}; the folder is of another model")
        view = handles[file].get_slice(name)
        if tuple(view.get_shape()) != tuple(param.shape):
            raise ValueError(f"{folder}: {name} has shape {view.get_shape()}, the model wants {tuple(param.shape)}")
        mesh = param.device_mesh
        a, b = shard_rows(param.shape[0], mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1))
        if b > a:
            param.to_local().copy_(view[a:b])


class SafetensorsWriter:
    """Buckets to HF safetensors files of bounded size with an index; only the rank with a folder writes."""

    def __init__(self, folder: Path | None, shard_bytes: int = 2 << 30):
        self.folder, self.shard_bytes = folder, shard_bytes
        self.pending: dict[str, torch.Tensor] = {}
        self.size = self.total = 0
        self.files: list[list[str]] = []

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take one bucket; writes a file when enough has come together."""
        if self.folder is None:
            return
        for name, tensor in tensors.items():
            nbytes = tensor.numel() * tensor.element_size()
            if self.pending and self.size + nbytes > self.shard_bytes:
                self._flush()
            self.pending[name] = tensor.detach().to("cpu", copy=True)
            self.size += nbytes

    def _flush(self) -> None:
        from safetensors.torch import save_file

        assert self.folder is not None
        save_file(self.pending, self.folder / f"part-{len(self.files):05d}.safetensors", metadata={"format": "pt"})
        self.files.append(list(self.pending))
        self.total += self.size
        self.pending, self.size = {}, 0

    def close(self) -> None:
        """Write what is left, and the names that transformers and vLLM look for."""
        if self.folder is None:
            return
        if self.pending:
            self._flush()
        if len(self.files) == 1:
            (self.folder / "part-00000.safetensors").rename(self.folder / "model.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self.files):
            final = f"model-{i + 1:05d}-of-{len(self.files):05d}.safetensors"
            (self.folder / f"part-{i:05d}.safetensors").rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
