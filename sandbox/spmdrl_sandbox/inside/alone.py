"""Becomes one program, below a sandbox that something else holds: `supervisor.py` starts one of these for each.

`python -m spmdrl_sandbox.inside.alone USER` reads the length of a task (8 bytes, little-endian) and the task (see
zygote.py) from stdin, says `STARTED` on stdout, and becomes the program, whose stdin is what follows. If it cannot, it
ends without that word and says why on stderr. Standard library only.
"""

import json
import os
import sys

from spmdrl_sandbox.inside import isolate, modules, processes, values  # noqa: F401

STARTED = b"+"


def read(count: int) -> bytes:
    """Read bytes of stdin, and none beyond them.

    Raises:
        EOFError: it ends before.
    """
    data = b""
    while len(data) < count:
        more = os.read(0, count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def main() -> None:
    """Wait for a task and become it."""
    isolate.become(int(sys.argv[1]))
    modules.like_site()
    while modules.load_one():
        pass
    # A change of user has undone the sandbox's request to the kernel.
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
