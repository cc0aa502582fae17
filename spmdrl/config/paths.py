"""The paths that a run writes to, which must be inside its folder even after links are resolved."""

from fnmatch import fnmatchcase
from pathlib import Path

from spmdrl.config.schema import TrainingConfig

FOLDERS = ("logs", "checkpoints", "spikes", "flight", "tensorboard", "wandb")
WRITTEN = (
    *FOLDERS,
    ".lock",
    "PREEMPTED",
    "config.yaml",
    ".config.yaml.part",
    "metrics.jsonl",
    "samples.jsonl",
    # The suffix is `.part` while a file is being truncated, and `.old`, `.old-1`, ... for files from an older run.
    "metrics.jsonl.*",
    "samples.jsonl.*",
)
"""Names of the files and folders that a run writes in its folder; `*` matches any characters."""


def run_folder(cfg: TrainingConfig) -> Path:
    """Return the run folder: `--run.dir`, or `runs/<name>` if it is empty."""
    return Path(cfg.run.dir or Path("runs") / cfg.run.name)


def recorded_settings(folder: Path) -> Path:
    """Return the path of the config.yaml that a run wrote to its folder; the file might not exist."""
    path = folder / "config.yaml"
    return path if path.exists() else folder / "checkpoints" / "latest" / "state" / "config.yaml"


def inside(folder: Path, *names: str) -> Path:
    """Return the path of `names` in the folder. Raises ValueError if a link along the path leads out of the folder."""
    place = folder.joinpath(*names)
    if not place.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{place} leads out of the run folder, to {place.resolve()}, and nothing is written there: remove that "
            "link, or choose another --run.dir"
        )
    return place


def check_run_folder(folder: Path) -> None:
    """Refuse a run folder if a file that the run writes or deletes is a link that leads outside the folder.

    The folder itself can be a link, so that a run can be on another disk. The link `checkpoints/latest` is not checked,
    because the run replaces it and never follows it. Raises ValueError with the path of the link.
    """
    written = [place for place in _listed(folder) if any(fnmatchcase(place.name, name) for name in WRITTEN)]
    for name in FOLDERS:
        written += _listed(folder / name)
    for place in _listed(folder / "spikes"):
        written += _listed(place)
    for place in written:
        if place not in (folder / "checkpoints" / "latest", folder / "checkpoints" / ".latest"):
            inside(folder, place.relative_to(folder).as_posix())


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
