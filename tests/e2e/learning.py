"""Does a preset learn? A run of the demo task, ended as soon as the policy is good enough, and what became of it.

A run is one rank in a process of its own, forked from a server that has torch and the project imported. It is the
program itself (`open_run`, `train`): what is put around it looks at each evaluation and ends the run early.

    python -m tests.e2e.learning dapo --seed 1 [flags of spmdrl.train]     one curve
    python -m tests.e2e.learning docs/results/learning/curves.json         the table of docs/learning.md
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from spmdrl.config.presets import PRESETS
from tests.e2e.runner import ROOT, argv, metrics
from tests.ranks.harness import PRELOAD

TARGET = 0.85
"""Held-out accuracy, sampled at temperature 1, that a preset must reach."""
STEPS, EVERY = 30, 2
"""Steps within which it must be reached, and steps between evaluations."""
LIMIT = 300.0
"""Seconds a run may take; on a quiet core it takes 5 to 10."""
AT_ONCE = 2
"""Runs side by side."""

QUICK = argv(
    "--rollout.engine hf --rollout.max_sequences 256 --eval.prompts 256 --checkpoint.no-at-end "
    "--tracking.trackers jsonl --tracking.samples 2"
)
"""Settings for speed and records, which have no effect on learning."""
OFF_POLICY = argv("--algo.updates_per_step 2")
"""More than one update a step: ratios leave 1, so that a loss's handling of them matters. With 4, curves dip."""
ON_POLICY = ("reinforce", "gpg")
"""Losses that are right for a single update only."""
OWN: dict[str, str] = {
    # A group with one right sample teaches, one with more does not: small groups, and many of them.
    "grpo_pass_k": "--rollout.samples_per_prompt 2 --rollout.prompts_per_step 128",
    "gdpo": "--reward.function recipes/own/reward.py --algo.part-weights match=1 place=0.5",
}
"""Flags of presets that have no recipe and need settings of their own here."""

TEACHER = argv("--algo.updates_per_step 4 --run.steps 32 --eval.every 32 --checkpoint.at_end")
"""Flags of the teacher, as recipes/distill/README.md has them."""
DISTILLED = "opd"
"""The recipe of `spmdrl.distill`."""
TAUGHT = ("distill", DISTILLED)
"""Runs that have a teacher."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Run:
    """A run to make: a preset, a seed, and further flags of spmdrl.train."""

    preset: str
    seed: int = 0
    more: tuple[str, ...] = ()


@dataclass
class Curve:
    """Result of a run."""

    preset: str
    seed: int
    steps: list[int]
    """Steps done before each evaluation."""
    accuracy: list[float]
    """`eval/accuracy` of each evaluation."""
    reward: list[float]
    """`reward/mean` of each step."""
    seconds: float

    def first(self, accuracy: float) -> int | None:
        """Number of steps after which an evaluation showed this accuracy; None where none did."""
        return next((s for s, a in zip(self.steps, self.accuracy, strict=True) if a >= accuracy), None)

    def __str__(self) -> str:
        shown = "  ".join(f"{s}: {a:.3f}" for s, a in zip(self.steps, self.accuracy, strict=True))
        return f"{self.preset} seed {self.seed}, {self.seconds:.0f} s: {shown}"


def has_learned(curve: Curve) -> None:
    """Condition that every preset must meet, and a wrong sign must not."""
    assert 0.25 < curve.accuracy[0] < 0.5, curve
    assert curve.first(TARGET) is not None, f"not {TARGET} in {STEPS} steps: {curve}"


# ── one run ──────────────────────────────────────────────────────────────────


class Reached(Exception):  # noqa: N818 (nothing went wrong)
    """Signals a run that is good enough, and ends it."""


def demos() -> dict[str, Path]:
    """Preset -> the demo of its recipe, where it has one; a demo without a preset goes by the name of its folder.

    So does that of `spmdrl.distill`.
    """
    files = sorted((ROOT / "recipes").glob("*/demo*.yaml"))
    return {yaml.safe_load(file.read_text()).get("algo", {}).get("preset", file.parent.name): file for file in files}


def settings(preset: str) -> list[str]:
    """Flags of a preset's run: its recipe's demo as it stands, or the preset with as few settings as it needs."""
    demo = demos().get(preset)
    if demo:
        return ["--config", str(demo)]
    loss = PRESETS[preset].settings["algo.loss"]
    return ["--algo.preset", preset, *([] if loss in ON_POLICY else OFF_POLICY), *argv(OWN.get(preset, ""))]


def learn(preset: str, seed: int, folder: Path, more: Sequence[str] = (), target: float = TARGET) -> Curve:
    """Runs a preset on the demo task until `target` is reached, or for STEPS steps.

    Args:
        preset: its name.
        seed: of the run.
        folder: for the run.
        more: further flags of spmdrl.train.
        target: accuracy that ends the run.

    Raises:
        RuntimeError: the run failed, or took longer than LIMIT seconds; with its last words.
    """
    bounds = ["--run.steps", str(STEPS), "--eval.every", str(EVERY), "--run.seed", str(seed)]
    began = time.monotonic()
    words = [*settings(preset), *QUICK, *bounds, *map(str, more), "--run.dir", str(folder)]
    _process(words, folder, target, "distill" if preset == DISTILLED else "train")
    seen = json.loads((folder / "evaluations.json").read_text())
    return Curve(
        preset,
        seed,
        [step for step, _ in seen],
        [round(accuracy, 4) for _, accuracy in seen],
        [round(row["reward/mean"], 4) for row in metrics(folder)],
        round(time.monotonic() - began, 1),
    )


def _process(words: list[str], folder: Path, target: float, program: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_child, args=(words, str(folder), target, program))
    process.start()
    process.join(LIMIT)
    late = process.exitcode is None
    if late:
        process.kill()
        process.join()
    if late or process.exitcode:
        how = f"took more than {LIMIT:.0f} s" if late else f"ended with exit code {process.exitcode}"
        said = (folder / "console.txt").read_text(errors="replace")[-4000:]
        raise RuntimeError(f"spmdrl.{program} {' '.join(words)}\n{how}\n{said}")


def _child(words: list[str], folder: str, target: float, program: str) -> None:
    # The server ends with the test process, and its runs with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(ROOT)
    console = os.open(f"{folder}/console.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(console, 1)
    os.dup2(console, 2)
    import torch

    from spmdrl import distill, train
    from spmdrl.config.load import load_or_exit
    from spmdrl.session.open import open_run

    job = (distill if program == "distill" else train).JOB
    loaded = load_or_exit(words, job.prog, job.settings, job.check)
    torch.set_num_threads(1)
    seen: list[tuple[int, float]] = []
    with open_run(job, loaded) as run:
        evaluate = run.evaluate

        def watched(step: int, force: bool = False) -> None:
            evaluate(step, force)
            if run.evaluation.numbers:
                seen.append((step, run.evaluation.numbers["eval/accuracy"]))
                Path(folder, "evaluations.json").write_text(json.dumps(seen))
                if seen[-1][1] >= target:
                    raise Reached

        run.evaluate = watched
        with contextlib.suppress(Reached):
            job.train(run)


# ── many runs ────────────────────────────────────────────────────────────────


def teach(folder: Path) -> Path:
    """Trains a policy that knows the task, as distillation's teacher; returns its folder."""
    curve = learn("grpo", 0, folder, TEACHER, target=2.0)
    assert curve.accuracy[-1] >= 0.95, f"the teacher has to know the task: {curve}"
    return folder / "checkpoints" / "latest" / "model"


