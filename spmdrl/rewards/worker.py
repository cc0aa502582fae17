"""One grading process: `python -m spmdrl.rewards.worker <parent pid>`, JSON lines in on stdin and out on stdout.

In:  {"function": f, "settings": {...}, "finite": b}
                                           first line: what to load (`builtin:math`, or `/path/file.py:name`), settings
                                           of a built-in reward or arguments of a user's, whether scores must be finite
     {"id": n, "item": [data_source, solution, ground_truth, extra, prompt, prefill]}
Out: {"note": text} and {"ready": true}, or {"failed": text}     after loading; the note is for the log
     {"loading": b}                        before and after a load of what a grading needs, which is not its time
     {"id": n, "start": t, "may_take": s}  before a grading; t is time.monotonic(), one clock for all processes; s is
                                           how long it may take where the reward has clocks of its own, else 0
     {"id": n, "seconds": s, "score": x, "parts": {...}, "applies": b}
     {"id": n, "seconds": s, "error": text, "trace": text}
     {"id": n, "seconds": s, "ungraded": text}     the response cannot be graded (UngradedError)

It imports nothing heavy of its own, so that a killed process is back at once.
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
    except BaseException as e:  # exit() in user code is an error of that code
        return _error(e)


def _error(e: BaseException) -> dict:
    trace = "".join(traceback.format_exception(e, limit=-4))
    return {"error": error_text(e), "trace": trace[-4000:]}


def main() -> None:
    """Serve until stdin ends."""
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
        sys.stdout.flush()  # prints of user code, in order with the rest of the log


if __name__ == "__main__":
    main()
