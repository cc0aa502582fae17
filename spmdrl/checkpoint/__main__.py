"""Inspects the checkpoints of a run without starting it.

    python -m spmdrl.checkpoint list RUN        prints a table: step, time, size, ranks, layout, metric and damage
    python -m spmdrl.checkpoint verify RUN      checks all files against the manifests; exit code 1 if any is damaged
    python -m spmdrl.checkpoint diff A [B]      prints settings, versions, state and weights that differ

RUN is a run folder. `verify` also takes a single checkpoint. A and B are checkpoints or run folders, and a run folder
stands for its newest checkpoint. Without B the two newest checkpoints of the run folder A are compared.
"""

import argparse
import sys
from pathlib import Path

from spmdrl.checkpoint.compare import report
from spmdrl.checkpoint.files import byte_text
from spmdrl.checkpoint.manifest import problems, read_manifest
from spmdrl.checkpoint.published import best_step, measured_value, steps_saved


def root_of(run: str) -> Path:
    """Return the folder with a run's checkpoints. Raises ValueError if `run` contains no checkpoint."""
    for path in (Path(run) / "checkpoints", Path(run)):
        if steps_saved(path):
            return path
    raise ValueError(f"{run} is not a run folder with checkpoints: give the folder that was set by --run.dir")


def checkpoint_of(name: str) -> Path:
    """Return the checkpoint `name`, or the newest one in the run folder `name`. Raises ValueError if it is neither."""
    path = Path(name)
    if (path / "MANIFEST.json").exists():
        return path
    try:
        root = root_of(name)
    except ValueError:
        raise ValueError(
            f"{name} is neither a checkpoint (it has no MANIFEST.json) nor a run folder with one"
        ) from None
    return root / f"step_{steps_saved(root)[0]}"


def rows(root: Path) -> list[list[str]]:
    """Return the rows of the table printed by `list`, one per checkpoint, oldest first."""
    steps = steps_saved(root)
    latest = (root / "latest").resolve().name
    # Show the `--checkpoint.best` metric of the newest readable checkpoint that has one.
    best_by = next((name for step in steps if (name := _best_by(root / f"step_{step}"))), "")
    metric, best = best_by.removeprefix("-"), best_step(root, steps, best_by) if best_by else None
    out = []
    for step in reversed(steps):
        folder = root / f"step_{step}"
        wrong = problems(folder)
        try:
            manifest = read_manifest(folder)
        except ValueError:
            out.append([str(step), *[""] * 6, f"DAMAGED: {wrong[0]}"])
            continue
        layout = manifest.get("layout", {})
        axes = " x ".join(f"{axis} {n}" for axis, n in layout.get("axes", {}).items() if n > 1) or "1"
        value = measured_value(root, step, metric) if metric else None
        marks = [name for name, holds in (("latest", folder.name == latest), ("best", step == best)) if holds]
        out.append(
            [
                str(step),
                manifest.get("time", "").replace("+00:00", "Z"),
                byte_text(manifest.get("bytes", 0)),
                str(manifest["world_size"]),
                f"{layout.get('backend', '?')} {axes}",
                "" if value is None else f"{metric} {value:.4g}",
                " ".join(marks),
                "ok" if not wrong else f"DAMAGED: {wrong[0]}",
            ]
        )
    return out


def _best_by(folder: Path) -> str:
    try:
        return str(read_manifest(folder).get("best", ""))
    except ValueError:
        return ""


def show_list(run: str) -> int:
    """Print the table of a run's checkpoints, and return the exit code."""
    head = ["step", "time", "size", "ranks", "layout", "metric", "", "files"]
    table = [head, *rows(root_of(run))]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def verify(run: str) -> int:
    """Verify every checkpoint and print one line for each. Returns exit code 1 if any checkpoint is damaged, else 0."""
    bad = 0
    folders = [Path(run)] if (Path(run) / "MANIFEST.json").exists() else None
    for folder in folders or [root_of(run) / f"step_{step}" for step in reversed(steps_saved(root_of(run)))]:
        wrong = problems(folder)
        bad += bool(wrong)
        print(f"{folder}: " + (f"DAMAGED: {'; '.join(wrong[:5])}" if wrong else "ok"))
        if len(wrong) > 5:
            print(f"{folder}: and {len(wrong) - 5} more")
    return int(bad > 0)


def diff(a: str, b: str | None) -> int:
    """Print the differences between two checkpoints, and return the exit code."""
    if b is None:
        root = root_of(a)
        steps = steps_saved(root)
        if len(steps) < 2:
            raise ValueError(f"{a} has only one checkpoint: give another as the second argument")
        one, other = root / f"step_{steps[1]}", root / f"step_{steps[0]}"
    else:
        one, other = checkpoint_of(a), checkpoint_of(b)
    for folder in (one, other):
        if wrong := problems(folder):
            raise ValueError(f"{folder} is damaged ({wrong[0]})")
    for line in report(one, other):
        print(line)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 1 if `verify` finds a damaged checkpoint, 2 for an error, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m spmdrl.checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("list", "verify"):
        commands.add_parser(name).add_argument("run")
    comparing = commands.add_parser("diff")
    comparing.add_argument("a")
    comparing.add_argument("b", nargs="?")
    args = parser.parse_args(argv)
    try:
        if args.command == "diff":
            return diff(args.a, args.b)
        return show_list(args.run) if args.command == "list" else verify(args.run)
    except (ValueError, OSError) as error:
        print(f"python -m spmdrl.checkpoint: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
