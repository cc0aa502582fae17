"""Checkpoints: written beside, verified by a manifest, published by one rename.

checkpoints/step_<N>/model/         HF safetensors, config, tokenizer: opens in transformers and vLLM as it is
checkpoints/step_<N>/state/         optimizer (torch.distributed.checkpoint) and run.json
checkpoints/step_<N>/<name>/        model/ and state/ of a critic or another model that learns
checkpoints/step_<N>/MANIFEST.json  size and hash of every file; a folder without it is not a checkpoint
checkpoints/latest                  link to the newest
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path

import torch.distributed as dist
import xxhash

from spmdrl.models import Models
from spmdrl.spmd.exchange import all_gather_text
from spmdrl.spmd.mesh import World

log = logging.getLogger("spmdrl")


def file_hash(path: Path) -> str:
    """xxh3_128 of a file, hex."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while block := f.read(16 << 20):
            state.update(block)
    return state.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path, step: int, world: int) -> None:
    """Flush every file of a checkpoint to disk and list it with size and hash."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _sync(path)
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "xxh3_128": file_hash(path)}
    manifest = folder / "MANIFEST.json"
    manifest.write_text(json.dumps({"step": step, "world_size": world, "files": files}, indent=1))
    _sync(manifest)
    _sync(folder)


def problems(folder: Path) -> list[str]:
    """What is wrong with a checkpoint; an empty list when every file is there with its size and hash."""
    try:
        manifest = json.loads((folder / "MANIFEST.json").read_text())["files"]
        if not isinstance(manifest, dict):
            raise ValueError("lists no files")
        missing = {"state/run.json", "model/config.json"} - set(manifest)
        if missing:
            raise ValueError(f"does not list {', '.join(sorted(missing))}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"MANIFEST.json: {error}"]
    found = []
    for name, want in manifest.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name}: missing")
        elif path.stat().st_size != want["bytes"]:
            found.append(f"{name}: {path.stat().st_size} bytes, the manifest says {want['bytes']}")
        elif file_hash(path) != want["xxh3_128"]:
            found.append(f"{name}: its hash is not the manifest's")
    return found


def steps_saved(root: Path) -> list[int]:
    """Steps of all published checkpoints, newest first."""
    names = [re.fullmatch(r"step_(\d+)", p.name) for p in root.glob("step_*")] if root.is_dir() else []
    return sorted((int(m.group(1)) for m in names if m), reverse=True)


def newest_valid(root: Path) -> Path | None:
    """The newest checkpoint that verifies, None if there is none at all.

    Raises:
        ValueError: checkpoints exist and none of them verifies.
    """
    bad = []
    for step in steps_saved(root):
        wrong = problems(root / f"step_{step}")
        if not wrong:
            if bad:
                log.warning("%s; resuming from step_%d", "; ".join(bad), step)
            return root / f"step_{step}"
        bad.append(f"checkpoint {root / f'step_{step}'} is damaged ({wrong[0]})")
    if bad:
        raise ValueError("; ".join(bad) + ". None is usable: move the folder away, or choose another --run.dir")
    return None


def find_resume(root: Path, world: World) -> Path | None:
    """`newest_valid`, decided by rank 0 alone and told to all. Collective."""
    said = ""
    if world.is_first:
        try:
            said = json.dumps({"found": str(newest_valid(root) or "")})
        except ValueError as error:
            said = json.dumps({"error": str(error)})
    answer = json.loads(all_gather_text(said, world.host_group)[0])
    if "error" in answer:
        raise ValueError(answer["error"])
    return Path(answer["found"]) if answer["found"] else None


def save(root: Path, step: int, models: Models, state: dict, world: World, keep: int) -> Path:
    """Write `root/step_<step>` and point `latest` at it. Collective.

    state: JSON-able, rank 0 writes its own. keep: how many newest checkpoints stay.
    """
    final, temporary = root / f"step_{step}", root / f".incomplete-step_{step}"
    if world.is_first:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "state").mkdir(parents=True)
        (temporary / "state" / "run.json").write_text(json.dumps(state, indent=1))
    dist.barrier(group=world.host_group)
    if models.policy:
        models.policy.save(temporary)
    for name, model in models.saved().items():
        model.save(temporary / name)
    dist.barrier(group=world.host_group)
    if world.is_first:
        write_manifest(temporary, step, world.size)
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
        link = root / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        os.replace(link, root / "latest")
        _sync(root)
        # Only what came before the one just written makes room: a newer folder was passed over as damaged.
        older = [s for s in steps_saved(root) if s < step]
        for old in older[max(keep, 1) - 1 :]:
            shutil.rmtree(root / f"step_{old}")
    dist.barrier(group=world.host_group)
    return final


def load(folder: Path, models: Models) -> dict:
    """Fill what learns from a verified checkpoint; returns the state that was saved with it. Collective.

    Raises:
        ValueError: the checkpoint lacks a model that this run trains.
    """
    missing = [name for name in models.saved() if not (folder / name / "model").is_dir()]
    if missing:
        raise ValueError(
            f"{folder} holds no {', '.join(missing)}, which this run's algorithm trains: resume with the settings it "
            "was made with, or choose another --run.dir and start from its model with --model.path"
        )
    if models.policy:
        models.policy.load(folder)
    for name, model in models.saved().items():
        model.load(folder / name)
    return json.loads((folder / "state" / "run.json").read_text())
