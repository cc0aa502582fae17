"""A checkpoint as files: its manifest, what is wrong with it, which ones stay, room on the disk. No communication."""

import datetime
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from spmdrl.health.status import alive

log = logging.getLogger("spmdrl")

MANIFEST = "MANIFEST.json"
NEEDED = ("state/run.json", "model/config.json")
"""Without these a folder is no checkpoint, whatever its manifest lists."""
UNSIGNED = "0" * 32
"""Stands in the manifest where its own hash comes, while that is taken."""


class DamagedError(ValueError):
    """A checkpoint that was just written reads back as something else."""


# ── one folder ───────────────────────────────────────────────────────────────


def file_hash(path: Path) -> str:
    """xxh3_128 of a file, hex."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while block := f.read(16 << 20):
            state.update(block)
            alive()
    return state.hexdigest()


def flushed_hash(path: Path) -> str:
    """Hash of a file that was just written, and the file to the disk."""
    # The hash first: it is of what was written, and not of what the disk made of it.
    found = file_hash(path)
    flush(path)
    return found


def contents(folder: Path) -> dict[str, int]:
    """Name (with `/`) -> bytes of everything in a folder that is no folder, the manifest apart; -1: no plain file."""
    found = {}
    for where, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        for name in [*names, *links]:
            path = Path(where, name)
            plain = path.is_file() and not path.is_symlink()
            found[path.relative_to(folder).as_posix()] = path.stat().st_size if plain else -1
    found.pop(MANIFEST, None)
    return dict(sorted(found.items()))


def flush(path: Path) -> None:
    """To the disk, and out of the page cache: who reads it next sees what the disk has."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise") and not path.is_dir():
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    alive()


def write_text(path: Path, text: str) -> None:
    """Whole or not at all: beside it first, then over it."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    flush(part)
    os.replace(part, path)


def write_manifest(
    folder: Path, step: int, world: int, facts: Mapping[str, Any] | None = None, hashes: Mapping[str, str] | None = None
) -> dict:
    """List all files of a checkpoint with size and hash, and flush what is not yet on the disk; returns the manifest.

    Args:
        folder: what is written so far.
        step: steps done.
        world: ranks that wrote it.
        facts: what else it is to say (layout, config_hash, versions, metric).
        hashes: of all files, where they are known and the files are flushed already.
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
    return manifest


def _signed(text: str, own: str) -> str:
    """The manifest's text with its own hash in the last place; with `UNSIGNED`, as it was hashed."""
    return re.sub(r'("xxh3_128": )"[0-9a-f]{32}"(\n\})$', rf'\g<1>"{own}"\g<2>', text)


def read_manifest(folder: Path) -> dict:
    """The manifest of a checkpoint, itself verified.

    Raises:
        ValueError: it is missing or damaged, or lists names that no checkpoint has.
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
            raise ValueError("its hash is not the one it says")
        for name, entry in manifest["files"].items():
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or str(pure) != name:
                raise ValueError(f"names {name!r}, which does not lie in the checkpoint")
            if not isinstance(entry.get("bytes"), int) or not isinstance(entry.get("xxh3_128"), str):
                raise ValueError(f"says no size and hash of {name}")
        if not isinstance(manifest.get("step"), int) or not isinstance(manifest.get("world_size"), int):
            raise ValueError("says no step and number of ranks")
    except OSError as error:
        raise ValueError(f"{MANIFEST}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST}: {error}") from error
    return manifest


def problems(folder: Path, hashes: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with a checkpoint; an empty list when it is whole. Nothing in the folder can make it raise.

    Whole: every file that the manifest lists is there with its size and hash, no other file is, the folder's name is of
    the manifest's step, and where ranks left files of their own there is one of each rank.

    hashes: name -> hash of all files, where others have read them.
    """
    try:
        manifest = read_manifest(folder)
        found = _other_problems(folder, manifest)
        here = contents(folder)
        for name, want in manifest["files"].items():
            if name not in here:
                found.append(f"{name}: missing")
            elif here[name] < 0:
                found.append(f"{name}: is no plain file")
            elif here[name] != want["bytes"]:
                found.append(f"{name}: {here[name]} bytes, the manifest says {want['bytes']}")
            elif (hashes.get(name) if hashes is not None else file_hash(folder / name)) != want["xxh3_128"]:
                found.append(f"{name}: its hash is not the manifest's")
        return found + [f"{name}: is not in the manifest" for name in here if name not in manifest["files"]]
    except (OSError, ValueError) as error:
        return [str(error)]


def _other_problems(folder: Path, manifest: dict) -> list[str]:
    """What the names say against the manifest."""
    found, world = [], manifest["world_size"]
    named = re.search(r"step_(\d+)$", folder.resolve().name)
    if named and int(named[1]) != manifest["step"]:
        found.append(f"{MANIFEST}: is of step {manifest['step']}")
    for place in sorted({str(PurePosixPath(name).parent) for name in manifest["files"] if "/ranks/" in f"/{name}"}):
        inside = {name for name in manifest["files"] if name.startswith(place + "/")}
        if inside != {f"{place}/{rank_name(rank)}" for rank in range(world)}:
            found.append(f"{place}: holds files of {len(inside)} ranks, the manifest says {world}")
    return found


