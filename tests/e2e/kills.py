"""Sends SIGKILL at seeded moments: one rank of `spmdrl.train` dies in a phase, and `story` strings many kills together.

`python -m tests.e2e.kills` is `spmdrl.train`; SPMDRL_KILL holds {"rank", "phase", "time", "seconds", "note"}: which
rank dies, in which phase, at its how-manieth time in this process, how many seconds after the phase begins (at the
latest when it ends), and the file that is told so; "job" names another entry point. Nothing of the program knows of
it: the clock of the phases, which every phase passes through, is wrapped. A job that torchrun has restarted kills
nobody.
"""

import json
import os
import random
import signal
import threading
import time
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median

from tests.e2e.runner import Job, argv, metrics, succeed

VARIABLE = "SPMDRL_KILL"
PHASES = ("rollout", "push", "update", "checkpoint")
FLAGS = argv(
    "--rollout.engine hf --deterministic --rollout.prompts_per_step 4 --rollout.samples_per_prompt 4 --eval.every 5 "
    "--eval.prompts 8 --checkpoint.every 1 --checkpoint.keep 2 --tracking.trackers jsonl --run.timeout 30 "
    "--algo.updates_per_step 2 --algo.kl_coef 0.05 --algo.kl_target 0.1"
)
UNTIMED = ("time/", "memory/", "tokens/s")


def plant(kill: dict) -> None:
    """Wraps the clock of this process."""
    from spmdrl.tracking.metrics import Timer

    plain, times = Timer.__call__, 0

    def die(how: str) -> None:
        with open(kill["note"], "a") as file:
            file.write(json.dumps(kill | {"how": how}) + "\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def later() -> None:
        time.sleep(kill["seconds"])
        die("inside")

    @contextmanager
    def timed(self, name: str):
        nonlocal times
        times += name == kill["phase"]
        mine = name == kill["phase"] and times == kill["time"]
        if mine:
            threading.Thread(target=later, daemon=True).start()
        with plain(self, name):
            yield
            if mine:
                die("at its end")

    Timer.__call__ = timed


def main() -> None:
    """Runs a job with the kill of SPMDRL_KILL."""
    from spmdrl.session.launch import launch

    kill = json.loads(os.environ.get(VARIABLE, "null"))
    job = import_module((kill or {}).get("job", "spmdrl.train"))
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if kill and first and os.environ["RANK"] == str(kill["rank"]):
        plant(kill)
    launch(job.JOB)


# ── the story ────────────────────────────────────────────────────────────────


def untimed(folder: Path) -> list[dict]:
    """Lines of metrics.jsonl without the columns that depend on the clock."""
    return [{k: v for k, v in row.items() if not k.startswith(UNTIMED)} for row in metrics(folder)]


def learnt(folder: Path) -> dict[str, str]:
    """Hashes of all files of the last checkpoint: weights, moments, generators, counters."""
    manifest = json.loads((folder / "checkpoints" / "latest" / "MANIFEST.json").read_text())
    # These name the folder of the run, or hold an id made up when they were written.
    named = ("config.yaml", ".metadata")
    return {n: e["xxh3_128"] for n, e in manifest["files"].items() if n.rpartition("/")[2] not in named}


def differences(one: Path, other: Path) -> list[str]:
    """Differences between the ends of two runs, bit for bit; an empty list where there are none."""
    a, b = untimed(one), untimed(other)
    found = [f"{len(a)} and {len(b)} steps"] if len(a) != len(b) else []
    for x, y in zip(a, b, strict=False):
        found += [f"step {x['step']}: {k} {x.get(k)} {y.get(k)}" for k in x.keys() | y.keys() if x.get(k) != y.get(k)]
    a, b = learnt(one), learnt(other)
    return found + [f"{name}: not the same file" for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]


def kill_at(rng: random.Random, phase: str, longest: float, note: Path) -> dict:
    """A kill of a random rank at a random moment of a phase that takes `longest` seconds."""
    seconds = rng.uniform(0.0, longest)
    return {"rank": rng.randrange(2), "phase": phase, "time": rng.randint(1, 4), "seconds": seconds, "note": str(note)}


def story(root: Path, kills: int, steps: int, seed: int) -> dict:
    """Kills runs, starts each again by the same command, and compares it with one that was left alone.

    A run that comes to its end before all kills are dealt out gives way to another one in a folder of its own. Every
    other start writes its checkpoints beside training.

    Returns:
        `kills`: what was killed, when, and the step at which the next start went on; `runs`: for every run that ended,
        its differences from the whole one; `odd`: what jobs did that they should not.
    """
    rng = random.Random(seed)
    flags = [*FLAGS, "--run.steps", steps]
    succeed([*flags, "--run.dir", root / "whole"], 300, ranks=2, module="tests.e2e.kills")
    record = {"seed": seed, "steps": steps, "kills": [], "runs": [], "odd": []}
    rows = metrics(root / "whole")
    # A checkpoint's time stands in the line after it.
    took = {phase: median(row[f"time/{phase}"] for row in rows[1:]) for phase in PHASES}
    phases, folder, note = [], root / "run_1", root / "killed.jsonl"

    def ended_well() -> None:
        record["runs"].append(differences(root / "whole", folder))

    while len(record["kills"]) < kills:
        if not phases:
            phases = rng.sample(PHASES, len(PHASES))
        phase, before = phases.pop(), note.read_text() if note.exists() else ""
        kill = kill_at(rng, phase, took[phase], note)
        saved = folder / "checkpoints" / "latest"
        beside = ["--checkpoint.background"] if len(record["kills"]) % 2 else []
        job = Job(
            [*flags, *beside, "--run.dir", folder], ranks=2, module="tests.e2e.kills", env={VARIABLE: json.dumps(kill)}
        )
        try:
            ended = job.wait(120)
        finally:
            job.kill()
        told = (note.read_text() if note.exists() else "")[len(before) :].splitlines()
        died = json.loads(told[0]) if told else None
        if ended.left or ended.timed_out or (ended.rc == 0) == (died is not None):
            record["odd"].append(f"{kill}: {ended.show()}")
        if died is None:
            # The run came to its end first.
            phases.append(phase)
            ended_well()
            folder = root / f"run_{len(record['runs']) + 1}"
            continue
        at = saved.resolve().name if saved.exists() else "nothing"
        record["kills"].append({k: died[k] for k in ("rank", "phase", "time", "seconds", "how")} | {"saved": at})
    succeed([*flags, "--run.dir", folder], 300, ranks=2, module="tests.e2e.kills")
    ended_well()
    return record


if __name__ == "__main__":
    main()
