"""Ends the whole job quickly when one rank fails, and names that rank (law 6)."""

import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from spmdrl.config.dump import redact_text
from spmdrl.health import flight_record
from spmdrl.health.causes import lost_peer
from spmdrl.health.exit_message import USER_MISTAKES, briefly, last_line, last_words, lost_steps, resume
from spmdrl.health.heartbeat import Heart, hearts
from spmdrl.health.preempt import Request, listen, preemption
from spmdrl.health.status import place, rank_status

log = logging.getLogger("spmdrl")
speaking = threading.Event()
"""Set once this rank is ending."""
ending = threading.Lock()
"""Held by the one thread that ends this rank."""


# ── who speaks, and the end ──────────────────────────────────────────────────


def first_to_fail(what: str = "failed") -> bool:
    """True on the rank that asks first; the others stay silent. True as well when no store can be asked."""
    with suppress(Exception):
        if hearts:
            return hearts[0].plain.add(what, 1) == 1
        return dist.distributed_c10d._get_default_store().add(f"spmdrl/{what}", 1) == 1
    return True


def tell_torchrun(message: str) -> None:
    """Puts the message into the banner that torchrun prints after ours, in torch.distributed.elastic's error file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(path, "w") as f:
            json.dump({"message": {"message": message, "extraInfo": extra}}, f)


def _note(level: int, message: str) -> None:
    """Writes the last words into this rank's log file."""
    briefly(lambda: log.log(level, message.removeprefix("spmdrl: "), extra={"file_only": True}), None, 1.0)


