"""Where a run may write: inside its folder, links followed."""

from pathlib import Path

from spmdrl.config.schema import Config

WRITTEN = ("config.yaml", "metrics.jsonl", "samples.jsonl", "logs", "checkpoints", "spikes", "tensorboard", "wandb")
"""What a run writes at the top of its folder."""


def run_folder(cfg: Config) -> Path:
    """`--run.dir`, or `runs/<name>`."""
    return Path(cfg.run.dir or Path("runs") / cfg.run.name)


def inside(folder: Path, *names: str) -> Path:
    """`folder/names...`, which must lie in it when links are followed.

    Raises:
        ValueError: it does not.
    """
    place = folder.joinpath(*names)
    if not place.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{place} leads out of the run folder, to {place.resolve()}, and nothing is written there: remove that "
            "link, or choose another --run.dir"
        )
    return place


def check_run_folder(folder: Path) -> None:
    """Refuse a run folder in which something that would be written, or removed to make room, is a link out of it.

    The folder itself may be one, so that a run can lie on another disk; `checkpoints/latest` is replaced and never
    followed.

    Raises:
        ValueError: naming the link.
    """
    for name in WRITTEN:
        inside(folder, name)
    for part in ("checkpoints", "logs", "spikes"):
        for place in (folder / part).iterdir() if (folder / part).is_dir() else ():
            if place.name not in ("latest", ".latest"):
                inside(folder, part, place.name)
