"""Checks the pickles in a checkpoint's optimizer state before torch or Megatron reads them.

torch.distributed.checkpoint stores its index (`.metadata`) as a pickle and loads non-tensor values with
weights_only=False, so a malicious file could execute arbitrary code in this process. The manifest of a checkpoint
proves that its files are complete, but not who wrote them. This module first reads the index with an unpickler that
only allows the classes of an index, then every non-tensor value with torch.load(weights_only=True).
"""

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch

CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
    "torch": {"Size", "device"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
}
"""Maps modules to the names that an index may import. Calling these objects has no side effects."""
LARGEST = 64 << 20
"""Maximum size of a non-tensor value in bytes. Our checkpoints only contain numbers and names."""


class _Index(pickle.Unpickler):
    """An unpickler that only imports the names in CLASSES."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an object listed in CLASSES; raise UnpicklingError for any other name, without importing it."""
        if name not in CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"the pickle uses {module}.{name}, which no index needs")
        return super().find_class(module, name)


def vet(folder: Path) -> dict[str, tuple[int, ...]]:
    """Check that loading the optimizer state in `folder` cannot execute arbitrary code.

    Returns the shapes of all tensors in the folder by name.

    Raises:
        ValueError: loading would execute arbitrary code, or the folder contains no optimizer state. The check itself
        does not execute such code.
    """
    try:
        return _vet(folder)
    except Exception as error:  # Reading untrusted bytes can raise an exception of any type.
        reason = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
        # Drop the beginning of torch's message, which explains how to load the file anyway.
        reason = reason.rpartition("WeightsUnpickler error:")[2].strip()[:200]
        raise ValueError(
            f"{folder} is not optimizer state that is safe to read ({type(error).__name__}: {reason}): it was not "
            "written by a run, or was changed later. Resume from another checkpoint, or start a new run from its "
            "model/ by --model.path"
        ) from error


def _vet(folder: Path) -> dict[str, tuple[int, ...]]:
    with open(folder / ".metadata", "rb") as file:
        index = _Index(file).load()
    kinds = index.state_dict_metadata.items()
    tensors = {n: tuple(kind.size) for n, kind in kinds if type(kind).__name__ == "TensorStorageMetadata"}
    for key, where in index.storage_data.items():
        name = str(where.relative_path)
        if Path(name).name != name or (folder / name).is_symlink():
            raise ValueError(f"{name!r} is outside of the folder")
        if getattr(where, "transform_descriptors", None):
            raise ValueError("its values are packed by extensions")
        if key.fqn in tensors:
            # Tensors need no check, because torch loads them with weights_only=True.
            continue
        if not 0 <= where.length <= LARGEST:
            raise ValueError(f"{key.fqn} has {where.length} bytes")
        with open(folder / name, "rb") as file:
            file.seek(where.offset)
            _weights(io.BytesIO(file.read(where.length)))
    for file in folder.glob("*.pt"):
        _weights(file)
    return tensors


def _weights(source: Any) -> None:
    torch.load(source, map_location="cpu", weights_only=True)
