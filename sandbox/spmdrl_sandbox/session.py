"""Programs that answer messages while they run: channels of JSON lines, and Python sessions over channels."""

import base64
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from spmdrl_sandbox.base import Limits, Outcome, Program, SandboxError, Verdict
from spmdrl_sandbox.inside.values import decode, encode
from spmdrl_sandbox.warm import GRACE, Warm, outcome_of, task_of

INSIDE = Path(__file__).parent / "inside"


class Channel:
    """A running program that exchanges lines of JSON. Its sandbox cannot run other programs until `close`."""

    def __init__(self, warm: Warm, program: Program, limits: Limits):
        """Start a program. limits: limits of its complete run."""
        self.warm, self.buffer = warm, bytearray()
        self.outcome: Outcome | None = None
        """Outcome of the program, or None while it runs."""
        self.until = time.monotonic() + limits.seconds
        warm.send(task_of(program, limits) | {"session": {}})

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; it is lost if the program has ended."""
        if self.outcome is None:
            line = (json.dumps(message) + "\n").encode()
            try:
                self.warm.send({"input": base64.b64encode(line).decode()})
            except SandboxError as error:
                self._ended(error)

    def receive(self, seconds: float) -> bytes | None:
        """Return the next line, or None if none arrives within `seconds` or the program has ended (see `outcome`)."""
        until = min(time.monotonic() + seconds, self.until + GRACE)
        while self.outcome is None and b"\n" not in self.buffer:
            try:
                message = self.warm.receive(until)
            except SandboxError as error:
                self._ended(error)
                return None
            if message is None:
                return None
            if "output" in message:
                self.buffer += base64.b64decode(message["output"])
            else:
                self.outcome = outcome_of(message)
        line, found, rest = self.buffer.partition(b"\n")
        if not found:
            return None
        self.buffer = rest
        return bytes(line)

    def _ended(self, error: SandboxError) -> None:
        """Handle the sandbox's end. Set the outcome if the sandbox served only this program, else raise `error`."""
        if not self.warm.once:
            raise error
        self.outcome = Outcome("error", why=str(error))

    def close(self) -> Outcome:
        """End the program and return its outcome. May be called twice.

        Raises:
            SandboxError: the sandbox has ended, or does not end the program.
        """
        if self.outcome is None:
            try:
                self.warm.send({"close": True})
            except SandboxError as error:
                self._ended(error)
            until = time.monotonic() + 2 * GRACE
            self.until = max(self.until, until)
            while self.outcome is None:
                if time.monotonic() > until:
                    raise SandboxError("the sandbox does not end its program")
                self.buffer.clear()
                self.receive(GRACE)
        return cast(Outcome, self.outcome)


class Session:
    """A Python process in a sandbox that keeps its state between calls. It runs `inside/session.py`."""

    def __init__(self, warm: Warm, limits: Limits):
        """Start the session. limits: limits of the complete session."""
        self.channel = Channel(warm, Program((INSIDE / "session.py").read_text(encoding="utf-8")), limits)

    def load(self, source: str, seconds: float) -> "Answer":
        """Execute a module, so that its functions can be called. The answer's value lists the function names."""
        return self.ask({"load": source}, seconds)

    def run(self, source: str, seconds: float) -> "Answer":
        """Execute statements like a notebook cell. If the last statement is an expression, its value is printed."""
        return self.ask({"run": source}, seconds)

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], seconds: float) -> "Answer":
        """Call a function.

        Raises:
            NotPlainError: an argument is not plain data.
        """
        message = {"call": name, "args": [encode(x) for x in args]}
        return self.ask(message | {"kwargs": {k: encode(v) for k, v in kwargs.items()}}, seconds)

    def close(self) -> Outcome:
        """End the session and return its outcome. May be called twice."""
        return self.channel.close()

    def ask(self, message: dict[str, Any], seconds: float) -> "Answer":
        """Send a message and return its answer. If the answer takes longer than `seconds`, the session is closed."""
        self.channel.send(message)
        line = self.channel.receive(seconds)
        if line is not None:
            return answer_of(line)
        if self.channel.outcome is None:
            self.close()
            return Answer("timeout", why=f"no answer within {seconds:g} s")
        ended = self.close()
        return Answer("error" if ended.verdict == "ok" else ended.verdict, why=ended.why or "the program ended")


@dataclass(frozen=True)
class Answer:
    """The answer of a session to one message."""

    verdict: Verdict
    value: Any = None
    raw: Any = None
    """The value as `inside/values.py` encodes it."""
    error: str = ""
    """Type of the exception, if one was raised."""
    why: str = ""
    """Text of the exception, or the reason why there is no answer."""
    printed: str = ""


def answer_of(line: bytes) -> Answer:
    """Parse an answer. An invalid answer becomes an error, because the untrusted program can write to the pipe."""
    try:
        message = json.loads(line)
        printed = str(message.get("printed", ""))
        if "error" in message:
            kind, text = message["error"]
            return Answer("error", error=str(kind), why=str(text), printed=printed)
        return Answer("ok", decode(message["value"]), message["value"], printed=printed)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Answer("error", why=f"the program sent an invalid answer ({type(error).__name__})")
