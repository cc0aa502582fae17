"""Command that inspects the checkpoints of a run, without starting one.

    python -m spmdrl.checkpoint list RUN        one line each: step, time, size, ranks, layout, metric, what is wrong
    python -m spmdrl.checkpoint verify RUN      every file against the manifest; exit code 1 if any is damaged
    python -m spmdrl.checkpoint diff A [B]      settings, versions, state and weights that differ

RUN is a run folder. A and B are checkpoints, or run folders, which stand for their newest one. A alone: a run folder,
of which the two newest are compared.
"""

import argparse
import sys
from pathlib import Path

from spmdrl.checkpoint.compare import report
from spmdrl.checkpoint.disk_space import size
from spmdrl.checkpoint.keep import best_of, value_of
from spmdrl.checkpoint.manifest import problems, read_manifest
from spmdrl.checkpoint.published import steps_saved


def root_of(run: str) -> Path:
    """The folder with the checkpoints of a run.

    Raises:
        ValueError: there is none.
    """
    for path in (Path(run) / "checkpoints", Path(run)):
        if steps_saved(path):
            return path
    raise ValueError(f"{run} is no run folder with checkpoints; name the folder given as --run.dir")


def checkpoint_of(name: str) -> Path:
    """A checkpoint, or the newest one of a run folder.

    Raises:
        ValueError: it is neither.
    """
    path = Path(name)
    if (path / "MANIFEST.json").exists():
        return path
    try:
        root = root_of(name)
    except ValueError:
        raise ValueError(f"{name} is neither a checkpoint (no MANIFEST.json in it) nor a run folder with one") from None
    return root / f"step_{steps_saved(root)[0]}"


def rows(root: Path) -> list[list[str]]:
    """Returns one row a checkpoint, oldest first."""
    steps = steps_saved(root)
    latest = (root / "latest").resolve().name
    metric = next((m for step in steps if (m := _metric(root / f"step_{step}"))), ("", ""))
    best = best_of(root, steps, metric[1]) if metric[1] else None
    out = []
    for step in reversed(steps):
        folder = root / f"step_{step}"
        wrong = problems(folder)
        try:
            said = read_manifest(folder)
        except ValueError:
            out.append([str(step), *[""] * 6, f"DAMAGED: {wrong[0]}"])
            continue
        layout = said.get("layout", {})
        axes = " x ".join(f"{axis} {n}" for axis, n in layout.get("axes", {}).items() if n > 1) or "1"
        value = value_of(root, step, metric[0]) if metric[0] else None
        marks = [name for name, is_it in (("latest", folder.name == latest), ("best", step == best)) if is_it]
        out.append(
            [
                str(step),
                said.get("time", "").replace("+00:00", "Z"),
                size(said.get("bytes", 0)),
                str(said["world_size"]),
                f"{layout.get('backend', '?')} {axes}",
                "" if value is None else f"{metric[0]} {value:.4g}",
                " ".join(marks),
                "ok" if not wrong else f"DAMAGED: {wrong[0]}",
            ]
        )
    return out


def _metric(folder: Path) -> tuple[str, str]:
    """Returns the metric by which checkpoints are kept: (name, the text of `--checkpoint.best`)."""
    try:
        best = read_manifest(folder).get("best", "")
        return best.removeprefix("-"), best
    except (ValueError, AttributeError):
        return "", ""


def show_list(run: str) -> int:
    """Prints the table."""
    head = ["step", "time", "size", "ranks", "layout", "metric", "", "files"]
    table = [head, *rows(root_of(run))]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def verify(run: str) -> int:
    """Verifies every checkpoint and prints one line for each; returns 1 if any is damaged."""
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
    """Prints the differences of two checkpoints."""
    if b is None:
        root = root_of(a)
        steps = steps_saved(root)
        if len(steps) < 2:
            raise ValueError(f"{a} has one checkpoint only; name another as the second argument")
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
    """Runs the command; exit code 1 if a checkpoint is damaged, 2 for a folder without checkpoints."""
    parser = argparse.ArgumentParser(
        prog="python -m spmdrl.checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("list", "verify"):
        commands.add_parser(name).add_argument("run")
    comparing = commands.add_parser("diff")
    comparing.add_argument("a")
    comparing.add_argument("b", nargs="?")
    said = parser.parse_args(argv)
    try:
        if said.command == "diff":
            return diff(said.a, said.b)
        return show_list(said.run) if said.command == "list" else verify(said.run)
    except (ValueError, OSError) as error:
        print(f"python -m spmdrl.checkpoint: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
