"""Runs `spmdrl.train` and makes one thing go wrong on one rank in one phase: `python -m tests.e2e.faults`.

SPMDRL_FAULT holds {"fault", "phase", "rank", "step", "stamp"}; the moment of the fault goes into the file `stamp`.
Nothing of the program knows of it: the clock of the phases, which every phase passes through, is wrapped. Also how a
job with a fault is run and judged.
"""

import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tests.e2e.runner import GONE_WITHIN, Ended, Job, argv

TIMEOUT = 8
"""--run.timeout of the jobs here."""
GRADING = 4
"""--reward.timeout of the jobs here, below TIMEOUT: a rank that waits for the other one's samples ends the job then."""
FLAGS = argv(
    "--rollout.engine hf --run.steps 3 --rollout.prompts_per_step 4 --rollout.samples_per_prompt 4 --eval.every 0 "
    # A fast rank would take all prompts, and the engine of the other would do nothing.
    "--rollout.assignment static "
    "--tracking.trackers jsonl --checkpoint.every 1 --checkpoint.background false --optimizer.bad-steps 0 "
    f"--run.timeout {TIMEOUT}"
)
PHASES = ("start", "push", "rollout", "reward", "exchange", "logp", "advantage", "update", "log", "checkpoint")
VARIABLE = "SPMDRL_FAULT"


def raise_error() -> None:
    """Raises an error that nobody foresaw."""
    raise RuntimeError("the planted error")


def fill_disk() -> None:
    """Raises the system's refusal of a write."""
    with open("/dev/full", "w") as full:
        full.write("x" * 10000)
        full.flush()


def take_memory() -> None:
    """Takes more memory than any machine has."""
    import torch

    torch.empty(1 << 58, dtype=torch.uint8)


def hang() -> None:
    """Makes a call that never returns."""
    time.sleep(3600)


def write_hangs() -> None:
    """Holds the log's lock for ever, as a write to a file system that hangs does."""
    for handler in logging.getLogger("spmdrl").handlers:
        handler.acquire()
    time.sleep(3600)


def busy() -> None:
    """Makes a call that never returns and holds Python's lock: no thread of this process runs."""
    import ctypes

    ctypes.PyDLL(None).sleep(3600)


groups: list = []
"""A group of all ranks that nobody else uses, made while the run is built."""


def stay_away() -> None:
    """Has this rank wait in a collective of another group than the other ranks do."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(3), group=groups[0])


def mismatch() -> None:
    """Has this rank alone run one more collective, of another size than the next: gloo ends a process by SIGABRT."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(3))


def kill() -> None:
    """Kills this process, as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stops this process with all its threads."""
    os.kill(os.getpid(), signal.SIGSTOP)


def poison() -> None:
    """Makes every gradient norm nan from this call on."""
    from spmdrl.policy.learner import Learner

    gradient = Learner.gradient_norm
    for kind in {*Learner.__subclasses__(), Learner}:
        kind.gradient_norm = lambda self, gradient=gradient: float("nan")  # type: ignore[method-assign]


REWARD = """
import pathlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    while pathlib.Path(__file__).with_name("stamp").exists():
        pass
    return float(len(solution_str) % 3)
"""
"""A user's reward that does not end once the fault's moment has come."""


def reward_hangs() -> None:
    """Does nothing: the stamp of the fault is enough for the reward file to hang."""


def engine_dies() -> None:
    """Makes the engine fail at its next step."""
    from spmdrl.engines.hf.engine import HFEngine

    def poll(self):
        raise RuntimeError("the engine's memory is gone")

    HFEngine.poll = poll  # type: ignore[method-assign]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    do: Callable[[], None]
    words: tuple[str, ...]
    """Words that the last line must hold, beside rank, host and phase; ` or ` separates two of which one is enough."""
    waits: float = 0.0
    """Seconds after which the fault is noticed, where it is only noticed when time is up."""
    rank: str = "1"
    """Rank that writes the last line, as a regular expression: the victim is rank 1."""
    everywhere: bool = False
    """True if the fault is planted on every rank."""
    phases: tuple[str, ...] = PHASES
    silent: bool = False
    """True if the victim leaves no flight record."""
    reward: str = ""
    """Reward file of the job."""


OTHER = "0"
FAULTS = {
    "exception": Fault(raise_error, ("RuntimeError: the planted error", "its traceback is in")),
    "SIGKILL": Fault(kill, ("another rank is lost", "SIGTERM"), rank=OTHER, silent=True),
    "SIGSTOP": Fault(stop, ("rank 1 has sent no heartbeat", "its process is stopped"), TIMEOUT, OTHER, silent=True),
    "hang": Fault(hang, ("faults.py",), TIMEOUT, "[01]"),
    "write that hangs": Fault(write_hangs, ("faults.py",), TIMEOUT, "[01]"),
    "hang without threads": Fault(busy, ("rank 1 has sent no heartbeat",), TIMEOUT, OTHER, silent=True),
    "hang in a collective": Fault(
        # Whoever's time is up first names where the other one is.
        stay_away,
        ("spmdrl.tools.flight", "faults.py or rank 0 has been in phase"),
        TIMEOUT,
        "[01]",
    ),
    "mismatched collective": Fault(
        mismatch, ("another rank is lost or another rank ended",), rank="[01]", phases=("update",), silent=True
    ),
    "hang in a reward": Fault(
        reward_hangs, ("RewardError", "--reward.timeout"), GRADING, "[01]", phases=("rollout",), reward=REWARD
    ),
    "engine death": Fault(engine_dies, ("RuntimeError: the engine's memory is gone",), phases=("rollout",)),
    "disk full": Fault(fill_disk, ("OSError: [Errno 28]", "make room on the disk")),
    "out of memory": Fault(
        take_memory,
        (
            "can't allocate memory or no room for training or no room for sampling",
            "--policy. or --model.dtype",
            "The same command resumes or There is no checkpoint or No step has begun",
        ),
    ),
    "NaN gradient": Fault(
        poison, ("NonFiniteError", "--optimizer.lr"), rank="[01]", everywhere=True, phases=("update",)
    ),
}


