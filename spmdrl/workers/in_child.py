"""The child's side of child.py: a process that serves its parent over its first two pipes, and dies with it.

`python -IS in_child.py <parent pid> <command> ...` runs any command so that it dies with its parent.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """End this process when its parent ends, however that happens. parent: its id."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(0)


def take_pipes() -> tuple[int, int]:
    """Return descriptors of the requests and the answers, and hide both from the user's code.

    User code reads an empty stdin, and its output goes to stderr. Signals that a cluster sends to all processes of a
    job do nothing, since the ranks handle them.
    """
    # A handler is set, because children of user code would inherit an ignored signal.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGUSR1, signal.SIGTERM)}
    # A child that user code forks ends by these signals.
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, old) for number, old in before.items()])
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return requests, answers


def write_all(answers: int, line: bytes) -> None:
    """Write to the parent, waiting as long as the pipe is full. Where the parent has ended, this process ends too."""
    try:
        while line:
            line = line[os.write(answers, line) :]
    except BrokenPipeError:
        # The rank has ended, and nobody waits for this answer.
        os._exit(0)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{error.strerror}: {sys.argv[2]}")
