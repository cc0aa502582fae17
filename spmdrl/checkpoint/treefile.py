"""Writes and reads a tree of plain values and tensors as one safetensors file, exactly and without pickle.

Leaves are None, bool, int, float, str and torch tensors. Containers are dicts with str keys, lists and tuples. Tensors
are stored as the file's tensors, and the rest of the tree as JSON in its metadata.
"""

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

KEY = "spmdrl_tree"
"""Metadata key under which the tree is stored."""


def write(path: Path, tree: Any) -> None:
    """Write `tree` to `path` atomically.

    Tensors may be on any device. `read` returns them on the CPU, detached, and no two of them share memory. Raises
    TypeError for a value of an unsupported type. The message says where in the tree the value is.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_packed(tree, tensors, "tree"), separators=(",", ":"))
    partial = path.with_name(f".partial-{path.name}")
    # Use a single metadata entry: safetensors does not order entries, and equal trees must produce equal bytes.
    save_file(tensors, partial, {KEY: text})
    os.replace(partial, path)


def read(path: Path) -> Any:
    """Read the tree in `path`. Its tensors are copies on the CPU, which stay valid if the file changes.

    Raises ValueError, with the path in the message, if the file is missing or was not written by `write`.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            text = (file.metadata() or {}).get(KEY)
            if text is None:
                raise ValueError("it holds no tree")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        tree = _unpacked(json.loads(text, parse_constant=_refuse, parse_float=_refuse), tensors)
        if tensors:
            raise ValueError(f"its tree does not use the tensors {', '.join(sorted(tensors))}")
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable tree file: {error}") from error
    return tree


def _packed(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """Convert `value` to JSON and add its tensors to `tensors`. A value whose type JSON lacks becomes {type name:
    content}.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        # numpy's float64 is a subclass of float, and is read back as a plain float.
        return {"float": struct.pack(">d", value).hex()}
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            raise TypeError(
                f"{where} is a {type(value).__name__} of layout {value.layout}: give its local dense tensor"
            )
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if type(value) is dict:
        if odd := [key for key in value if type(key) is not str]:
            raise TypeError(f"{where} has the key {odd[0]!r}: keys are strings")
        return {"dict": {key: _packed(x, tensors, f"{where}.{key}") for key, x in value.items()}}
    if type(value) in (list, tuple):
        items = [_packed(x, tensors, f"{where}[{i}]") for i, x in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    raise TypeError(f"{where} is a {type(value).__name__}, which a tree file does not hold")


def _unpacked(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Convert JSON back to a value (the inverse of `_packed`), removing the tensors it uses from `tensors`."""
    if isinstance(value, list):
        return [_unpacked(x, tensors) for x in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("its tree has an entry that does not have exactly one kind")
    ((kind, inner),) = value.items()
    if kind == "float" and isinstance(inner, str) and re.fullmatch("[0-9a-f]{16}", inner):
        return struct.unpack(">d", bytes.fromhex(inner))[0]
    if kind == "tensor" and isinstance(inner, str) and inner in tensors:
        return tensors.pop(inner)
    if kind == "tuple" and isinstance(inner, list):
        return tuple(_unpacked(x, tensors) for x in inner)
    if kind == "dict" and isinstance(inner, dict):
        return {key: _unpacked(x, tensors) for key, x in inner.items()}
    raise ValueError(f"its tree has an entry of the kind {kind!r} that cannot be read")


def _refuse(text: str) -> Any:
    raise ValueError(f"its tree has the number {text}, which `write` never produces")
