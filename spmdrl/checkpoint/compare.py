"""Compares the settings, versions, state and weights of two checkpoints. Tensors are read slice by slice."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from spmdrl.checkpoint.manifest import read_manifest
from spmdrl.config.fields import flag, shown
from spmdrl.config.resume import flat

SLICE = 64 << 20
"""Size of a slice in bytes, assuming float64 elements. Tensors are compared slice by slice to save memory."""
TOP = 10


def report(one: Path, other: Path) -> Iterator[str]:
    """Yield the lines of a report. Differences are written as `value in one -> value in other`, except for weights.

    Both checkpoints must be intact.
    """
    yield f"{one} -> {other}"
    yield from _changes("settings", _settings(one), _settings(other), flag)
    a, b = read_manifest(one), read_manifest(other)
    for key in ("layout", "versions"):
        yield from _changes(key, flat(a.get(key, {})), flat(b.get(key, {})))
    counts = [{"ranks": m["world_size"], "bytes": m.get("bytes"), "time": m.get("time")} for m in (a, b)]
    yield from _changes("written", counts[0], counts[1])
    states = [flat(json.loads((folder / "state" / "run.json").read_text())) for folder in (one, other)]
    yield from _changes("state", states[0], states[1])
    models = sorted(_models(one) | _models(other))
    for name in models:
        yield from _weights(name, one / name, other / name)


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings saved in a checkpoint, or the settings of its run folder if the checkpoint has none."""
    for path in (folder / "state" / "config.yaml", folder.resolve().parents[1] / "config.yaml"):
        if path.is_file():
            return flat(yaml.safe_load(path.read_text()))
    return {}


def _changes(title: str, a: dict, b: dict, name: Callable[[str], str] = str) -> Iterator[str]:
    """Yield the number of keys whose values differ, then one line for each. name: returns a key's label."""
    changed = [key for key in [*a, *(k for k in b if k not in a)] if a.get(key) != b.get(key)]
    yield f"{title}: " + (f"{len(changed)} differ" if changed else "equal")
    for key in changed:
        left, right = (shown(x[key]) if key in x else "missing" for x in (a, b))
        yield f"  {name(key)}: {left} -> {right}"


def _models(folder: Path) -> set[str]:
    """Return the names of the sub-folders of a checkpoint that contain model weights."""
    found = {p.parent.relative_to(folder).as_posix() for p in folder.rglob("*.safetensors")}
    return {name for name in found if not name.startswith("state") and "/state" not in name}


def _weights(name: str, one: Path, other: Path) -> Iterator[str]:
    """Yield lines about a model's tensors that are missing in one checkpoint, or whose shapes or values differ.

    Among tensors whose values differ, only the TOP tensors with the largest absolute difference are listed, largest
    first.
    """
    from safetensors import safe_open

    files = [_files(folder) for folder in (one, other)]
    for here, missing in ((0, 1), (1, 0)):
        only = sorted(set(files[here]) - set(files[missing]))
        if only:
            rest = f" and {len(only) - TOP} more" if len(only) > TOP else ""
            yield f"{name}: only in {(one, other)[here]}: {', '.join(only[:TOP])}{rest}"
    found: list[tuple[float, str]] = []
    for tensor in sorted(set(files[0]) & set(files[1])):
        with safe_open(files[0][tensor], "pt") as a, safe_open(files[1][tensor], "pt") as b:
            left, right = a.get_slice(tensor), b.get_slice(tensor)
            if left.get_shape() != right.get_shape():
                yield f"{name}: {tensor} has shape {left.get_shape()} -> {right.get_shape()}"
                continue
            found.append((_largest(left, right), tensor))
    changed = sorted(((d, t) for d, t in found if d != 0), key=lambda x: (-math.inf if x[0] != x[0] else -x[0], x[1]))
    if not found:
        return
    if not changed:
        yield f"{name}: {len(found)} tensors, all equal"
        return
    yield f"{name}: {len(changed)} of {len(found)} tensors differ, by at most {changed[0][0]:.6g}"
    for difference, tensor in changed[:TOP]:
        yield f"  {difference:.6g}  {tensor}"


def _files(folder: Path) -> dict[str, Path]:
    """Return a dict from tensor name to the safetensors file that contains it."""
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _largest(left: Any, right: Any) -> float:
    """Return the maximum absolute difference in float64, or NaN if only one of the tensors is NaN at some position."""
    shape = left.get_shape()
    if not shape:
        return _difference(left[...], right[...])
    rows = max(1, SLICE // max(1, 8 * math.prod(shape[1:])))
    parts = [_difference(left[i : i + rows], right[i : i + rows]) for i in range(0, shape[0], rows)]
    return math.nan if any(x != x for x in parts) else max(parts, default=0.0)


def _difference(a: Any, b: Any) -> float:
    a, b = a.double(), b.double()
    # Infinities of the same sign count as equal, and so do two NaNs.
    differs = ~((a == b) | (a.isnan() & b.isnan()))
    return float((a - b)[differs].abs().max()) if bool(differs.any()) else 0.0
