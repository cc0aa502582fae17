"""Reads tensor slices directly from the safetensors files in a Hugging Face folder.

A box is a slice of a tensor, given by an index range per dimension (`boxes.py`). Files are memory-mapped, and only the
bytes of a box are copied, chunk by chunk. A rank that needs part of a model therefore never holds more than that part
and one chunk. fp8 weights with block-wise scales, the DeepSeek-V3 format (https://arxiv.org/abs/2412.19437, section
3.3), are dequantised box by box.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from spmdrl.weights.boxes import Box, inside, size

CHUNK = 32 << 20
"""Maximum number of bytes copied at once, counting fp8 weights as float32."""
SCALE = "_scale_inv"
"""Suffix that turns a weight's name into the name of its scale tensor."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Floating-point dtypes by their safetensors names."""
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Tensors:
    """Reads the tensors of a HF folder, box by box."""

    def __init__(self, folder: Path, blocks: tuple[int, int] | None = None):
        """Read a folder's index, or the header of its only file. Raises ValueError if the index or header cannot be
        read.

        folder: contains one safetensors file, or several with an index. blocks: numbers of rows and columns in an fp8
        scale block, or None if the folder has no fp8 weights.
        """
        self.folder, self.blocks = folder, blocks
        self.handles: dict[str, Any] = {}
        self.slices: dict[str, Any] = {}
        index = folder / "model.safetensors.index.json"
        if index.exists():
            # Strip directories from the index's file names, so that it cannot point outside the folder.
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self.files: dict[str, str] = {name: Path(file).name for name, file in found.items()}
        else:
            file = "model.safetensors"
            self.files = dict.fromkeys(self._open(file).keys(), file)

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self.handles:
            try:
                self.handles[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                reason = f"{self.folder / file} is not a complete safetensors file ({error}): copy it again"
                raise ValueError(reason) from error
        return self.handles[file]

    def _slice(self, name: str) -> Any:
        from safetensors import SafetensorError

        if name not in self.slices:
            if name not in self.files:
                raise ValueError(f"{self.folder}: no tensor {name}; the folder holds another model")
            try:
                self.slices[name] = self._open(self.files[name]).get_slice(name)
            except SafetensorError as error:
                where = f"{self.folder}/{self.files[name]}"
                raise ValueError(f"{where}: no tensor {name}; the folder holds another model") from error
        return self.slices[name]

    def __contains__(self, name: str) -> bool:
        """Return True if the folder has a tensor with this name."""
        return name in self.files

    def names(self) -> list[str]:
        """List the tensor names, without fp8 scales."""
        return [
            n for n in self.files if not (self.blocks and n.endswith(SCALE) and n.removesuffix(SCALE) in self.files)
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the stored dtype of a tensor if it is floating-point, else None."""
        return DTYPES.get(self._slice(name).get_dtype())

    def check_scales(self, name: str) -> None:
        """Check that an fp8 tensor can be dequantised.

        Raises ValueError if it is not a matrix, its scales are missing or have the wrong shape, or the folder declares
        no block size.
        """
        if self.dtype(name) not in FP8:
            return
        if self.blocks is None:
            raise ValueError(f"{self.folder}: {name} is in fp8, but config.json has no quantization_config")
        shape = self.shape(name)
        wanted = tuple(-(-n // block) for n, block in zip(shape, self.blocks, strict=False))
        if len(shape) != 2:
            raise ValueError(
                f"{self.folder}: the fp8 weight {name} has shape {shape}, and only matrices can be dequantised: use a "
                "dequantised folder"
            )
        if name + SCALE not in self:
            raise ValueError(
                f"{self.folder}: the fp8 weight {name} {shape} has no scales ({name + SCALE} {wanted}): copy the "
                "folder again, or use a dequantised one"
            )
        if (found := self.shape(name + SCALE)) != wanted:
            raise ValueError(f"{self.folder}: {name + SCALE} has shape {found}, but the blocks of {name} need {wanted}")

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Read a box of a tensor. fp8 weights are dequantised to float32."""
        view = self._slice(name)
        found = view[tuple(slice(a, b) for a, b in box)] if box else view[...]
        return self._dequantised(name, box, found) if found.dtype in FP8 else found

    def _dequantised(self, name: str, box: Box, found: torch.Tensor) -> torch.Tensor:
        self.check_scales(name)
        assert self.blocks
        around = tuple((a // n, -(-b // n)) for (a, b), n in zip(box, self.blocks, strict=True))
        scale = self._slice(name + SCALE)[tuple(slice(a, b) for a, b in around)].float()
        for dim, ((a, b), (first, _), n) in enumerate(zip(box, around, self.blocks, strict=True)):
            scale = scale.repeat_interleave(n, dim).narrow(dim, a - first * n, b - a)
        return found.float().mul_(scale)

    @torch.no_grad()
    def copy(self, name: str, box: Box, into: torch.Tensor) -> None:
        """Copy a box of a stored tensor into a tensor of the box's shape, with any dtype and on any device."""
        stored = self.dtype(name)
        width = 8 if stored is None else 4 if stored in FP8 else stored.itemsize
        for part in chunks(box, CHUNK // width):
            inside(into, part, box).copy_(self.read(name, part))

    def differs(self, name: str, box: Box, other: torch.Tensor) -> bool:
        """Return True if a box of a stored tensor, cast to the dtype of `other`, differs from `other`."""
        parts = chunks(box, CHUNK // 8)
        return any(not torch.equal(self.read(name, p).to(other), inside(other, p, box)) for p in parts)


def chunks(box: Box, most: int) -> Iterator[Box]:
    """Yield the parts of a box, split along the outer dimensions first. most: maximum number of elements per part."""
    if not box or size(box) <= most:
        yield box
        return
    (first, last), rest = box[0], box[1:]
    inner = max(1, math.prod(b - a for a, b in rest))
    if inner > most and rest:
        for row in range(first, last):
            yield from (((row, row + 1), *part) for part in chunks(rest, most))
        return
    step = max(1, most // inner)
    for row in range(first, last, step):
        yield ((row, min(row + step, last)), *rest)