def rank_name(rank: int) -> str:
    """File of one rank's own state."""
    return f"rank_{rank:05d}.safetensors"


def rank_files(folder: Path) -> list[Path]:
    """What every rank left of its own (`data/treefile.py` reads it), in rank order; empty where none did."""
    return sorted((folder / "state" / "ranks").glob("rank_*.safetensors"))


# ── all of a run ─────────────────────────────────────────────────────────────


def steps_saved(root: Path) -> list[int]:
    """Steps of all published checkpoints, newest first."""
    names = [re.fullmatch(r"step_(\d+)", p.name) for p in root.glob("step_*")] if root.is_dir() else []
    return sorted({int(m[1]) for m in names if m and m[1] == str(int(m[1]))}, reverse=True)


def newest_valid(root: Path) -> Path | None:
    """The newest checkpoint that verifies, None if there is none at all. What is passed over is warned of.

    Raises:
        ValueError: checkpoints exist and none of them verifies.
    """
    return choose(root, ((step, problems(root / f"step_{step}")) for step in steps_saved(root)))


def choose(root: Path, verified: Iterator[tuple[int, list[str]]]) -> Path | None:
    """`newest_valid` of (step, what is wrong with it), newest first."""
    bad = []
    for step, wrong in verified:
        if not wrong:
            if bad:
                log.warning("%s; resuming from step_%d", "; ".join(bad), step)
            return root / f"step_{step}"
        bad.append(f"checkpoint {root / f'step_{step}'} is damaged ({wrong[0]})")
    if bad:
        raise ValueError("; ".join(bad) + ". None is usable: move the folder away, or choose another --run.dir")
    return None


def clean(root: Path) -> None:
    """Remove what a killed job left half written, and put back what it was about to replace."""
    for path in root.glob(".replaced-step_*") if root.is_dir() else ():
        final = root / path.name.removeprefix(".replaced-")
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.replace(path, final)
    for path in root.glob(".incomplete-step_*") if root.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, root: Path, step: int) -> Path:
    """A folder that is whole becomes `root/step_<step>`, and `latest` points at it."""
    final, before = root / f"step_{step}", root / f".replaced-step_{step}"
    if final.exists():
        shutil.rmtree(before, ignore_errors=True)
        os.replace(final, before)
    os.replace(temporary, final)
    link = root / ".latest"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    os.replace(link, root / "latest")
    flush(root)
    shutil.rmtree(before, ignore_errors=True)
    return final


# ── which ones stay ──────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Keep:
    """`--checkpoint.keep`, `keep-every` and `best`."""

    newest: int = 2
    every: int = 0
    """Steps that are a multiple of it stay. 0: none for that."""
    best: str = ""
    """Metric whose best checkpoint stays; `-name`: the lowest is best. Empty: none."""

    @property
    def metric(self) -> str:
        """Name of that metric."""
        return self.best.removeprefix("-")


def value_of(root: Path, step: int, metric: str) -> float | None:
    """What is known of a checkpoint: what was measured of its very weights, else what was known when it was saved."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return float(json.loads((root / "measured.json").read_text())[str(step)][metric])
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return float(json.loads((root / f"step_{step}" / MANIFEST).read_text())["metrics"][metric])
    return None


def measured(root: Path, step: int, values: Mapping[str, float]) -> None:
    """Note what was measured of the checkpoint of a step; what stands there of later steps is of another course."""
    told: dict = {}
    with suppress(OSError, ValueError):
        told = json.loads((root / "measured.json").read_text())
    kept = {k: v for k, v in told.items() if k.isdecimal() and int(k) < step} if isinstance(told, dict) else {}
    write_text(root / "measured.json", json.dumps(kept | {str(step): dict(values)}, indent=1))


def best_of(root: Path, steps: list[int], best: str) -> int | None:
    """The step whose checkpoint has the best value, the newest of equal ones; None where no value is known."""
    sign = -1.0 if best.startswith("-") else 1.0
    known = [(sign * v, s) for s in steps if (v := value_of(root, s, best.removeprefix("-"))) is not None and v == v]
    return max(known)[1] if known else None


def prune(root: Path, step: int, keep: Keep) -> list[int]:
    """Make room once the checkpoint of `step` has verified; returns the steps that went.

    Only what came before that one goes: a newer folder was passed over as damaged and will be written again.
    """
    older = [s for s in steps_saved(root) if s < step]
    stay = set(older[: max(keep.newest, 1) - 1])
    stay |= {s for s in older if keep.every and s % keep.every == 0}
    if keep.best:
        # That of `step` itself is not measured yet, and stays anyway.
        stay |= {best_of(root, older, keep.best) or step}
    gone = [s for s in older if s not in stay]
    for old in gone:
        # Out of sight first: a folder half removed is no damaged checkpoint.
        away = root / f".incomplete-step_{old}"
        os.replace(root / f"step_{old}", away)
        shutil.rmtree(away, ignore_errors=True)
        alive()
    return gone
