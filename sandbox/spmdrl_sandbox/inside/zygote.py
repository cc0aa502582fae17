"""The first process of a sandbox, which runs untrusted programs one after another.

`python -m spmdrl_sandbox.inside.zygote apart|plain USER` runs inside the sandbox and reads tasks from stdin, one JSON
object per line. With `apart`, each program runs in separate namespaces. `plain` does not create namespaces or drop
privileges; it is for container engines and for running without a sandbox. Under `plain`, each program has a separate
folder below the current one. A task is

    {"source": text} or {"argv": [words]}    Python, run in a fork of this process, or a command; with "stdin",
                                             "files" {name: text}, "limits" (fields of `Limits`), and "session" {}

The answer on stdout is

    {"code": n, "signal": n, "seconds": s, "stdout": base64, "stderr": base64, "why": word, "detail": text}

`why` is "" for a program that ended by itself. Otherwise it is the limit that ended the program (`timeout`, `memory`,
`output`), `closed`, or `failure` if the sandbox could not run the program. While a session runs, lines
{"input": base64} are forwarded to the program's stdin, {"close": true} ends the program, and its output is sent
immediately as {"output": base64}. The module needs only the standard library.
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
"""Exit code of a watcher process that finds stdin closed, after which the zygote ends too."""
NO_PROC = 4
"""Exit code of a watcher process if the kernel refused to mount a /proc for its program."""


def run(task: dict, apart: bool, proc: bool, talk: Talk) -> tuple[dict, bool]:
    """Run one program; return the message with its outcome, and whether the kernel permits a separate /proc."""
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
    """Run the next program and send its outcome, unless stdin has ended. Return the exit code of this process."""
    while (task := talk.receive()) is not None:
        if "limits" not in task:
            # Ignore messages to a session that has just ended.
            continue
        try:
            answer, proc = run(task, apart, proc, talk)
        except Exception:
            answer = failed()
        talk.send(answer)
        return 0 if proc else NO_PROC
    return END


def made_in(home: str) -> str:
    """Create a folder for a program and return its path."""
    folder = os.path.join(home, f"program-{os.urandom(8).hex()}")
    os.mkdir(folder, 0o700)
    return folder


def failed() -> dict:
    """Return the answer for the current exception, a failure of the sandbox itself."""
    import traceback

    return {"why": "failure", "detail": traceback.format_exc()}


def main() -> None:
    """Run the programs of the tasks on stdin until it ends."""
    apart, home, proc = sys.argv[1] == "apart", os.getcwd(), True
    isolate.become(int(sys.argv[2]))
    talk = Talk()
    modules.like_site()
    talk.send({"ready": True})
    # Import modules only until the first task arrives, so that the task does not have to wait.
    while not select.select([talk.stdin], [], [], 0)[0] and modules.load_one():
        pass
    while True:
        select.select([talk.stdin], [], [])
        # Fork a watcher process for each program, so that a program's memory has no data of earlier programs.
        gc.freeze()
        folder = home if apart else made_in(home)
        watcher = os.fork()
        if watcher == 0:
            isolate.die_with_parent()
            os.chdir(folder)
            os._exit(serve(apart, proc, talk))
        code = os.waitstatus_to_exitcode(os.waitpid(watcher, 0)[1])
        if not apart:
            # Without a process namespace, a remaining process of the program may still write to the folder.
            with contextlib.suppress(OSError):
                leftovers.remove(folder)
        if code == END:
            return
        proc = proc and code != NO_PROC
        if code not in (0, NO_PROC):
            # Without a process namespace, the program may have killed its watcher.
            why = "failure" if apart else ""
            talk.send({"code": 1, "why": why, "detail": f"the watcher of a program ended with {code}"})
        while modules.load_one():
            pass


if __name__ == "__main__":
    main()
