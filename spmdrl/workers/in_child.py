"""The child's side of child.py: a process that serves its parent over stdin and stdout, and dies with it.

`python -IS in_child.py <parent pid> <command> ...` runs a command that dies with its parent.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Kill this process when its parent exits for any reason. parent: the parent's pid."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent exited before the call above
        os._exit(0)


def take_pipes() -> tuple[int, int]:
    """Return the file descriptors of the request and response pipes, and hide both pipes from user code.

    User code gets an empty stdin, and its output goes to stderr. Signals that a cluster manager sends to all processes
    of a job are ignored, since the ranks handle them.
    """
    # The handlers are no-op functions, because programs that user code starts would inherit SIG_IGN.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGUSR1, signal.SIGTERM)}
    # Children forked by user code get the old handlers back, so that these signals still terminate them.
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, old) for number, old in before.items()])
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return requests, answers


def write_all(answers: int, line: bytes) -> None:
    """Write a line to the parent, and block while the pipe is full. If the parent has exited, exit as well.

    answers: file descriptor of the pipe.
    """
    try:
        while line:
            line = line[os.write(answers, line) :]
    except BrokenPipeError:
        # The parent has exited, so there is nothing left to do.
        os._exit(0)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{error.strerror}: {sys.argv[2]}")
