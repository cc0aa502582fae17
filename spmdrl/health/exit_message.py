"""The last line of a rank: its error, where it was, and what to do about it. Nothing here waits for long."""

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
from spmdrl.health.heartbeat import hearts
from spmdrl.health.status import rank_status

T = TypeVar("T")

USER_MISTAKES = (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors whose message says what to change; their traceback goes to the log file only."""
LONGEST = 1500
"""Letters of a cause in the last line."""


def briefly(work: Callable[[], T], otherwise: T, seconds: float = 2.0) -> T:
    """Returns the result of `work`, or `otherwise` if it fails or takes too long: a rank that ends waits for nothing.

    Everything that reads or writes a file is called this way, the log too: the main thread may hold the log's lock in
    a write to a file system that hangs.
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
    """Returns advice on an error; empty where its own message has it, as the messages of this program do."""
    if timed_out(error):
        missing = briefly(hearts[0].missing, "") if hearts else ""
        record = f"`python -m spmdrl.tools.flight {rank_status.folder}` compares the last collectives of all ranks, "
        missing = missing or "another rank did not come, and it is not known where it is"
        return (
            f"{missing}; {record if rank_status.folder else ''}"
            "--run.lockstep-debug names the line that differs, and a higher --run.timeout helps if one was slow only"
        )
    if lost_peer(error):
        said = briefly(lambda: hearts[0].lost() or hearts[0].missing(), "") if hearts else ""
        return f"another rank ended{f': {said}' if said else ''}; its own log or torchrun says why. {resume()}"
    if type(error).__module__.startswith("spmdrl") or _raised_by_us(error):
        return ""
    if disk_full(error):
        return (
            f"make room on the disk of {rank_status.folder or 'the run folder'} (--checkpoint.keep keeps fewer), or "
            f"choose another --run.dir. {resume()}"
        )
    if out_of_memory(error):
        return f"{_less_memory(rank_status.name)}. {resume()}"
    log_file = f"{rank_status.folder}/logs/rank_{os.environ.get('RANK', '0')}.log" if rank_status.folder else "the log"
    return f"its traceback stands in {log_file}. {resume()}"


def _raised_by_us(error: BaseException) -> bool:
    """True for a mistake that this program found, and not a library or a user's function."""
    found = isinstance(error, USER_MISTAKES) and traceback.extract_tb(error.__traceback__)
    return bool(found) and str(Path(__file__).parents[1]) in found[-1].filename


def _less_memory(phase: str) -> str:
    if phase in ("rollout", "push", "wake", "eval"):
        return "lower --rollout.max-sequences or --rollout.kv-cache-gib, or set --policy.offload"
    if phase == "reward":
        return "lower --reward.workers, or what the reward function holds"
    if phase == "start":
        return "take more ranks (--parallel.dp-shard), or --model.dtype bfloat16"
    return "lower --policy.max-tokens-per-microbatch, or set --policy.activation-checkpointing full"


def resume() -> str:
    """Words about the step from which the same command goes on."""
    saved = briefly(rank_status.saved, -1, 1.0)
    if saved > 0:
        return f"The same command resumes from step {saved}"
    if saved < 0:
        return "The same command resumes from the newest checkpoint"
    return "No checkpoint is there yet (--checkpoint.every)" if rank_status.step else "Nothing was learnt yet"


def lost_steps() -> str:
    """Words about the steps that are lost if a rank leaves at this moment: those since the newest checkpoint."""
    last = max(rank_status.step, rank_status.done)
    saved = briefly(rank_status.saved, -1, 1.0)
    if saved < 0:
        return "what no checkpoint has is lost"
    if last <= saved:
        return "no step is lost"
    return f"step {last} is lost" if last == saved + 1 else f"steps {saved + 1} to {last} are lost"


def last_words(error: BaseException) -> str:
    """Returns the one line that a failed job ends with."""
    text = str(error)
    if not type(error).__module__.startswith("spmdrl") and not isinstance(error, USER_MISTAKES):
        # C++ errors begin with their place in the sources and end with frames.
        text = re.sub(r"^\[\S+:\d+\] ", "", text).partition("Exception raised from")[0]
    text = one_line(text)[:LONGEST]
    what = advice(error)
    return last_line(f"failed in phase {rank_status.name}: {type(error).__name__}: {text}{f'; {what}' if what else ''}")


def last_line(what: str) -> str:
    """Returns the last line of this rank: its position, then the text."""
    return redact_text(f"spmdrl: rank {os.environ.get('RANK', '0')} on {socket.gethostname()} {what}")


def one_line(text: str) -> str:
    """Lines joined by a bar: text behind a line break would not be in the last line."""
    return " | ".join(line.strip() for line in text.splitlines() if line.strip())
