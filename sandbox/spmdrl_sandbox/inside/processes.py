"""Starts the processes of one program: the first process of its namespaces, and the program itself as its child.

The processes write reports to a pipe, as lines of JSON:
    {"group": pid}               id of the process group that the watcher may kill, sent if there are no namespaces
    {"proc": false}              the kernel refused to mount a /proc for the namespace
    {"code": n, "signal": n}     the program ended
    {"failure": text}            the sandbox failed
The module needs only the standard library, as it runs inside the sandbox.
"""

import atexit
import json
import os
import signal
import sys
import threading
import types

from spmdrl_sandbox.inside import isolate

_SHOW = sys.excepthook
"""The interpreter's function that prints tracebacks, saved here because a program may replace `sys.excepthook`."""
Pipes = tuple[int, int, int]
"""File descriptors of a program's standard input, output and error."""


def start(task: dict, apart: bool, proc: bool, tell: int, pipes: Pipes, others: tuple[int, ...]) -> int:
    """Start the processes of a program and return the id of the first one, which waits for the others.

    task: as in `zygote.py`. apart: True to create new namespaces. proc: the argument `allowed` of `own_proc`. tell:
    pipe for reports. pipes: the program's ends of its pipes. others: the caller's ends of all pipes, which are closed.
    """
    user, group = os.getuid(), os.getgid()
    child = isolate.fork_apart() if apart else os.fork()
    if child:
        return child
    try:
        isolate.die_with_parent()
        for end in others:
            os.close(end)
        if apart:
            isolate.own_places(task["limits"]["tmp_mib"] << 20, user, group)
            if not isolate.own_proc(proc):
                _say(tell, {"proc": False})
        _first(task, apart, tell, pipes)
    except BaseException:
        _failed(tell)
    os._exit(0)


def _first(task: dict, apart: bool, tell: int, pipes: Pipes) -> None:
    """Act as process 1 of the namespace: fork the program, wait for it and report its end.

    The kernel kills all other processes of the namespace when process 1 ends.
    """
    if apart:
        isolate.hide()
    # Programs can send process 1 only signals for which it has a handler, so remove Python's handler for SIGINT.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    program = os.fork()
    if program == 0:
        try:
            signal.signal(signal.SIGINT, interrupt)
            _prepare(task, apart, pipes)
        except BaseException:
            _failed(tell)
        os.closerange(3, 1024)
        try:
            become(task)
        finally:
            # Exit at once, so that exceptions of the program do not reach the callers of this function.
            os._exit(1)
    for end in pipes:
        os.close(end)
    if not apart:
        _say(tell, {"group": program})
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            _say(tell, {"code": max(code, 0), "signal": max(-code, 0)})
            return


def _prepare(task: dict, apart: bool, pipes: Pipes) -> None:
    os.setsid()
    folder = "/tmp" if apart else os.getcwd()
    os.chdir(folder)
    put_files(task, folder)
    for number, end in enumerate(pipes):
        os.dup2(end, number)
    isolate.limit(task["limits"])
    if apart:
        isolate.drop_rights()


def put_files(task: dict, folder: str) -> None:
    """Write the files of a task to a folder."""
    for name, text in task.get("files", {}).items():
        place = os.path.join(folder, name)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8") as file:
            file.write(text)


def become(task: dict) -> None:
    """Run a task's program in this process, and exit without returning."""
    if "argv" in task:
        try:
            os.execvp(task["argv"][0], task["argv"])
        except OSError as error:
            os.write(2, f"{task['argv'][0]}: {error}\n".encode())
            os._exit(127)
    code = 1
    sys.stdin, sys.stdout = os.fdopen(0, "r", errors="replace"), os.fdopen(1, "w", errors="replace")
    sys.stderr = os.fdopen(2, "w", errors="replace", buffering=1)
    sys.path[0] = os.getcwd()
    sys.argv = ["program.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(task["source"], "program.py", "exec"), module.__dict__)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        # Drop the first frame of the traceback, which belongs to this file.
        _SHOW(type(error), error.with_traceback(error.__traceback__ and error.__traceback__.tb_next), None)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        code = code or 120
    os._exit(code & 255)


def _failed(tell: int) -> None:
    """Report the current exception as a failure of the sandbox, and exit."""
    try:
        import traceback

        _say(tell, {"failure": traceback.format_exc()})
    finally:
        os._exit(1)


def _say(tell: int, message: dict) -> None:
    os.write(tell, (json.dumps(message) + "\n").encode())
