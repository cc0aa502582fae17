"""One grading process: `python -m spmdrl.rewards.worker <parent pid>`, JSON lines in on stdin and out on stdout.

In:  {"function": f, "settings": {...}, "finite": b}
                                           first line: what to load (`builtin:math`, or `/path/file.py:name`), settings
                                           of a built-in reward or arguments of a user's, whether scores must be finite
     {"id": n, "item": [data_source, solution, ground_truth, extra, prompt]}
Out: {"ready": true, "note": text} or {"failed": text}     after loading; the note is for the log
     {"id": n, "load": t}                  before what this grading needs is loaded, which is not the grading's time
     {"id": n, "start": t, "may_take": s}  before a grading; t is time.monotonic(), one clock for all processes; s is
                                           how long it may take where the reward has clocks of its own, else 0
     {"id": n, "seconds": s, "score": x, "parts": {...}, "applies": b}
     {"id": n, "seconds": s, "error": text, "trace": text}
     {"id": n, "seconds": s, "ungraded": text}     the response cannot be graded, which is not its fault

It imports nothing heavy of its own, so that a killed process is back at once.
"""

import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from spmdrl.rewards.base import RewardInput, UngradedError, as_reward, printable
from spmdrl.rewards.forms import adapted

POOLED = {
    "auto": "spmdrl.rewards.route",
    "code": "spmdrl.rewards.code",
    "code_partial": "spmdrl.rewards.code",
    "math": "spmdrl.rewards.math",
    "reasoning_gym": "spmdrl.rewards.reasoning",
}
"""Built-in rewards that run in the pool: name -> module, whose `load(name, settings)` gives the function."""
_PR_SET_PDEATHSIG = 1


def load_function(spec: str, settings: dict[str, Any]) -> Callable[[RewardInput], object]:
    """The function that `{"function": spec}` names. Raises ValueError in words for the user of `--reward.function`."""
    if spec.startswith("builtin:"):
        name = spec.removeprefix("builtin:")
        return importlib.import_module(POOLED[name]).load(name, settings)
    path_text, _, name = spec.rpartition(":")
    path = Path(path_text)
    sys.path.insert(0, str(path.parent))  # the file may import its neighbours
    module_spec = importlib.util.spec_from_file_location(f"spmdrl_user_reward_{path.stem}", path)
    assert module_spec and module_spec.loader, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses in it look themselves up there
    try:
        module_spec.loader.exec_module(module)
    except SyntaxError as e:
        raise ValueError(f"{e.filename or path}:{e.lineno}: {e.msg}") from e
    except BaseException as e:  # SystemExit too
        raise ValueError(f"importing {path} raised {_said(e)} ({_place(e)})") from e
    function = getattr(module, name, None)
    if not callable(function):
        own = [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise ValueError(
            f"{path} has no function {name!r} (it has: {', '.join(own) or 'none'}); name one as file.py:name"
        )
    return adapted(function, f"{name} in {path}", settings)


def _said(e: BaseException) -> str:
    """Return type and text of an error on one line; the text of a user's own may itself raise one."""
    try:
        return printable(f"{type(e).__name__}: {e}")[:2000]
    except BaseException as inner:
        return f"{type(e).__name__}, whose text could not be made ({type(inner).__name__})"


def _place(e: BaseException) -> str:
    """File and line of the innermost frame of an error."""
    frames = traceback.extract_tb(e.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no line known"


def _grade(function: Callable[[RewardInput], object], item: list, finite: bool) -> dict:
    try:
        reward = as_reward(function(RewardInput(*item)), finite)
        return {"score": reward.score, "parts": reward.parts, "applies": reward.applies}
    except UngradedError as e:
        return {"ungraded": str(e)[:2000]}
    except BaseException as e:  # exit() in user code is an error of that code
        trace = "".join(traceback.format_exception(e, limit=-4))
        return {"error": _said(e), "trace": trace[-4000:]}


def _loaded(route: Any, item: RewardInput) -> dict:
    """Load what a row needs; returns the answer to it if that fails, else nothing."""
    try:
        route.load(item)
    except Exception as e:
        trace = "".join(traceback.format_exception(e, limit=-4))
        return {"error": _said(e), "trace": trace[-4000:]}
    return {}


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(0)


def main() -> None:
    """Serve until stdin ends."""
    _die_with(int(sys.argv[1]))
    # A cluster's notice to all processes of a job is for the ranks to follow. A handler is set, because children of
    # user code would inherit an ignored signal.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGUSR1, signal.SIGTERM)}
    # A child that user code forks ends when it is told to.
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, old) for number, old in before.items()])
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # user code that reads stdin must not eat requests
    os.dup2(2, 1)  # all that user code prints, at any level, goes to stderr

    def send(message: dict) -> None:
        line = (json.dumps(message) + "\n").encode()
        try:
            while line:
                line = line[os.write(answers, line) :]
        except BrokenPipeError:
            # The rank has ended and said why; nobody waits for this answer.
            os._exit(0)

    try:
        hello = json.loads(requests.readline())
        function, finite = load_function(hello["function"], hello["settings"]), hello["finite"]
    except Exception as e:
        send({"failed": str(e) if isinstance(e, ValueError) else _said(e)})
        return
    route = cast(Any, function) if hasattr(function, "needs") else None
    may_take = getattr(function, "may_take", None)
    send({"ready": True, "note": getattr(function, "note", "")})
    for line in requests:
        message = json.loads(line)
        if route is not None and route.needs(item := RewardInput(*message["item"])):
            send({"id": message["id"], "load": time.monotonic()})
            if failed := _loaded(route, item):
                send({"id": message["id"], "start": time.monotonic(), "may_take": 0.0})
                send({"id": message["id"], "seconds": 0.0, **failed})
                continue
        start = time.monotonic()
        own = may_take(RewardInput(*message["item"])) if may_take else 0.0
        send({"id": message["id"], "start": start, "may_take": own})
        answer = _grade(function, message["item"], finite)
        send({"id": message["id"], "seconds": time.monotonic() - start, **answer})
        sys.stdout.flush()  # prints of user code, in order with the rest of the log


if __name__ == "__main__":
    main()
