"""A process that runs environments: `python -m spmdrl.env.worker <parent pid>`. The process and its parent exchange
JSON lines.

Lines on stdin:
     {settings}                           the first line: fields of PoolSettings
     {"id": n, "do": d, "env": k, "open": {...}?, "turn": {...}?}
                                          a request. d: `open`, `say`, `score`, or `close`, which is not answered. If
                                          `say` or `score` has the key `open`, the environment is reopened first
     {"id": n, "do": "check", "open": {"name": f, "settings": {...}}}      make this environment once, as a check
Lines on stdout:
     {"ready": true}                      the process has started
     {"id": n, "begins": what, "end": t, "call": i, "alone": b}
                                          a function call for this request begins. t: its deadline (time.monotonic(),
                                          which is the same for all processes). i: index of the tool call in the turn,
                                          -1 for other functions. b: true if all earlier calls of the request have ended
     {"id": n, "anew": [i, ...]}          the calls with these indices in the turn timed out, and some still run; the
                                          environment is dropped, and the parent must send the turn again with `open`
     {"alive": true}                      sent regularly during requests, to show that the event loop is not blocked
     {"loading": b}                       sent before and after the import of a file, which blocks the process
     {"id": n, "reply": {...}} or {"id": n, "failure": text}      the answer to a request
     {"hangs": text}                      a call is still running after its time limit. Since it cannot be stopped, the
                                          process takes no new requests and exits after its current ones

The module imports no heavy packages, so that a killed process is replaced quickly.
"""

import asyncio
import atexit
import json
import os
import queue
import resource
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from spmdrl.config.user_code import error_text, place
from spmdrl.env import limits
from spmdrl.env.base import EPISODE, PoolSettings
from spmdrl.env.env_instance import AnewError, EnvInstance
from spmdrl.env.forms import Form, SettingsError, load
from spmdrl.env.limits import LateError, Limits, RaisedError
from spmdrl.env.messages import FailedError
from spmdrl.workers.in_child import die_with, take_pipes, write_all

ALIVE_EVERY = 0.4
"""Seconds between two `alive` messages."""
CLOSES_WITHIN = 1.5
"""Time limit in seconds for open environments to clean up when the process exits."""
EXITS_WITHIN = 0.3
"""Time limit in seconds for the `atexit` functions of sandboxes, MCP connections and user code."""
STACK_MB = 8
"""MiB added to the memory limit for each thread, because the limit also counts thread stacks."""


