"""Builds the last line that a rank prints: error, location and advice. No function in this module blocks for long."""

import os
import re
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from spmdrl.config.dump import redact_text
from spmdrl.health.causes import disk_full, lost_peer, out_of_memory, timed_out
from spmdrl.health.heartbeat import heartbeats
from spmdrl.health.status import rank_status

T = TypeVar("T")

USER_MISTAKES = (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors whose message tells the user what to change, so their traceback goes only to the log file."""
LONGEST = 1500
"""Maximum number of characters of an error message in the last line."""


def briefly(work: Callable[[], T], otherwise: T, seconds: float = 2.0) -> T:
    """Return the result of `work`, or `otherwise` if it fails or takes longer than `seconds`.

    An exiting rank accesses files, including the log, only through this function, because the main thread may hold the
    log's lock while its write to a file system hangs.
    """
    done: list[T] = []

    def run() -> None:
        with suppress(Exception):
            done.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return done[0] if done else otherwise


def advice(error: BaseException) -> str:
    """Return advice for an error. For mistakes that spmdrl reports, return "", because their messages already contain
    advice.
    """
    if timed_out(error):
        missing = briefly(heartbeats[0].missing, "") if heartbeats else ""
        record = f"`python -m spmdrl.tools.flight {rank_status.folder}` compares the last collectives of all ranks, "
        missing = missing or "another rank did not take part, and its position is unknown"
        return (
            f"{missing}; {record if rank_status.folder else ''}"
            "--run.lockstep-debug names the line that differs, and a higher --run.timeout helps if a rank was only slow"
        )
    if lost_peer(error):
        lost = briefly(lambda: heartbeats[0].lost() or heartbeats[0].missing(), "") if heartbeats else ""
        return f"another rank ended{f': {lost}' if lost else ''}; see its log, or torchrun's output. {resume()}"
    # Reading the frames opens source files, so it is done only for these types.
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, USER_MISTAKES) else []
    # A library or a user's function may raise the same types, with a message that does not advise the user.
    reported = frames and str(Path(__file__).parents[1]) in frames[-1].filename
    if type(error).__module__.startswith("spmdrl") or reported:
        # The device table's error for a failed allocation names the flags to change, but not where the run resumes.
        return resume() if out_of_memory(error) else ""
    if disk_full(error):
        return (
            f"make room on the disk of {rank_status.folder or 'the run folder'} (--checkpoint.keep keeps fewer), or "
            f"choose another --run.dir. {resume()}"
        )
    if out_of_memory(error):
        return f"{_less_memory(rank_status.name)}. {resume()}"
    log_file = f"{rank_status.folder}/logs/rank_{os.environ.get('RANK', '0')}.log" if rank_status.folder else "the log"
    return f"its traceback is in {log_file}. {resume()}"


def _less_memory(phase: str) -> str:
    if phase == "reward":
        return "lower --reward.workers, or use less memory in the reward function"
    if phase == "start":
        return "use more ranks (--parallel.dp-shard), or --model.dtype bfloat16"
    return "lower --policy.max-tokens-per-microbatch, or set --policy.activation-checkpointing full"


def resume() -> str:
    """Return a sentence that names the step where the same command resumes, or says that no checkpoint exists."""
    saved = briefly(rank_status.saved, -1, 1.0)
    if saved > 0:
        return f"The same command resumes from step {saved}"
    if saved < 0:
        return "The same command resumes from the newest checkpoint"
    return "There is no checkpoint yet (--checkpoint.every)" if rank_status.step else "No step has begun yet"


def lost_steps() -> str:
    """Return text that names the steps lost if the job ends now: all steps since the newest checkpoint."""
    last = max(rank_status.step, rank_status.done)
    saved = briefly(rank_status.saved, -1, 1.0)
    if saved < 0:
        return "steps after the newest checkpoint are lost"
    if last <= saved:
        return "no step is lost"
    return f"step {last} is lost" if last == saved + 1 else f"steps {saved + 1} to {last} are lost"


def failure_line(error: BaseException) -> str:
    """Return the last line of a rank that failed: the rank and its host, the phase, the error and advice."""
    text = str(error)
    if not type(error).__module__.startswith("spmdrl") and not isinstance(error, USER_MISTAKES):
        # C++ errors start with a source location and end with stack frames, which are removed here.
        text = re.sub(r"^\[\S+:\d+\] ", "", text).partition("Exception raised from")[0]
    # The message may have several lines, which are joined with bars into a single line.
    text = " | ".join(line.strip() for line in text.splitlines() if line.strip())[:LONGEST]
    what = advice(error)
    return last_line(f"failed in phase {rank_status.name}: {type(error).__name__}: {text}{f'; {what}' if what else ''}")


def last_line(what: str) -> str:
    """Return this rank's last line: its number and host, followed by `what`."""
    return redact_text(f"spmdrl: rank {os.environ.get('RANK', '0')} on {socket.gethostname()} {what}")
