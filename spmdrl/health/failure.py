"""Ends the whole job quickly when one rank fails, and names that rank (law 6 in CONTRIBUTING.md)."""

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
from spmdrl.health.exit_message import USER_MISTAKES, briefly, failure_line, last_line, lost_steps, resume
from spmdrl.health.heartbeat import Heartbeat, heartbeats
from spmdrl.health.preempt import Request, on_signals, preemption
from spmdrl.health.status import place, rank_status

log = logging.getLogger("spmdrl")
exiting = threading.Event()
"""Set once this rank is exiting."""
exit_lock = threading.Lock()
"""Lock held by the thread that terminates this rank."""


# ── the last line, and the exit ──────────────────────────────────────────────


def is_first_to(what: str = "failed") -> bool:
    """Return True on the first rank to call this function with `what`, so that only one rank prints. If the store
    fails, return True on every rank.
    """
    with suppress(Exception):
        if heartbeats:
            return heartbeats[0].plain.add(what, 1) == 1
        return dist.distributed_c10d._get_default_store().add(f"spmdrl/{what}", 1) == 1
    return True


def write_torchrun_error(message: str) -> None:
    """Write the message to torch.distributed.elastic's error file, which torchrun prints when it exits."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(path, "w") as f:
            json.dump({"message": {"message": message, "extraInfo": extra}}, f)


def _log_to_file(level: int, message: str) -> None:
    """Write the last line into this rank's log file."""
    briefly(lambda: log.log(level, message.removeprefix("spmdrl: "), extra={"file_only": True}), None, 1.0)


