"""One rank down, all down, quickly and by name (law 6)."""

import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

log = logging.getLogger("spmdrl")

USER_MISTAKES = (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors whose message says what to change; their traceback goes to the log file only."""


def first_to_fail() -> bool:
    """True on the rank that fails first; the others stay silent. True as well when no store can be asked."""
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        return store.add("spmdrl/failed", 1) == 1
    return True


def tell_torchrun(message: str) -> None:
    """Put the message into the banner that torchrun prints after ours, in torch.distributed.elastic's error file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(path, "w") as f:
            json.dump({"message": {"message": message, "extraInfo": extra}}, f)


@contextmanager
def named_exit(phase: Callable[[], str], before_exit: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn any exception into the end of the whole job, with rank, host, phase and cause in one last line.

    The process leaves without cleaning up: destructors of a broken group may wait for ranks that are gone. torchrun
    then ends the other ranks. Exit code 1, 130 for Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        before_exit()
        sys.stdout.flush()
        os._exit(130)
    except SystemExit:
        raise
    except BaseException as error:
        # Every rank keeps its own story; the console gets one, below.
        log.error("failed in phase %s\n%s", phase(), traceback.format_exc(), extra={"file_only": True})
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
