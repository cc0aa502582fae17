"""Writes Hugging Face safetensors files tensor by tensor, so that no rank has to hold the whole model to save it."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from spmdrl.weights.folder import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()} | {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Name of each dtype in a safetensors header."""
ALIGN = 8
FIRST_HEADER = 8 << 10


class SafetensorsWriter:
    """Writes tensors to HF safetensors files of bounded size, with an index if there are several files.

    Only ranks that have a folder write files. A tensor larger than the bound gets its own file.

    A file starts with a header that lists its tensors and may be padded with spaces
    (https://github.com/huggingface/safetensors#format). Space for the header is reserved at the start of the file, so
    that tensors can be written immediately. Only tensors that would misalign the tensors after them are kept in memory
    until their file is complete.
    """

    def __init__(self, folder: Path | None, shard_bytes: int = 2 << 30):
        self.folder, self.shard_bytes = folder, shard_bytes
        self.files: list[list[str]] = []
        self.total, self.reserved = 0, FIRST_HEADER
        self._begin()

    def _begin(self) -> None:
        self.file: Any = None
        self.listed: dict[str, dict] = {}
        self.late: dict[str, torch.Tensor] = {}
        self.size = self.written = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the tensors of one bucket, starting a new file when the current one is full."""
        if self.folder is None:
            return
        for name, tensor in tensors.items():
            nbytes = tensor.numel() * tensor.element_size()
            if self.size and self.size + nbytes > self.shard_bytes:
                self._end()
            self.size += nbytes
            if nbytes % ALIGN:
                # The next tensor would be misaligned, so this tensor is written at the end of the file.
                self.late[name] = tensor.detach().to("cpu", copy=True)
            else:
                self._write(name, tensor)

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        assert self.folder is not None
        if self.file is None:
            self.file = self._path(len(self.files)).open("wb")
            self.file.seek(8 + self.reserved)
        tensor = tensor.detach().cpu().contiguous()
        nbytes = tensor.numel() * tensor.element_size()
        offsets = [self.written, self.written + nbytes]
        self.listed[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        self.file.write(tensor.reshape(-1).view(torch.uint8).numpy())
        self.written += nbytes

    def _path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"part-{number:05d}.safetensors"

    def _end(self) -> None:
        for name, tensor in sorted(self.late.items(), key=lambda x: -x[1].element_size()):
            self._write(name, tensor)
        header = json.dumps({"__metadata__": {"format": "pt"}} | self.listed, separators=(",", ":")).encode()
        needed = -(-len(header) // ALIGN) * ALIGN
        path, reserved = self._path(len(self.files)), self.reserved
        if needed > reserved:
            self.file.close()
            self._grow_header(path, reserved, needed)
            self.file, reserved = path.open("r+b"), needed
            # Later files have a similar number of tensors, so they reserve a similar amount of header space.
            self.reserved = needed + needed // 4 // ALIGN * ALIGN
        self.file.seek(0)
        self.file.write(reserved.to_bytes(8, "little") + header.ljust(reserved))
        self.file.close()
        self.files.append(list(self.listed))
        self.total += self.size
        self._begin()

    def _grow_header(self, path: Path, reserved: int, needed: int) -> None:
        """Move a file's tensors towards its end, to make room for a longer header."""
        moved = path.with_suffix(".moved")
        with path.open("rb") as source, moved.open("wb") as target:
            source.seek(8 + reserved)
            target.seek(8 + needed)
            shutil.copyfileobj(source, target, 16 << 20)
        moved.replace(path)

    def close(self) -> None:
        """Write the remaining tensors and the index, and rename the files as transformers and vLLM expect."""
        if self.folder is None:
            return
        if self.listed or self.late:
            self._end()
        if len(self.files) == 1:
            self._path(0).rename(self.folder / "model.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self.files):
            final = f"model-{i + 1:05d}-of-{len(self.files):05d}.safetensors"
            self._path(i).rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
