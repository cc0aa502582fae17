"""Shared code of the benchmarks that train on given rows: runs both sides in turns, compares them, prints a table."""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._about import measured_on, save
from benchmarks._trl import PINS, ROOT, Turns, seconds_of, take_turns, trl_python

Side = Callable[[Any, Path], None]
"""Function of (job, folder) that runs one side of a job on one rank."""


def peak_mib() -> float:
    """Return the largest resident set size of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def gsm8k(data: Path | None, count: int) -> list[dict]:
    """Return the first rows of GSM8K, for real jobs."""
    if data is None:
        sys.exit("--data: real jobs need GSM8K's train.jsonl (columns question, answer)")
    return [json.loads(line) for line in data.read_text().splitlines()[:count]]


def write_rows(rows: list[dict], file: Path) -> None:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ends(log: list[dict], name: str) -> list[float]:
    """Return a number of the first step and of the last one, or an empty list if the log lacks it."""
    return [log[0][name], log[-1][name]] if name in log[0] else []


def run_trl(make: Callable[..., Any], folder: Path) -> None:
    """Train on TRL's side. make: function that returns the trainer, given its callbacks."""
    from transformers import TrainerCallback

    turns = Turns(folder, "trl")

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            turns.wait()

        def on_train_end(self, *args, **kwargs):
            turns.arrive()

    trainer = make([Clock()])
    trainer.train()
    log = [row for row in trainer.state.log_history if "loss" in row]
    numbers = {"losses": ends(log, "loss"), "logp": ends(log, "logps/chosen"), "peak_mib": peak_mib()}
    numbers |= {"rows": len(trainer.train_dataset), "dtype": str(trainer.model.dtype)}
    (folder / f"trl.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(numbers))


def trl_settings(job: Any, folder: Path) -> dict[str, Any]:
    """Return the settings of TRL that all jobs share."""
    return dict(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=job.dtype == "bfloat16",
        max_steps=job.warm + job.steps,
        learning_rate=job.lr,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
    )


def run_ours(job: Any, folder: Path, kind: Any, more: dict[str, Any]) -> None:
    """Train on spmdrl's side. kind: `JOB` of the entry point. more: flags in addition to those that all jobs share."""
    from spmdrl.config.load import Loaded, from_command_line
    from spmdrl.session.open import open_run

    flags = {
        "run.dir": folder / "run",
        "run.steps": job.warm + job.steps,
        "run.device": "cpu",  # TRL's side uses the CPU too.
        "model.path": job.model,
        "model.dtype": job.dtype,
        "optimizer.lr": job.lr,
        "policy.max_tokens_per_microbatch": job.length,
        "data.train": folder / "rows.jsonl",
        "checkpoint.at_end": "false",
        "tracking.console": "plain",
    } | more
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    config = from_command_line(words, "a benchmark", kind.settings).config
    with open_run(kind, Loaded(config)) as run:
        turns, steps = Turns(folder, "spmdrl"), run.steps()

        def in_turns():
            for _ in range(config.run.steps):
                turns.wait()
                yield next(steps)
            turns.arrive()

        run.steps = in_turns
        kind.train(run)
        (folder / f"spmdrl.{run.world.rank}.json").write_text(json.dumps({"peak_mib": peak_mib()}))


def measure(script: str, job: Any, rows: list[dict], encode: Callable[[Any, Path], dict], python: Path) -> dict:
    """Run both sides of a job in turns; return medians of their figures and the ratios.

    encode: function of (job, folder with rows.jsonl) that returns columns of tokens, so that TRL trains on exactly the
    same tokens. python: interpreter of TRL's environment.
    """
    from spmdrl.hub.resolve import resolve

    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        (folder / "model").write_text(str(resolve(job.model)))
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        write_rows(rows, folder / "rows.jsonl")
        held = encode(job, folder)
        (folder / "encoded.json").write_text(json.dumps(held))
        sides = {"trl": python, "spmdrl": Path(sys.executable)}
        take_turns(Path(script), sides, job.ranks, job.warm + job.steps, folder)
        seconds = {side: seconds_of(folder, side, job.ranks)[1 + job.warm :] for side in sides}
        log = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        numbers = {
            side: [json.loads((folder / f"{side}.{rank}.json").read_text()) for rank in range(job.ranks)]
            for side in sides
        }
    theirs, mine = (statistics.median(seconds[side]) for side in ("trl", "spmdrl"))
    return {
        **asdict(job),
        "encoded": held,
        "ratio": theirs / mine,
        "medians": {"trl": theirs, "spmdrl": mine},
        "losses": {"trl": numbers["trl"][0]["losses"], "spmdrl": ends(log, "loss")},
        "logp": {"trl": numbers["trl"][0]["logp"], "spmdrl": ends(log, "logp/chosen")},
        "peak_mib": {side: max(each["peak_mib"] for each in numbers[side]) for side in sides},
        "seconds": seconds,
        "trl_weights": numbers["trl"][0]["dtype"],
        "trl_rows": numbers["trl"][0]["rows"],
        "phases": {k: statistics.median(r[k] for r in log[job.warm :]) for k in log[-1] if k.startswith("time/")},
    }


def finish(row: dict, tokens: int, same: dict[str, dict[str, tuple[float, float]]]) -> dict:
    """Check that both sides agree and return the job's row with tokens per second.

    same: by dtype and `losses` or `logp`, a pair: the largest relative difference in the first and last step, and that
    of the change between them.

    Raises:
        RuntimeError: the sides do not agree.
    """
    for name, (most, of_change) in same[row["dtype"]].items():
        pairs = list(zip(*row[name].values(), strict=True))
        pairs = [(*pair, most) for pair in pairs] + [(*(b - a for a, b in row[name].values()), of_change)]
        if len(pairs) != 3 or any(abs(theirs - mine) > bound * abs(theirs) for theirs, mine, bound in pairs):
            raise RuntimeError(f"the sides differ in {name}: {row[name]}")
    medians = row.pop("medians")
    return row | {"tokens": tokens} | {f"{side}_tokens_s": tokens / taken for side, taken in medians.items()}


def command(doc: str | None, name: str, jobs: dict[str, Any], sides: dict[str, Side], run: Callable[..., dict]) -> None:
    """Run the jobs that the command line selects, print a table and one line per target, and write JSON.

    doc: docstring of the script. name: prefix of the names of targets. run: function of (job, file of GSM8K, Python
    interpreter of TRL) that returns a row.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny-fp32-1 alone unless --only names others; 4 steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=jobs, help="default: all of them")
    parser.add_argument("--data", type=Path, help="GSM8K's train.jsonl, for real jobs")
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side, folder = args.side
        kind = type(next(iter(jobs.values())))
        return sides[side](kind(**json.loads((Path(folder) / "job.json").read_text())), Path(folder))
    about = measured_on("cpu", args.json) | {"trl": PINS[0]}
    python, rows = trl_python(args.trl_venv), {}
    print(f"{'job':<14}{'tokens':>8}{'ours/s':>9}{'TRL/s':>9}{'ratio':>7}{'ours MiB':>10}{'TRL MiB':>9}")
    for each in args.only or (["tiny-fp32-1"] if args.quick else list(jobs)):
        job = jobs[each]
        job.steps = min(job.steps, 4) if args.quick else job.steps
        row = rows[each] = run(job, args.data, python) | {"about": about}
        peaks = row["peak_mib"]
        print(
            f"{each:<14}{row['tokens']:>8}{row['spmdrl_tokens_s']:>9.0f}{row['trl_tokens_s']:>9.0f}{row['ratio']:>7.2f}"
            f"{peaks['spmdrl']:>10.0f}{peaks['trl']:>9.0f}",
            flush=True,
        )
        if args.json:
            before = json.loads(args.json.read_text()) if args.json.exists() else {}
            save(args.json, about, jobs=before.get("jobs", {}) | rows)
    for each, row in rows.items():
        word = "ok" if row["ratio"] >= row["goal"] else "miss"
        print(f"target {name}_{each.replace('-', '_')} {row['ratio']:.2f} {row['goal']} {word}")