def _speak(message: str, error: BaseException | None) -> None:
    """Prints the last line where people look, in a shorter form if the full one cannot be made."""

    def say() -> bool:
        if error is not None and not isinstance(error, USER_MISTAKES):
            print(redact_text("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        # In one piece with its line end: under torchrun stderr has no buffer, and the agent writes at the same time.
        print(f"{message}\n", end="", file=sys.stderr, flush=True)
        return True

    if not briefly(say, False):
        briefly(lambda: os.write(2, f"{message}\n".encode()), 0, 1.0)


def _leave(
    message: str,
    code: int,
    before_exit: Callable[[], None],
    speak: str = "failed",
    error: BaseException | None = None,
) -> None:
    """Writes the flight record, has one rank print the cause, ends ranks that do not react, then this process."""
    speaking.set()
    if not ending.acquire(blocking=False):
        time.sleep(60)
    others = briefly(hearts[0].overview.beats, {}) if hearts else {}
    # The first record has no lines: finding those may take longer than this process has left.
    written = briefly(lambda: flight_record.write(message, others, error, frames=False) or True, False)
    briefly(before_exit, None)
    first = briefly(lambda: first_to_fail(speak), True)
    if first:
        _speak(message, error)
        if code not in (0, 143):
            briefly(lambda: tell_torchrun(message), None)
    if written:
        briefly(lambda: flight_record.write(message, others, error), None, 2.5)
    if code == 1 and not first:
        # torchrun names the rank that leaves first as the root cause: let it be the one that failed first.
        time.sleep(1)
    if hearts and code:
        briefly(hearts[0].end_stuck_siblings, None)
    briefly(sys.stdout.flush, None, 1.0)
    os._exit(code)


# ── signals, and a rank that stands still ────────────────────────────────────


def _signalled(number: int, before_exit: Callable[[], None]) -> None:
    """Handles a signal in a thread: ends at once if a rank was lost, else takes it as a request to leave.

    torchrun sends SIGTERM to all who are left when a rank is lost, and when it gets one itself.
    """
    if speaking.is_set():
        return
    name = signal.Signals(number).name
    heart = hearts[0] if hearts else None
    again = preemption.again(number)
    lost = briefly(heart.lost, "") if heart and "TORCHELASTIC_RUN_ID" in os.environ else ""
    others_failed = bool(heart) and not lost and briefly(lambda: heart.plain.add("failed", 0) > 0, True)
    if number == signal.SIGTERM and (lost or others_failed):
        why = "another rank is lost (torchrun names it below; a SIGKILL is often the system's, out of memory)"
        if lost == "torchrun is gone":
            why = "torchrun, which started it, is gone"
        message, code = last_line(f"was ended by {name} in phase {rank_status.name}: {why}. {resume()}"), 143
    elif again:
        message = last_line(f"was ended by a second signal, {name}, in phase {rank_status.name}. {resume()}")
        code = 128 + number
    elif heart is None or not (rank_status.step or rank_status.keeps):
        why = "another rank is lost (torchrun names it below), or the job was cancelled"
        if number == signal.SIGINT:
            why = "Ctrl-C before the first step, when there is nothing to save"
        message = last_line(f"was ended by {name} in phase {rank_status.name}: {why}. {resume()}")
        code = 128 + number
    else:
        request = preemption.asked(number)
        heart.ask_all(request)
        preemption.heed(request)
        does = "what is measured so far is reported" if rank_status.keeps else "this step is finished or abandoned"
        what = f"{name}: {does} within {request.grace:.0f} s{'' if rank_status.keeps else ', and saved'}"
        briefly(lambda: log.info(what), None, 1.0)
        if number == signal.SIGINT and not again and briefly(lambda: first_to_fail("interrupted"), True):
            # Whoever pressed Ctrl-C waits for an answer.
            briefly(lambda: print(f"{what}; Ctrl-C again ends the job at once", file=sys.stderr, flush=True), None)
        return
    _note(logging.ERROR, message)
    _leave(message, code, before_exit)


def _too_late(before_exit: Callable[[], None]) -> None:
    """Leaves without the step in progress, because the grace is over."""
    request = preemption.request
    if speaking.is_set() or request is None:
        return
    message = last_line(
        f"left in phase {rank_status.name} of step {rank_status.step}: not done {request.grace:.0f} s after {request} "
        f"(--run.grace), so {lost_steps()}. {resume()}"
    )
    _note(logging.WARNING, message)
    if os.environ.get("RANK", "0") == "0" and not rank_status.keeps:
        briefly(lambda: mark(request, rank_status.saved()), None)
    _leave(message, 0, before_exit, "late")


def request() -> str:
    """Returns the request, once this rank has heard of it, which may be a beat after it agreed to leave."""
    for _ in range(30):
        if preemption.wanted:
            break
        time.sleep(0.1)
    return str(preemption.request or "a signal at another rank")


def mark(request: Request | None, step: int) -> None:
    """Writes RUN/PREEMPTED: the run ended by request, and goes on from this step. The next start removes it."""
    assert rank_status.folder is not None
    request = request or Request("a signal", -1, time.time(), 0.0)
    path = rank_status.folder / "PREEMPTED"
    what = {"step": step, "checkpoint": f"checkpoints/step_{step}" if step else "", "signal": request.signal}
    path.write_text(json.dumps(what | {"rank": request.rank, "time": request.at}) + "\n")


def _stands_still(idle: float, before_exit: Callable[[], None]) -> None:
    """Ends this rank, from a thread that saw no progress of the main one for longer than `--run.timeout`."""
    if speaking.is_set():
        return
    waiting = briefly(hearts[0].missing, "") if hearts and hearts[0].size > 1 else ""
    message = last_line(
        f"failed in phase {rank_status.name}: TimeoutError: no progress for {idle:.0f} s at {place()}"
        f"{f' ({waiting})' if waiting else ''}; its stack stands in {rank_status.folder}/flight; raise --run.timeout "
        f"if that takes so long. {resume()}"
    )
    _note(logging.ERROR, message)
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
    """Starts this rank's heartbeat. Before the first step it does not look for ranks that stand still.

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
    rank_status.folder, rank_status.saved, preemption.grace = folder, saved, grace
    preemption.late = lambda: _too_late(before_exit)
    rank_status.job = store.compare_set("job", "", secrets.token_hex(8)).decode()
    heart = Heart(store, rank, size, timeout, lambda idle: _stands_still(idle, before_exit))
    hearts[:] = [heart]
    heart.start()
    return heart


@contextmanager
def named_exit(phase: Callable[[], str], before_exit: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turns any exception into the end of the whole job, with rank, host, phase, cause and advice in one last line.

    The process leaves without cleaning up: destructors of a broken group may wait for ranks that are gone. torchrun
    then ends the other ranks. Exit code 1, 130 where Ctrl-C ended it, 143 for SIGTERM because of a lost rank.
    """
    rank_status.phase = phase
    in_main = threading.current_thread() is threading.main_thread()
    give_back = listen(lambda number: _signalled(number, before_exit)) if in_main else lambda: None
    try:
        yield
        give_back()
    except KeyboardInterrupt:
        briefly(before_exit, None)
        briefly(sys.stdout.flush, None)
        os._exit(130)
    except SystemExit:
        give_back()
        raise
    except BaseException as error:
        message = last_words(error)
        # Every rank logs its own error; the console gets one.
        _note(logging.ERROR, f"{message}\n{traceback.format_exc()}")
        if lost_peer(error) or speaking.is_set():
            # The cause is on another rank. Where torchrun saw it, SIGTERM is on its way, and its handler ends this one;
            # a rank that left before that would be named as the root cause.
            time.sleep(2)
        _leave(message, 1, before_exit, error=error)
