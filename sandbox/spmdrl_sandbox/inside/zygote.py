"""Runs hostile programs one after another, each in namespaces of its own: the first process of a sandbox.

`python -m spmdrl_sandbox.inside.zygote apart|plain USER` inside the sandbox reads one JSON object a line from stdin.
`plain` makes no namespaces and drops no rights: another sandbox keeps the program in, or none. Each program
then gets a folder of its own in the one where this process runs.

    {"source": text} or {"argv": [words]}    Python, run in a copy of this process, or another program; with "stdin",
                                             "files" {name: text}, "limits" (fields of `Limits`), and "session" {}

and answers with one on stdout:

    {"code": n, "signal": n, "seconds": s, "stdout": base64, "stderr": base64, "why": word, "detail": text}

`why` is "" for a program that ended by itself, else the limit that ended it (`timeout`, `memory`, `output`), `closed`,
or `failure` where the sandbox itself could not run it. While a session runs, lines {"input": base64} go to the
program's stdin, {"close": true} ends it, and its output comes at once as {"output": base64}. Standard library only.
"""

import contextlib
import gc
import os
import select
import sys
import time

from spmdrl_sandbox.inside import isolate, leftovers, modules, processes, values  # noqa: F401
from spmdrl_sandbox.inside.talk import Talk
from spmdrl_sandbox.inside.watch import Watch

END = 3
"""Exit code of a copy of this process that finds the end of stdin."""
NO_PROC = 4
"""Exit code of one whose program could not have a /proc of its own."""


def run(task: dict, apart: bool, proc: bool, talk: Talk) -> tuple[dict, bool]:
    """Run one program; returns how it ended, and whether it could have a /proc of its own."""
    begin = time.monotonic()
    reports, report = os.pipe()
    inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
    others = reports, inputs[1], outputs[0], errors[0]
    child = processes.start(task, apart, proc, report, (inputs[0], outputs[1], errors[1]), others)
    for end in (report, inputs[0], outputs[1], errors[1]):
        os.close(end)
    watch = Watch(child, reports, inputs[1], outputs[0], errors[0], task, apart, talk)
    out = watch.to_the_end() | {"seconds": time.monotonic() - begin}
    return out, watch.result.get("proc", proc)


def serve(apart: bool, proc: bool, talk: Talk) -> int:
    """Run the next program and send its outcome, unless stdin has ended. Return an exit code."""
    while (task := talk.receive()) is not None:
        if "limits" not in task:
            # A message to a session that has just ended.
            continue
        try:
            answer, proc = run(task, apart, proc, talk)
        except Exception:
            answer = failed()
        talk.send(answer)
        return 0 if proc else NO_PROC
    return END


def made_in(home: str) -> str:
    """Make a folder for a program."""
    folder = os.path.join(home, f"program-{os.urandom(8).hex()}")
    os.mkdir(folder, 0o700)
    return folder


def failed() -> dict:
    """Return the answer where the sandbox itself has failed."""
    import traceback

    return {"why": "failure", "detail": traceback.format_exc()}


def main() -> None:
    """Serve until stdin ends."""
    apart, home, proc = sys.argv[1] == "apart", os.getcwd(), True
    isolate.become(int(sys.argv[2]))
    talk = Talk()
    modules.like_site()
    talk.send({"ready": True})
    # The first program may be the only one, so it is not kept waiting.
    while not select.select([talk.stdin], [], [], 0)[0] and modules.load_one():
        pass
    while True:
        select.select([talk.stdin], [], [])
        # One copy of this process serves each program, which is a copy of the copy: so it finds nothing of earlier
        # programs in its memory.
        gc.freeze()
        folder = home if apart else made_in(home)
        watcher = os.fork()
        if watcher == 0:
            isolate.die_with_parent()
            os.chdir(folder)
            os._exit(serve(apart, proc, talk))
        code = os.waitstatus_to_exitcode(os.waitpid(watcher, 0)[1])
        if not apart:
            # Without a process namespace a process of the program may still write there.
            with contextlib.suppress(OSError):
                leftovers.remove(folder)
        if code == END:
            return
        proc = proc and code != NO_PROC
        if code not in (0, NO_PROC):
            # Without a process namespace the program may have ended its watcher.
            why = "failure" if apart else ""
            talk.send({"code": 1, "why": why, "detail": f"the watcher of a program ended with {code}"})
        while modules.load_one():
            pass


if __name__ == "__main__":
    main()
