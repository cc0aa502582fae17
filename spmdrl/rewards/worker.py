"""A process that grades responses: `python -m spmdrl.rewards.worker <parent pid>`, which reads and writes JSON lines.

It reads from stdin:
     {"function": f, "settings": {...}, "finite": b}
                                           first line: function to load (`builtin:math`, or `/path/file.py:name`),
                                           settings of a built-in reward or additional arguments for a user function,
                                           whether scores must be finite
     {"id": n, "item": [data_source, solution, ground_truth, extra, prompt, prefill]}     a request
It writes to stdout:
     {"note": text} and {"ready": true}, or {"failed": text}     after loading; the note is for the log
     {"loading": b}                        true before and false after loading a reward for a grading call; load
                                           time does not count as grading time
     {"id": n, "start": t, "may_take": s}  before a grading call; t is time.monotonic(), the same in all processes;
                                           s is the maximum seconds if the reward has time limits of its own,
                                           else 0
     {"id": n, "seconds": s, "score": x, "parts": {...}, "applies": b}     a result
     {"id": n, "seconds": s, "error": text, "trace": text}                 the function raised an exception
     {"id": n, "seconds": s, "ungraded": text}     the response cannot be graded (UngradedError)

It imports only lightweight modules, so that a killed process can be replaced quickly.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, cast

from spmdrl.config.user_code import error_text
from spmdrl.rewards.base import RewardInput, UngradedError, as_reward
from spmdrl.rewards.forms import load_function
from spmdrl.workers.in_child import die_with, take_pipes, write_all


def _grade(function: Callable[[RewardInput], object], item: list, finite: bool) -> dict:
    try:
        reward = as_reward(function(RewardInput(*item)), finite)
        return {"score": reward.score, "parts": reward.parts, "applies": reward.applies}
    except UngradedError as e:
        return {"ungraded": str(e)[:2000]}
    except BaseException as e:  # includes exit() in user code, which counts as an error
        return _error(e)


def _error(e: BaseException) -> dict:
    trace = "".join(traceback.format_exception(e, limit=-4))
    return {"error": error_text(e), "trace": trace[-4000:]}


def main() -> None:
    """Load the function, and grade the requests on stdin until stdin ends."""
    die_with(int(sys.argv[1]))
    request_pipe, answers = take_pipes()
    requests = os.fdopen(request_pipe, "r", encoding="utf-8")

    def send(message: dict) -> None:
        write_all(answers, (json.dumps(message) + "\n").encode())

    try:
        hello = json.loads(requests.readline())
        function, finite = load_function(hello["function"], hello["settings"]), hello["finite"]
    except Exception as e:
        send({"failed": str(e) if isinstance(e, ValueError) else error_text(e)})
        return
    route = cast(Any, function) if hasattr(function, "needs") else None
    may_take = getattr(function, "may_take", None)
    send({"note": getattr(function, "note", "")})
    send({"ready": True})
    for line in requests:
        message = json.loads(line)
        if route is not None and route.needs(item := RewardInput(*message["item"])):
            send({"loading": True})
            failed = {}
            try:
                route.load(item)
            except Exception as e:
                failed = _error(e)
            send({"loading": False})
            if failed:
                send({"id": message["id"], "start": time.monotonic(), "may_take": 0.0})
                send({"id": message["id"], "seconds": 0.0, **failed})
                continue
        start = time.monotonic()
        own = may_take(RewardInput(*message["item"])) if may_take else 0.0
        send({"id": message["id"], "start": start, "may_take": own})
        answer = _grade(function, message["item"], finite)
        send({"id": message["id"], "seconds": time.monotonic() - start, **answer})
        sys.stdout.flush()  # keeps output printed by user code in order with other log lines


if __name__ == "__main__":
    main()