@dataclass
class Outcome:
    """End of a job with a fault."""

    fault: str
    phase: str
    seconds: float
    """Seconds from the fault to the end of the job."""
    ended: Ended
    folder: Path

    def problems(self) -> list[str]:
        """Differences from law 6; empty where there are none."""
        fault, ended, wrong = FAULTS[self.fault], self.ended, []
        limit = GONE_WITHIN + fault.waits
        if ended.timed_out or self.seconds > limit:
            wrong.append(f"took {self.seconds:.1f} s, {limit:.0f} are allowed")
        if ended.rc == 0:
            wrong.append("ended with exit code 0")
        if ended.left:
            wrong.append(f"left {ended.left}")
        lines = [line for line in ended.ours.splitlines() if line.strip()]
        if len(ended.messages) != 1 or (lines and lines[-1] != ended.messages[0]):
            wrong.append(f"{len(ended.messages)} last lines, or one that is not the last")
            return wrong
        message = ended.messages[0]
        if not re.match(rf"spmdrl: rank {fault.rank} on \S+ (failed|was ended by SIGTERM) in phase \w+: ", message):
            wrong.append("the last line does not name rank, host and phase")
        if fault.rank == "1" and f"in phase {self.phase}:" not in message:
            wrong.append(f"the last line does not name phase {self.phase}")
        missing = [word for word in fault.words if not any(one in message for one in word.split(" or "))]
        wrong += [f"{word!r} is not in the last line" for word in missing]
        # A rank that had not come to the end of its start may have no folder for it yet.
        records = {path.name for path in (self.folder / "flight").glob("*.json")}
        wanted = {"rank_00000.json"} if fault.silent else {"rank_00000.json", "rank_00001.json"}
        if records != wanted and not (fault.silent and len(records) == 1):
            wrong.append(f"flight records {sorted(records)}, not {sorted(wanted)}")
        return wrong


def run_fault(fault: str, phase: str, folder: Path, flags: list | None = None, step: int = 2) -> Outcome:
    """Runs a job of two ranks in which `fault` happens to rank 1 in `phase` of a step; returns its end."""
    folder.mkdir(parents=True)
    stamp = folder / "stamp"
    step = 0 if phase == "start" else step
    flags = [*FLAGS, *(flags or []), "--run.dir", folder / "run"]
    if text := FAULTS[fault].reward:
        (folder / "reward.py").write_text(text)
        flags += ["--reward.function", folder / "reward.py", "--reward.timeout", GRADING]
    plan = {"fault": fault, "phase": phase, "rank": 1, "step": step, "stamp": str(stamp)}
    job = Job(
        flags,
        ranks=2,
        module="tests.e2e.faults",
        env={VARIABLE: json.dumps(plan)},
    )
    try:
        job.wait_for(stamp.exists, 120, f"{fault} in {phase}")
        ended = job.wait(60)
    finally:
        job.kill()
    return Outcome(fault, phase, ended.ended - float(stamp.read_text() or "nan"), ended, folder / "run")


def plant(plan: dict) -> None:
    """Wraps the clock that every phase passes through."""
    import torch.distributed as dist

    from spmdrl.health.status import rank_status
    from spmdrl.session.session import Session
    from spmdrl.tracking.metrics import Timer

    fault = FAULTS[plan["fault"]]
    here_too = fault.everywhere or int(os.environ["RANK"]) == plan["rank"]
    done = []

    def happen(phase: str, step: int) -> None:
        if here_too and phase == plan["phase"] and step == plan["step"] and not done:
            done.append(True)
            if int(os.environ["RANK"]) == plan["rank"]:
                part = Path(plan["stamp"] + ".part")
                part.write_text(repr(time.time()))
                os.replace(part, plan["stamp"])
            fault.do()

    enter, note = Timer._enter, Session.note

    def entered(self, name: str) -> None:
        enter(self, name)
        happen(name, rank_status.step)

    def noted(self, text: str) -> None:
        note(self, text)
        if not groups:
            groups.append(dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT)))
        happen("start", 0)

    Timer._enter, Session.note = entered, noted  # type: ignore[method-assign]


def main() -> None:
    """Trains with the fault of the environment."""
    from spmdrl import train
    from spmdrl.session.environ import prepare
    from spmdrl.session.launch import launch

    prepare()
    plant(json.loads(os.environ[VARIABLE]))
    launch(train.JOB)


if __name__ == "__main__":
    main()