@contextlib.contextmanager
def learning(runs: Mapping[str, Run], folder: Path, target: float = TARGET) -> Iterator[Callable[[str], Curve]]:
    """Starts all runs, AT_ONCE at a time and in their order; the function that it returns waits for the run of a name.

    Distillation's teacher is trained first, where a run asks for it.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        # This run is first in the queue, so that a wait for it in the pool is a wait for a run under way.
        wanted = any(run.preset in TAUGHT for run in runs.values())
        teacher = pool.submit(teach, folder / "teacher") if wanted else None

        def start(name: str, run: Run) -> Curve:
            from_teacher = ["--reference.path", str(teacher.result())] if run.preset in TAUGHT and teacher else []
            return learn(run.preset, run.seed, folder / name, [*from_teacher, *run.more], target)

        futures: dict[str, Future[Curve]] = {name: pool.submit(start, name, run) for name, run in runs.items()}
        try:
            yield lambda name: futures[name].result()
        finally:
            pool.shutdown(cancel_futures=True)


WRONG_SIGN = """
import dataclasses
from spmdrl.algos.losses import LOSSES

def loss(x):
    return LOSSES["{name}"].function(dataclasses.replace(x, advantages=-x.advantages))
"""


def wrong_sign(loss: str, file: Path) -> Run:
    """Returns a run that must fail: a user's file whose loss is a built-in one of the opposite advantages."""
    preset = next(name for name, preset in PRESETS.items() if preset.settings["algo.loss"] == loss)
    file.write_text(WRONG_SIGN.format(name=loss))
    return Run(preset, 0, ("--algo.loss", f"{file}:loss"))


# ── what is shown ────────────────────────────────────────────────────────────


def table(curves: Sequence[Curve]) -> str:
    """Returns a Markdown table with a line for each preset."""
    seeds = sorted({curve.seed for curve in curves})
    lines = [
        f"| preset | steps to {TARGET}, seeds {', '.join(map(str, seeds))} | accuracy before | at the end (steps) |",
        "|---|---|---|---|",
    ]
    for preset in dict.fromkeys(curve.preset for curve in curves):
        mine = sorted((c for c in curves if c.preset == preset), key=lambda c: c.seed)
        reached = ", ".join(str(c.first(TARGET) or "never") for c in mine)
        before = ", ".join(f"{c.accuracy[0]:.2f}" for c in mine)
        after = ", ".join(f"{c.accuracy[-1]:.2f} ({c.steps[-1]})" for c in mine)
        lines.append(f"| `{preset}` | {reached} | {before} | {after} |")
    return "\n".join(lines)


def read(path: Path) -> list[Curve]:
    """Reads the curves of a file that `write` made."""
    return [Curve(**row) for row in json.loads(path.read_text())["curves"]]


def write(path: Path, about: dict, curves: Sequence[Curve]) -> None:
    """Writes curves as JSON, one to a line."""
    rows = ",\n".join(json.dumps(asdict(curve)) for curve in curves)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"about": {json.dumps(about)},\n"curves": [\n{rows}\n]}}\n')


def main() -> None:
    """Prints one curve, or the table of many."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="a preset, or a JSON file of curves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=TARGET)
    args, more = parser.parse_known_args()
    if args.what.endswith(".json"):
        print(table(read(Path(args.what))))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(learn(args.what, args.seed, Path(folder) / "run", more, args.target))


if __name__ == "__main__":
    main()
