"""Calls in processes of their own, each with a time limit: a package that hangs costs one name."""

import json
import os
import signal
from collections.abc import Callable, Iterable


def apart(call: Callable[[str], dict], names: Iterable[str], limit: int) -> dict[str, dict]:
    """Returns what `call(name)` gives for each name, JSON values; {"error": text} where it raises or takes too long.

    limit: seconds of the processor; of the clock it may be ten times as many, as other work may run beside it.
    """
    out = {}
    for name in names:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            signal.setitimer(signal.ITIMER_PROF, limit)
            signal.alarm(10 * limit)
            try:
                found = call(name)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            os.write(write, json.dumps(found).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as file:
            said = file.read()
        os.waitpid(child, 0)
        out[name] = json.loads(said) if said else {"error": f"no answer within {limit} s"}
    return out
