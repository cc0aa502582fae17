"""One rank down, all down, quickly and by name (law 6)."""

import errno
import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from spmdrl.config.dump import redact_text
from spmdrl.spmd import flight
from spmdrl.spmd.heartbeat import Heart
from spmdrl.spmd.here import here, place
from spmdrl.spmd.preempt import Request, listen, preemption
from spmdrl.spmd.storage import out_of_memory

log = logging.getLogger("spmdrl")
T = TypeVar("T")

USER_MISTAKES = (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors whose message says what to change; their traceback goes to the log file only."""
LONGEST = 1500
"""Letters of a cause in the last line."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


speaking = threading.Event()
"""This rank is ending."""
ending = threading.Lock()
"""One thread ends it."""
hearts: list[Heart] = []
"""The heartbeat of this process, once it runs."""


# ── what an error means ──────────────────────────────────────────────────────


def lost_peer(error: BaseException) -> bool:
    """A collective broke because another rank is gone, or the store with it."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Failed to recv")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def timed_out(error: BaseException) -> bool:
    """A collective waited for a rank longer than `--run.timeout`: gloo's words, NCCL's, the store's."""
    words = ("Timed out waiting", "Application timeout caused", "collective operation timeout", "wait timeout after")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def disk_full(error: BaseException) -> bool:
    """A write found no room; also where a library passes on only the words."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in DISK_FULL:
            return True
        if any(words in str(chain) for words in ("No space left on device", "Disk quota exceeded", "File too large")):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def advice(error: BaseException) -> str:
    """What to do about an error; empty where its own message says it, as those of this program do."""
    if timed_out(error):
        missing = hearts[0].missing() if hearts else ""
        record = f"`python -m spmdrl.flight {here.folder}` compares the last collectives of all ranks, "
        missing = missing or "another rank did not come, and it is not known where it is"
        return (
            f"{missing}; {record if here.folder else ''}"
            "--run.lockstep-debug names the line that differs, and a higher --run.timeout helps if one was slow only"
        )
    if lost_peer(error):
        said = (hearts[0].lost() or hearts[0].missing()) if hearts else ""
        return f"another rank ended{f': {said}' if said else ''}; its own log or torchrun says why. {_resume()}"
    if type(error).__module__.startswith("spmdrl") or _raised_by_us(error):
        return ""
    if disk_full(error):
        return (
            f"make room on the disk of {here.folder or 'the run folder'} (--checkpoint.keep keeps fewer), or choose "
            f"another --run.dir. {_resume()}"
        )
    if out_of_memory(error):
        return f"{_less_memory(here.name)}. {_resume()}"
    log_file = f"{here.folder}/logs/rank_{os.environ.get('RANK', '0')}.log" if here.folder else "the log"
    return f"its traceback stands in {log_file}. {_resume()}"


def _raised_by_us(error: BaseException) -> bool:
    """A mistake that this program found, and not a library or a user's function."""
    found = isinstance(error, USER_MISTAKES) and traceback.extract_tb(error.__traceback__)
    return bool(found) and str(Path(__file__).parents[1]) in found[-1].filename


def _less_memory(phase: str) -> str:
    if phase in ("rollout", "push", "wake", "eval"):
        return "lower --rollout.max-sequences or --rollout.kv-cache-gib, or set --policy.offload"
    if phase == "reward":
        return "lower --reward.workers, or what the reward function holds"
    if phase == "start":
        return "take more ranks (--parallel.dp-shard), or --model.dtype bfloat16"
    return "lower --policy.max-tokens-per-microbatch, or set --policy.activation-checkpointing"


def _resume() -> str:
    saved = 0
    with suppress(Exception):
        saved = here.saved()
    if saved:
        return f"The same command resumes from step {saved}"
    return "No checkpoint is there yet (--checkpoint.every)" if here.step else "Nothing was learnt yet"


def last_words(error: BaseException) -> str:
    """The one line that a failed job ends with."""
    text = str(error)
    if not type(error).__module__.startswith("spmdrl") and not isinstance(error, USER_MISTAKES):
        # C++ adds where in its sources it was, and frames.
        text = re.sub(r"^\[\S+:\d+\] ", "", text).partition("Exception raised from")[0]
    text = one_line(text)[:LONGEST]
    what = advice(error)
    return told(f"failed in phase {here.name}: {type(error).__name__}: {text}{f'; {what}' if what else ''}")


def told(what: str) -> str:
    """A last line of this rank."""
    return redact_text(f"spmdrl: rank {os.environ.get('RANK', '0')} on {socket.gethostname()} {what}")


def one_line(text: str) -> str:
    """Lines joined by a bar: what follows a line break would not be in the last line."""
    return " | ".join(line.strip() for line in text.splitlines() if line.strip())


# ── who speaks, and the end ──────────────────────────────────────────────────


def first_to_fail(what: str = "failed") -> bool:
    """True on the rank that asks first; the others stay silent. True as well when no store can be asked."""
    with suppress(Exception):
        if hearts:
            return hearts[0].plain.add(what, 1) == 1
        return dist.distributed_c10d._get_default_store().add(f"spmdrl/{what}", 1) == 1
    return True


def tell_torchrun(message: str) -> None:
    """Put the message into the banner that torchrun prints after ours, in torch.distributed.elastic's error file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(path, "w") as f:
            json.dump({"message": {"message": message, "extraInfo": extra}}, f)


def _briefly(work: Callable[[], T], otherwise: T, seconds: float = 2.0) -> T:
    """What `work` gives, or `otherwise` where it fails or takes longer: a rank that ends waits for nothing."""
    done: list[T] = []

    def run() -> None:
        with suppress(Exception):
            done.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return done[0] if done else otherwise


def _leave(
    message: str,
    code: int,
    before_exit: Callable[[], None],
    speak: str = "failed",
    error: BaseException | None = None,
) -> None:
    """Write the flight record, have one rank say why, end whoever would not hear of it, and this process."""
    speaking.set()
    if not ending.acquire(blocking=False):
        time.sleep(60)
    others = _briefly(hearts[0].beats, {}) if hearts else {}
    # At once without the lines, as those may take longer than there is.
    _briefly(lambda: flight.write(message, others, error, frames=False), None)
    _briefly(before_exit, None)
    first = _briefly(lambda: first_to_fail(speak), True)
    if first:
        if error is not None and not isinstance(error, USER_MISTAKES):
            print(redact_text("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        print(message, file=sys.stderr, flush=True)
        if code not in (0, 143):
            tell_torchrun(message)
    _briefly(lambda: flight.write(message, others, error), None, 2.5)
    if code == 1 and not first:
        # torchrun names the rank that leaves first as the root cause: let it be the one that failed first.
        time.sleep(1)
    if hearts and code:
        _briefly(hearts[0].end_stuck_siblings, None)
    sys.stdout.flush()
    os._exit(code)


# ── signals, and a rank that stands still ────────────────────────────────────


def _signalled(number: int, before_exit: Callable[[], None]) -> None:
    """A thread hears SIGTERM or SIGUSR1: the end at once where a rank was lost, else a request to leave.

    torchrun sends SIGTERM to all who are left when a rank is lost, and when it gets one itself.
    """
    if speaking.is_set():
        return
    name = signal.Signals(number).name
    heart = hearts[0] if hearts else None
    preemption.own += 1
    lost = _briefly(heart.lost, "") if heart and "TORCHELASTIC_RUN_ID" in os.environ else ""
    others_failed = bool(heart) and not lost and _briefly(lambda: heart.plain.add("failed", 0) > 0, True)
    if number == signal.SIGTERM and (lost or others_failed):
        why = "another rank is lost (torchrun names it below; a SIGKILL is often the system's, out of memory)"
        if lost == "torchrun is gone":
            why = "torchrun, which started it, is gone"
        message, code = told(f"was ended by {name} in phase {here.name}: {why}. {_resume()}"), 143
    elif preemption.own > 1:
        message = told(f"was ended by a second signal, {name}, in phase {here.name}. {_resume()}")
        code = 128 + number
    elif heart is None or not here.step:
        message = told(
            f"was ended by {name} in phase {here.name}: another rank is lost (torchrun names it below), or the job was "
            f"cancelled. {_resume()}"
        )
        code = 128 + number
    else:
        request = preemption.asked(number)
        heart.ask_all(request)
        preemption.heed(request)
        log.info("%s: this step is finished or abandoned within %.0f s, and saved", name, request.grace)
        return
    log.error(message.removeprefix("spmdrl: "), extra={"file_only": True})
    _leave(message, code, before_exit)


def _too_late(before_exit: Callable[[], None]) -> None:
    """The grace is over: leave without the step in course."""
    request = preemption.request
    if speaking.is_set() or request is None:
        return
    message = told(
        f"left in phase {here.name} of step {here.step}: not done {request.grace:.0f} s after {request} "
        f"(--run.grace), so this step is lost. {_resume()}"
    )
    log.warning(message.removeprefix("spmdrl: "), extra={"file_only": True})
    if os.environ.get("RANK", "0") == "0":
        with suppress(Exception):
            mark(request, here.saved())
    _leave(message, 0, before_exit, "late")


def request() -> str:
    """Who asked, once this rank has heard it, which may be a beat after it agreed to leave."""
    for _ in range(30):
        if preemption.wanted:
            break
        time.sleep(0.1)
    return str(preemption.request or "a signal at another rank")


def mark(request: Request | None, step: int) -> None:
    """RUN/PREEMPTED: that the run ended by request, and where it goes on. The next start removes it."""
    assert here.folder is not None
    request = request or Request("a signal", -1, time.time(), 0.0)
    path = here.folder / "PREEMPTED"
    what = {"step": step, "checkpoint": f"checkpoints/step_{step}" if step else "", "signal": request.signal}
    path.write_text(json.dumps(what | {"rank": request.rank, "time": request.at}) + "\n")


def _stands_still(idle: float, before_exit: Callable[[], None]) -> None:
    """A thread saw no progress of the main one for longer than `--run.timeout`."""
    if speaking.is_set():
        return
    waiting = _briefly(hearts[0].missing, "") if hearts and hearts[0].size > 1 else ""
    message = told(
        f"failed in phase {here.name}: TimeoutError: no progress for {idle:.0f} s at {place()}"
        f"{f' ({waiting})' if waiting else ''}; its stack stands in {here.folder}/flight; raise --run.timeout if that "
        f"takes so long. {_resume()}"
    )
    log.error(message.removeprefix("spmdrl: "), extra={"file_only": True})
    _leave(message, 1, before_exit)


def watch(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: float,
    grace: float,
    folder: Path,
    saved: Callable[[], int],
    before_exit: Callable[[], None] = lambda: None,
) -> Heart:
    """Start this rank's heartbeat. Before the first step it watches over nothing.

    Args:
        store: shared by all ranks.
        rank: this one.
        size: how many there are.
        timeout: `--run.timeout`.
        grace: `--run.grace`.
        folder: of the run.
        saved: the step of the newest checkpoint, 0 for none.
        before_exit: as in `named_exit`.
    """
    here.folder, here.saved, preemption.grace = folder, saved, grace
    preemption.late = lambda: _too_late(before_exit)
    here.job = store.compare_set("job", "", secrets.token_hex(8)).decode()
    heart = Heart(store, rank, size, timeout, lambda idle: _stands_still(idle, before_exit))
    hearts[:] = [heart]
    heart.start()
    return heart


@contextmanager
def named_exit(phase: Callable[[], str], before_exit: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn any exception into the end of the whole job, with rank, host, phase, cause and advice in one last line.

    The process leaves without cleaning up: destructors of a broken group may wait for ranks that are gone. torchrun
    then ends the other ranks. Exit code 1, 130 for Ctrl-C, 143 for SIGTERM because of a lost rank.
    """
    here.phase = phase
    in_main = threading.current_thread() is threading.main_thread()
    give_back = listen(lambda number: _signalled(number, before_exit)) if in_main else lambda: None
    try:
        yield
        give_back()
    except KeyboardInterrupt:
        before_exit()
        sys.stdout.flush()
        os._exit(130)
    except SystemExit:
        give_back()
        raise
    except BaseException as error:
        message = last_words(error)
        # Every rank keeps its own story; the console gets one.
        log.error("%s\n%s", message.removeprefix("spmdrl: "), traceback.format_exc(), extra={"file_only": True})
        if lost_peer(error) or speaking.is_set():
            # The cause stands elsewhere. Where torchrun saw it, SIGTERM is on its way, and that has the last word; a
            # rank that left before that would be named as the root cause.
            time.sleep(2)
        _leave(message, 1, before_exit, error=error)
