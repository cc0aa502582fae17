"""One rank down, all down, quickly and by name (law 6)."""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

log = logging.getLogger("spmdrl")

USER_MISTAKES = (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors whose message says what to change; their traceback goes to the log file only."""


speaking = threading.Event()
"""This rank has an error of its own to tell."""


def first_to_fail() -> bool:
    """True on the rank that fails first; the others stay silent. True as well when no store can be asked."""
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        return store.add("spmdrl/failed", 1) == 1
    return True


def lost_peer(error: BaseException) -> bool:
    """A collective broke because another rank is gone, or the store with it."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Failed to recv")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def tell_torchrun(message: str) -> None:
    """Put the message into the banner that torchrun prints after ours, in torch.distributed.elastic's error file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(path, "w") as f:
            json.dump({"message": {"message": message, "extraInfo": extra}}, f)


def leave_when_told(phase: Callable[[], str], before_exit: Callable[[], None]) -> Callable[[], None]:
    """From here on SIGTERM ends this process at once, with exit code 143, and one rank says in which phase that was.

    torchrun sends it to all who are left when a rank was killed. A thread waits for it: the rank may sit in a
    collective, where Python runs no handler. Main thread only; forked processes have what was there before. Returns
    what ends it.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    before: list[tuple] = [(handler, signal.set_wakeup_fd(write, warn_on_full_buffer=False))]

    def give_back() -> None:
        if before:
            handler, fd = before.pop()
            signal.signal(signal.SIGTERM, handler)
            signal.set_wakeup_fd(fd)
            os.close(write)

    os.register_at_fork(after_in_child=give_back)
    threading.Thread(target=_leave, args=(read, phase, before_exit), daemon=True, name="SIGTERM").start()
    return give_back


def _leave(read: int, phase: Callable[[], str], before_exit: Callable[[], None]) -> None:
    told = b"-"
    while told and signal.SIGTERM not in told:
        told = os.read(read, 64)
    if not told or speaking.is_set():
        return
    message = (
        f"spmdrl: rank {os.environ.get('RANK', '0')} on {socket.gethostname()} was ended by SIGTERM in phase "
        f"{phase() or 'start'}: another rank is lost (torchrun names it below), or the job was cancelled"
    )
    log.error(message.removeprefix("spmdrl: "), extra={"file_only": True})
    with suppress(Exception):
        before_exit()
    # The store answers nobody while this rank itself waits for something in it.
    first: list[bool] = []
    asking = threading.Thread(target=lambda: first.append(first_to_fail()), daemon=True)
    asking.start()
    asking.join(1.0)
    if first != [False]:
        print(message, file=sys.stderr, flush=True)
    os._exit(143)


@contextmanager
def named_exit(phase: Callable[[], str], before_exit: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn any exception into the end of the whole job, with rank, host, phase and cause in one last line.

    The process leaves without cleaning up: destructors of a broken group may wait for ranks that are gone. torchrun
    then ends the other ranks. Exit code 1, 130 for Ctrl-C, 143 for SIGTERM.
    """
    in_main = threading.current_thread() is threading.main_thread()
    give_back = leave_when_told(phase, before_exit) if in_main else lambda: None
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
        # Every rank keeps its own story; the console gets one, below.
        log.error("failed in phase %s\n%s", phase(), traceback.format_exc(), extra={"file_only": True})
        if lost_peer(error):
            # The cause stands elsewhere. Where torchrun saw it, SIGTERM is on its way, and `_leave` has the last word;
            # a rank that left before that would be named as the root cause.
            time.sleep(2)
        speaking.set()
        with suppress(Exception):
            before_exit()
        if first_to_fail():
            if not isinstance(error, USER_MISTAKES):
                traceback.print_exc()
            rank = os.environ.get("RANK", "0")
            message = (
                f"spmdrl: rank {rank} on {socket.gethostname()} failed in phase {phase() or 'start'}: "
                f"{type(error).__name__}: {error}"
            )
            print(message, file=sys.stderr, flush=True)
            tell_torchrun(message)
        else:
            # torchrun names the rank that leaves first as the root cause: let it be the one that failed first.
            time.sleep(2)
        sys.stdout.flush()
        os._exit(1)
