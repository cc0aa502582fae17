"""The child's side of child.py: a process serves its parent over stdin and stdout, and dies with it.

`python -IS in_child.py <parent pid> <command> ...` runs a command that dies with its parent.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """End this process when its parent ends for any reason. parent: process id of the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent had ended before the call above
        os._exit(0)


def take_pipes() -> tuple[int, int]:
    """Return the file descriptors of the pipes for requests and for answers, and hide both pipes from user code.

    User code gets an empty stdin, and its output goes to stderr. Signals that a cluster sends to all processes of a job
    are ignored, since the ranks handle them.
    """
    # The handlers are empty functions, because programs that user code starts would inherit SIG_IGN.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGUSR1, signal.SIGTERM)}
    # Children that user code forks get the old handlers back, so that these signals still end them.
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, old) for number, old in before.items()])
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return requests, answers


def write_all(answers: int, line: bytes) -> None:
    """Write a line to the parent; block while the pipe is full. If the parent has ended, end this process, too.

    answers: file descriptor of the pipe.
    """
    try:
        while line:
            line = line[os.write(answers, line) :]
    except BrokenPipeError:
        # The parent has ended, so there is nothing left to do.
        os._exit(0)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{error.strerror}: {sys.argv[2]}")