class Worker:
    """Runs requests of different environments in parallel, and requests of the same environment one after another."""

    def __init__(self, settings: PoolSettings, answers: int):
        """Start a thread that writes to the parent. answers: file descriptor of the pipe to the parent."""
        self.settings = settings
        self.limits = Limits(self._on_hang)
        self._instances: dict[int, EnvInstance] = {}
        self._tasks: dict[int, asyncio.Task] = {}
        self._forms: dict[str, Form] = {}
        self._hung = False
        self._answers = answers
        # The pipe may stay full while the parent is busy. A thread writes to it, so that time limits keep working.
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._room = select.poll()
        self._room.register(answers, select.POLLOUT)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def send(self, message: dict[str, Any]) -> None:
        """Send a line to the parent without blocking."""
        line = (json.dumps(message) + "\n").encode()
        # A short line is written immediately, since a writable pipe takes at least PIPE_BUF bytes. The call that the
        # line announces may hold the interpreter lock (GIL), which would stop the thread that runs `_write`.
        if not self._lines.unfinished_tasks and len(line) <= select.PIPE_BUF and self._room.poll(0):
            write_all(self._answers, line)
        else:
            self._lines.put(line)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            write_all(self._answers, line)
            self._lines.task_done()

    def leave(self) -> None:
        """Exit this process after all queued lines are written."""
        self._lines.put(None)
        self._writer.join()
        # A normal exit of the interpreter would also wait for threads that hang, so exit functions are run directly.
        exits = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
        exits.start()
        exits.join(EXITS_WITHIN)
        sys.stdout.flush()
        os._exit(0)

    def _on_hang(self, what: str) -> None:
        self.send({"hangs": what})
        self._hung = True
        self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if self._hung and not self._busy():
            self.leave()

    def _busy(self) -> bool:
        return any(not task.done() for task in self._tasks.values())

    async def live(self) -> None:
        """Send `alive` regularly while the parent waits for answers."""
        while True:
            await asyncio.sleep(ALIVE_EVERY)
            if self._busy():
                self.send({"alive": True})

    # ── requests ─────────────────────────────────────────────────────────────

    def take_request(self, line: bytes) -> None:
        """Start a task that answers the request in a line from the parent."""
        message = json.loads(line)
        env = message.get("env", -1)
        if message["do"] == "close":
            task = asyncio.ensure_future(self._close(env))
        else:
            task = self._tasks[env] = asyncio.ensure_future(self._answer(message))
        self._track(task)

    def _track(self, task: asyncio.Task) -> None:
        _RUNNING.add(task)
        task.add_done_callback(_RUNNING.discard)
        task.add_done_callback(lambda _: self._leave_if_idle())

    async def _answer(self, message: dict[str, Any]) -> None:
        try:
            reply = {"reply": await self._reply(message)}
        except FailedError as e:
            reply = {"failure": str(e)}
        except AnewError as e:
            reply = {"anew": e.late}
            self._track(asyncio.ensure_future(_give_up(self._instances.pop(message["env"]), e.calls)))
        except asyncio.CancelledError:
            return  # the environment was closed while this request was running
        except Exception as e:  # the caller must get an answer even if this module has a bug
            reply = {"failure": f"failed: {error_text(e)} ({place(e)})"}
        self.send({"id": message["id"], **reply})

    async def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        def begins(what: str, end: float, call: int = -1, alone: bool = True) -> None:
            self.send({"id": message["id"], "begins": what, "end": end, "call": call, "alone": alone})

        reply: dict[str, Any] = {}
        if opening := message.get("open"):
            EPISODE.set(opening["key"])
            form, environment = await self._make(opening, begins)
            instance = EnvInstance(environment, opening["row"], self.settings, self.limits, begins)
            if message["do"] == "check":
                try:
                    tools = list(instance.typed_tools())
                finally:
                    await _give_up(instance, [])
                named = form.kind == "tools" or hasattr(environment, "tool_schemas")
                offer = "" if named else f", tools {', '.join(tools)}" if tools else ", no tools"
                return {"hello": form.hello + offer, "tools": tools}
            self._instances[message["env"]] = instance
            reply = await instance.open(opening["seed"], opening["state"], opening["turns"], opening["digests"])
        instance = self._instances[message["env"]]
        instance.begins = begins
        if message["do"] == "say":
            return await instance.say(message["turn"])
        return await instance.score() if message["do"] == "score" else reply

    async def _make(self, opening: dict[str, Any], begins: Callable[[str, float], None]) -> tuple[Form, Any]:
        """Load and create the environment for an opening. Return its form and the environment."""
        name = opening["name"]
        try:
            if name not in self._forms:
                self.send({"loading": True})
                try:
                    self._forms[name] = load(name)
                finally:
                    self.send({"loading": False})
            form = self._forms[name]
            make = partial(form.make, opening["settings"])
            return form, await self.limits.run("its constructor", self.settings.timeout_s, begins, make)
        except ValueError as e:
            raise FailedError(f"cannot be loaded: {e}") from None
        except LateError as e:
            raise FailedError(f"{e} in its constructor") from None
        except RaisedError as e:
            known = isinstance(e.error, SettingsError)
            why = str(e.error) if known else f"{error_text(e.error)} ({place(e.error)})"
            raise FailedError(f"cannot be made: {why}") from None

    async def _close(self, env: int) -> None:
        if task := self._tasks.pop(env, None):
            task.cancel()
        if instance := self._instances.pop(env, None):
            await _give_up(instance, [])

    async def close_all(self) -> None:
        """Close all environments, and wait at most `CLOSES_WITHIN` seconds for them to close."""
        closing = [asyncio.ensure_future(self._close(env)) for env in list(self._instances)]
        if closing:
            await asyncio.wait(closing, timeout=CLOSES_WITHIN)


_RUNNING: set[asyncio.Task] = set()
"""Running tasks. The event loop has only weak references to them, so this set keeps them alive."""


async def _give_up(instance: EnvInstance, calls: list[asyncio.Future]) -> None:
    """Wait for `calls`, the calls that still run in a dropped environment, and then close the environment."""
    instance.begins = lambda *_, **__: None
    if calls:
        await asyncio.wait(calls)
    with suppress(FailedError):
        await instance.close()


async def serve(requests: int, answers: int) -> None:
    """Serve requests until the pipe `requests` is closed. requests, answers: file descriptors of the pipes."""
    lines = asyncio.StreamReader(limit=1 << 40)
    protocol = asyncio.StreamReaderProtocol(lines)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(requests, "rb"))
    if not (first := await lines.readline()):
        return
    settings = PoolSettings(**json.loads(first))
    if settings.memory_mb:
        size = (settings.memory_mb + limits.THREADS * STACK_MB) << 20
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    worker = Worker(settings, answers)
    _RUNNING.add(asyncio.ensure_future(worker.live()))
    worker.send({"ready": True})
    while (line := await lines.readline()).endswith(b"\n"):
        worker.take_request(line)
    await worker.close_all()
    worker.leave()


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    asyncio.run(serve(*take_pipes()))