def _print_last_line(message: str, error: BaseException | None) -> None:
    """Print the traceback and the last line on stderr, or only the last line if printing both fails."""

    def show() -> bool:
        if error is not None and not isinstance(error, USER_MISTAKES):
            print(redact_text("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        # Text and newline are written together, because torchrun's agent may write to the same stderr in between.
        print(f"{message}\n", end="", file=sys.stderr, flush=True)
        return True

    if not briefly(show, False):
        briefly(lambda: os.write(2, f"{message}\n".encode()), 0, 1.0)


def _exit_job(
    message: str,
    code: int,
    before_exit: Callable[[], None],
    outcome: str = "failed",
    error: BaseException | None = None,
) -> None:
    """Write this rank's last collectives, print the cause on one rank, and end this process.

    Unless the exit code is 0, ranks on this machine that are stopped or silent are killed first.
    """
    exiting.set()
    if not exit_lock.acquire(blocking=False):
        time.sleep(60)
    others = briefly(heartbeats[0].overview.beats, {}) if heartbeats else {}
    # The first record has no source lines, because finding them may take longer than this process has left.
    written = briefly(lambda: flight_record.write(message, others, error, frames=False) or True, False)
    briefly(before_exit, None)
    first = briefly(lambda: is_first_to(outcome), True)
    if first:
        _print_last_line(message, error)
        if code not in (0, 143):
            briefly(lambda: write_torchrun_error(message), None)
    if written:
        briefly(lambda: flight_record.write(message, others, error), None, 2.5)
    if code == 1 and not first:
        # torchrun names the rank that exits first as the root cause, so the rank that failed first must exit first.
        time.sleep(1)
    if heartbeats and code:
        briefly(heartbeats[0].end_stuck_siblings, None)
    briefly(sys.stdout.flush, None, 1.0)
    os._exit(code)


# ── signals, and a rank without progress ─────────────────────────────────────


def _signalled(number: int, before_exit: Callable[[], None]) -> None:
    """Handle a signal by asking all ranks to leave, or by ending the job. Called in a separate thread.

    The job ends on a SIGTERM after a rank or torchrun was lost, on a second signal, or on a signal before the first
    step (unless `rank_status.keeps_partial`). torchrun sends SIGTERM to the remaining ranks when a rank is lost, and
    when it receives SIGTERM itself.
    """
    if exiting.is_set():
        return
    name = signal.Signals(number).name
    heartbeat = heartbeats[0] if heartbeats else None
    again = preemption.is_repeat(number)
    lost = briefly(heartbeat.lost, "") if heartbeat and "TORCHELASTIC_RUN_ID" in os.environ else ""
    others_failed = bool(heartbeat) and not lost and briefly(lambda: heartbeat.plain.add("failed", 0) > 0, True)
    what = f"{name} in phase {rank_status.name}: "
    if number == signal.SIGTERM and lost == "torchrun is gone":
        what += "torchrun, which started it, is gone"
    elif number == signal.SIGTERM and (lost or others_failed):
        what += "another rank is lost (torchrun names it below; SIGKILL often means that the system ran out of memory)"
    elif again:
        what = f"a second signal, {name}, in phase {rank_status.name}"
    elif heartbeat is not None and (rank_status.step or rank_status.keeps_partial):
        return _request_to_leave(number, heartbeat)
    elif number == signal.SIGINT:
        what += "Ctrl-C before the first step, when there is nothing to save"
    else:
        what += "another rank is lost (torchrun names it below), or the job was cancelled"
    message = last_line(f"was ended by {what}. {resume()}")
    _log_to_file(logging.ERROR, message)
    _exit_job(message, 128 + number, before_exit)


def _request_to_leave(number: int, heartbeat: Heartbeat) -> None:
    """Request that all ranks finish or abandon this step, save and exit."""
    request, partial = preemption.request_for(number), rank_status.keeps_partial
    heartbeat.publish_request(request)
    preemption.accept(request)
    does = "the measurements so far are reported" if partial else "this step is finished or abandoned"
    what = f"{signal.Signals(number).name}: {does} within {request.grace:.0f} s{'' if partial else ', and saved'}"
    briefly(lambda: log.info(what), None, 1.0)
    if number == signal.SIGINT and briefly(lambda: is_first_to("interrupted"), True):
        # Whoever pressed Ctrl-C expects a response on the console.
        briefly(lambda: print(f"{what}; Ctrl-C again ends the job at once", file=sys.stderr, flush=True), None)


def _grace_over(before_exit: Callable[[], None]) -> None:
    """Terminate this rank in the middle of a step once the grace period is over."""
    request = preemption.request
    if exiting.is_set() or request is None:
        return
    message = last_line(
        f"left in phase {rank_status.name} of step {rank_status.step}: not finished {request.grace:.0f} s after "
        f"{request} (--run.grace), so {lost_steps()}. {resume()}"
    )
    _log_to_file(logging.WARNING, message)
    if os.environ.get("RANK", "0") == "0" and not rank_status.keeps_partial:
        briefly(lambda: write_preempted(request, rank_status.saved()), None)
    _exit_job(message, 0, before_exit, "late")


def exit_reason() -> str:
    """Return the request to leave as text.

    If no request has reached this rank, wait up to 3 s, because a request may arrive one heartbeat after the ranks
    agreed to leave.
    """
    for _ in range(30):
        if preemption.requested:
            break
        time.sleep(0.1)
    return str(preemption.request or "a signal at another rank")


def write_preempted(request: Request | None, step: int) -> None:
    """Write RUN/PREEMPTED: the run ended on request after `step`. The next launch removes the file."""
    assert rank_status.folder is not None
    request = request or Request("a signal", -1, time.time(), 0.0)
    path = rank_status.folder / "PREEMPTED"
    what = {"step": step, "checkpoint": f"checkpoints/step_{step}" if step else "", "signal": request.signal}
    path.write_text(json.dumps(what | {"rank": request.rank, "time": request.at}) + "\n")


def _stuck(idle: float, before_exit: Callable[[], None]) -> None:
    """Terminate this rank from a thread, because the main thread made no progress for longer than `--run.timeout`."""
    if exiting.is_set():
        return
    waiting = briefly(heartbeats[0].missing, "") if heartbeats and heartbeats[0].size > 1 else ""
    message = last_line(
        f"failed in phase {rank_status.name}: TimeoutError: no progress for {idle:.0f} s at {place()}"
        f"{f' ({waiting})' if waiting else ''}; its stack is in {rank_status.folder}/flight; raise --run.timeout if "
        f"this work takes so long. {resume()}"
    )
    _log_to_file(logging.ERROR, message)
    _exit_job(message, 1, before_exit)


def watch(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: float,
    grace: float,
    folder: Path,
    saved: Callable[[], int],
    before_exit: Callable[[], None] = lambda: None,
) -> Heartbeat:
    """Start this rank's heartbeat, which also terminates the rank if its main thread makes no progress during a step.

    store: shared by all ranks. timeout, grace: the `--run` settings, in seconds. folder: the run folder. saved: returns
    the step of the newest checkpoint, or 0 if there is none. before_exit: as in `named_exit`.
    """
    rank_status.folder, rank_status.saved, preemption.grace = folder, saved, grace
    preemption.on_grace_over = lambda: _grace_over(before_exit)
    rank_status.job = store.compare_set("job", "", secrets.token_hex(8)).decode()
    heartbeat = Heartbeat(store, rank, size, timeout, lambda idle: _stuck(idle, before_exit))
    heartbeats[:] = [heartbeat]
    heartbeat.start()
    return heartbeat


@contextmanager
def named_exit(phase: Callable[[], str], before_exit: Callable[[], None] = lambda: None) -> Iterator[None]:
    """End the whole job on an exception in this context, with one last line: rank, host, phase, cause and advice.

    The process exits without cleaning up, because destructors of a broken process group may wait for lost ranks. After
    this exit, torchrun ends the other ranks. Exit codes: 1 after an error, 0 if the grace period of a request to leave
    is over, and 128 + n if signal n ended the rank, such as 130 (Ctrl-C) and 143 (SIGTERM, because a rank is lost).

    phase: returns the phase in progress. before_exit: called before the process exits.
    """
    rank_status.phase = phase
    in_main = threading.current_thread() is threading.main_thread()
    give_back = on_signals(lambda number: _signalled(number, before_exit)) if in_main else lambda: None
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
        message = failure_line(error)
        # Every rank logs its own error, but only one rank prints on the console.
        _log_to_file(logging.ERROR, f"{message}\n{traceback.format_exc()}")
        if lost_peer(error) or exiting.is_set():
            # The cause is on another rank. Once torchrun notices that rank's exit, torchrun's SIGTERM ends this rank
            # through the handler. If this rank exited before that signal, torchrun would name it as the root cause.
            time.sleep(2)
        _exit_job(message, 1, before_exit, error=error)
