"""Runs hostile programs one after another, each in namespaces of its own: the first process of a sandbox.

`python -m spmdrl.sandbox.inside.zygote apart|plain USER` inside the sandbox reads one JSON object a line from stdin.
`plain` makes no namespaces and drops no rights: something else keeps the program in, or nothing does.

    {"source": text} or {"argv": [words]}    Python, run in a copy of this process, or another program; with "stdin",
                                             "files" {name: text}, "limits" (fields of `Limits`), and "session" {}

and answers with one on stdout:

    {"code": n, "signal": n, "seconds": s, "stdout": base64, "stderr": base64, "why": word, "detail": text}

`why` is "" for a program that ended by itself, else the limit that ended it (`timeout`, `memory`, `output`), `closed`,
or `failure` where the sandbox itself could not run it. While a session runs, lines {"input": base64} go to the
program's stdin, {"close": true} ends it, and its output comes at once as {"output": base64}. Standard library only.
"""

# What short programs import, so that a copy of this process has it already.
import bisect  # noqa: F401
import collections  # noqa: F401
import copy  # noqa: F401
import datetime  # noqa: F401
import decimal  # noqa: F401
import fractions  # noqa: F401
import functools  # noqa: F401
import heapq  # noqa: F401
import itertools  # noqa: F401
import math  # noqa: F401
import os
import random  # noqa: F401
import re  # noqa: F401
import statistics  # noqa: F401
import string  # noqa: F401
import sys
import time
import traceback
import typing  # noqa: F401

from spmdrl.sandbox.inside import isolate, processes, values  # noqa: F401
from spmdrl.sandbox.inside.talk import Talk
from spmdrl.sandbox.inside.watch import Watch


def run(task: dict, apart: bool, talk: Talk) -> dict:
    """Run one program and return how it ended."""
    begin = time.monotonic()
    told, tell = os.pipe()
    inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
    others = told, inputs[1], outputs[0], errors[0]
    child = processes.start(task, apart, tell, (inputs[0], outputs[1], errors[1]), others)
    for end in (tell, inputs[0], outputs[1], errors[1]):
        os.close(end)
    out = Watch(child, told, inputs[1], outputs[0], errors[0], task, apart, talk).to_the_end()
    out["seconds"] = time.monotonic() - begin
    return out


def main() -> None:
    """Serve until stdin ends."""
    apart = sys.argv[1] == "apart"
    isolate.become(int(sys.argv[2]))
    talk = Talk()
    talk.say({"ready": True})
    while (task := talk.hear()) is not None:
        if "limits" not in task:
            # Words to a session that has just ended.
            continue
        try:
            answer = run(task, apart, talk)
        except Exception:
            answer = {"why": "failure", "detail": traceback.format_exc()}
        talk.say(answer)


if __name__ == "__main__":
    main()
