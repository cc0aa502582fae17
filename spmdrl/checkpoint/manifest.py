"""Writes and reads checkpoint manifests, and verifies files against them. Nothing here is collective."""

import datetime
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from spmdrl.checkpoint.files import file_hash, flush, flushed_hash, rank_name

MANIFEST = "MANIFEST.json"
NEEDED = ("state/run.json", "model/config.json")
"""Files that every checkpoint must have, as paths within the checkpoint."""
UNSIGNED = "0" * 32
"""Placeholder for the manifest's own hash while that hash is being computed."""


class DamagedError(ValueError):
    """A checkpoint that was just written is damaged on disk."""


def contents(folder: Path) -> dict[str, int]:
    """Return a dict from path to size in bytes for all files but the manifest. Links and special files have size -1."""
    found = {}
    for where, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        for name in [*names, *links]:
            path = Path(where, name)
            plain = path.is_file() and not path.is_symlink()
            found[path.relative_to(folder).as_posix()] = path.stat().st_size if plain else -1
    found.pop(MANIFEST, None)
    return dict(sorted(found.items()))


def write_manifest(
    folder: Path, step: int, world: int, facts: Mapping[str, Any] | None = None, hashes: Mapping[str, str] | None = None
) -> None:
    """Write the manifest, which lists all files of a checkpoint with their sizes and hashes.

    step: number of completed steps. world: number of ranks that wrote the checkpoint. facts: additional entries
    (layout, config_hash, versions, metric). hashes: dict from path to hash if the files are already hashed and flushed,
    or None to do this here.
    """
    files = {}
    for name, size in contents(folder).items():
        files[name] = {"bytes": size, "xxh3_128": hashes[name] if hashes else flushed_hash(folder / name)}
    manifest = {
        "step": step,
        "world_size": world,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "bytes": sum(entry["bytes"] for entry in files.values()),
        **(facts or {}),
        "files": files,
        "xxh3_128": UNSIGNED,
    }
    text = json.dumps(manifest, indent=1)
    (folder / MANIFEST).write_text(_signed(text, xxhash.xxh3_128_hexdigest(text.encode())))
    flush(folder / MANIFEST)
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        flush(path)


def _signed(text: str, own: str) -> str:
    """Return the manifest's text with `own` as the last entry: the manifest's hash, or `UNSIGNED` before the hash is
    known.
    """
    return re.sub(r'("xxh3_128": )"[0-9a-f]{32}"(\n\})$', rf'\g<1>"{own}"\g<2>', text)


def read_manifest(folder: Path) -> dict:
    """Load the manifest of a checkpoint and check it against its own hash.

    Raises ValueError if the manifest is missing or damaged, or lists files outside of the checkpoint.
    """
    try:
        text = (folder / MANIFEST).read_bytes().decode()
        manifest = json.loads(text)
        if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
            raise ValueError("lists no files")
        missing = [name for name in NEEDED if name not in manifest["files"]]
        if missing:
            raise ValueError(f"does not list {', '.join(missing)}")
        if xxhash.xxh3_128_hexdigest(_signed(text, UNSIGNED).encode()) != manifest.get("xxh3_128"):
            raise ValueError("its own hash does not match")
        for name, entry in manifest["files"].items():
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or str(pure) != name:
                raise ValueError(f"lists {name!r}, which is outside of the checkpoint")
            if not isinstance(entry.get("bytes"), int) or not isinstance(entry.get("xxh3_128"), str):
                raise ValueError(f"has no size and hash of {name}")
        if not isinstance(manifest.get("step"), int) or not isinstance(manifest.get("world_size"), int):
            raise ValueError("has no step and number of ranks")
    except OSError as error:
        raise ValueError(f"{MANIFEST}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST}: {error}") from error
    return manifest


def problems(folder: Path, hashes: Mapping[str, str] | None = None) -> list[str]:
    """Return a list of problems with a checkpoint, which is empty if the checkpoint is intact. Damage is never raised
    as an error.

    A checkpoint is intact if three conditions hold. It has exactly the files listed in the manifest, with the listed
    sizes and hashes. The folder's name matches the manifest's step. Every folder of rank files has exactly one file per
    rank.

    hashes: dict from path to hash if the files are already hashed, or None to hash them here.
    """
    try:
        manifest = read_manifest(folder)
        found = _other_problems(folder, manifest)
        here = contents(folder)
        for name, want in manifest["files"].items():
            if name not in here:
                found.append(f"{name}: missing")
            elif here[name] < 0:
                found.append(f"{name}: is not a plain file")
            elif here[name] != want["bytes"]:
                found.append(f"{name}: {here[name]} bytes instead of {want['bytes']}")
            elif (hashes.get(name) if hashes is not None else file_hash(folder / name)) != want["xxh3_128"]:
                found.append(f"{name}: its hash is not the manifest's")
        return found + [f"{name}: is not in the manifest" for name in here if name not in manifest["files"]]
    except (OSError, ValueError) as error:
        return [str(error)]


def _other_problems(folder: Path, manifest: dict) -> list[str]:
    """Return problems with the step in the folder's name, and with missing or extra rank files."""
    found, world = [], manifest["world_size"]
    named = re.search(r"step_(\d+)$", folder.resolve().name)
    if named and int(named[1]) != manifest["step"]:
        found.append(f"{MANIFEST}: is for step {manifest['step']}")
    for place in sorted({str(PurePosixPath(name).parent) for name in manifest["files"] if "/ranks/" in f"/{name}"}):
        inside = {name for name in manifest["files"] if name.startswith(place + "/")}
        if inside != {f"{place}/{rank_name(rank)}" for rank in range(world)}:
            found.append(f"{place}: holds files of {len(inside)} ranks instead of {world}")
    return found
