"""A process in an existing sandbox that becomes a program. `supervisor.py` starts one process for each program.

`python -m spmdrl_sandbox.inside.alone USER` reads the length of a task (8 bytes, little-endian) and the task (see
zygote.py) from stdin. It writes `STARTED` to stdout and becomes the program, which reads the remaining bytes as its
stdin. After an error it exits without writing `STARTED` and prints the reason to stderr. The module needs only the
standard library.
"""

import json
import os
import sys

from spmdrl_sandbox.inside import isolate, modules, processes, values  # noqa: F401

STARTED = b"+"


def read(count: int) -> bytes:
    """Read exactly `count` bytes of stdin, without buffering more.

    Raises:
        EOFError: stdin ended before `count` bytes.
    """
    data = b""
    while len(data) < count:
        more = os.read(0, count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def main() -> None:
    """Read a task from stdin and turn this process into its program."""
    isolate.become(int(sys.argv[1]))
    modules.like_site()
    while modules.load_one():
        pass
    # Set the parent-death signal again, because the kernel clears it when the user changes, as above.
    isolate.die_with_parent()
    try:
        task = json.loads(read(int.from_bytes(read(8), "little")))
    except EOFError:
        return
    processes.put_files(task, os.getcwd())
    os.closerange(3, 1024)
    isolate.limit(task["limits"], shared=True)
    isolate.drop_rights(shared=True)
    os.write(1, STARTED)
    processes.become(task)


if __name__ == "__main__":
    main()
