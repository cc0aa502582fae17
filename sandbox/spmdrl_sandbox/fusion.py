"""Programs that a SandboxFusion service runs (https://github.com/bytedance/SandboxFusion): POST URL/run_code.

The service keeps programs in, with what it is configured to; of `Limits` it takes the time and the memory alone. Its
answers may be anything: one that makes no sense, a refusal, or none after all tries is the verdict `failure`, never an
error of the program. Standard library only.
"""

import base64
import contextlib
import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Callable
from email.message import Message
from typing import Any
from urllib.parse import urlsplit

from spmdrl_sandbox.base import Limits, Outcome, Program, SandboxError, Verdict

GRACE = 10.0
"""Seconds beyond a program's own that an answer may take: the service may have others to run first."""
MOST_BYTES = 64 << 20
"""Longest answer that is read."""
LONGEST_WAIT = 30.0
"""Seconds between two tries, at most, whatever the service asks for."""


class ServiceError(Exception):
    """The service did not run the program."""

    def __init__(self, why: str, again: bool, after: float = 0.0):
        """again: another try may help, after that many seconds at least."""
        super().__init__(why)
        self.again, self.after = again, after


class Fusion:
    """A service that runs programs, as `Warm.run` does. It has no sessions. Use it from any thread."""

    def __init__(
        self,
        url: str,
        language: str = "python",
        tries: int = 4,
        wait: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """url: of the service, with or without /run_code. language: of programs, in the service's words. tries: how
        often a program is sent. wait: seconds after the first, doubled after each. sleep: waits.
        """
        self.url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self.parts = urlsplit(self.url)
        if self.parts.scheme not in ("http", "https") or not self.parts.hostname:
            raise SandboxError(f"{url!r} is no address of a service", "give one that begins with http:// or https://")
        self.language, self.tries, self.wait, self.sleep = language, tries, wait, sleep
        self.name = f"SandboxFusion ({self.parts.scheme}://{self.parts.netloc.rpartition('@')[2]}{self.parts.path})"

    def run(self, program: Program, limits: Limits) -> Outcome:
        """Run a program to its end. A fault of the service is the verdict `failure`.

        Raises:
            SandboxError: the program is a command, which the service does not run.
        """
        if program.argv:
            raise SandboxError("SandboxFusion runs sources, no commands", "give `source` and the service's `language`")
        body = json.dumps(request_of(program, limits, self.language)).encode()
        began, why = time.monotonic(), ""
        for number in range(self.tries):
            try:
                return outcome_of(self._ask(body, 2 * limits.seconds + GRACE), limits)
            except ServiceError as error:
                why = str(error)
                if not error.again:
                    break
                if number + 1 < self.tries:
                    self.sleep(min(LONGEST_WAIT, max(error.after, self.wait * 2**number)))
        return Outcome("failure", seconds=time.monotonic() - began, why=f"{self.name}: {why}")

    def close(self) -> None:
        """Do nothing: no connection stays open."""

    def send(self, message: dict[str, Any]) -> None:
        """Refuse the first message of a session. Raises SandboxError."""
        raise SandboxError("SandboxFusion has no sessions: a program runs once, to its end", "take open_sandbox()")

    def _ask(self, body: bytes, seconds: float) -> Any:
        """Send a request and return the answer. seconds: longest wait for the whole of it.

        Raises:
            ServiceError: there is none.
        """
        kind = http.client.HTTPSConnection if self.parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.parts.hostname or "", self.parts.port, timeout=seconds)
        late = threading.Event()

        def cut() -> None:
            # A timeout of a socket is one of each read, which an answer in drops would never reach.
            late.set()
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, cut)
        try:
            connection.connect()
            # The connection drops it once an answer begins that closes the connection.
            opened = connection.sock
            timer.start()
            connection.request("POST", self.parts.path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = answer.read(MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            slow = late.is_set() or isinstance(error, TimeoutError)
            raise ServiceError(f"no answer within {seconds:g} s" if slow else repr(error), True) from None
        finally:
            timer.cancel()
            connection.close()
        if answer.status != 200:
            # With another status the same request would fail again.
            again = answer.status >= 500 or answer.status in (408, 425, 429)
            raise ServiceError(f"HTTP {answer.status} {answer.reason}", again, _after(answer.headers))
        if late.is_set():
            raise ServiceError(f"no answer within {seconds:g} s", True)
        try:
            if len(data) > MOST_BYTES:
                raise ValueError("too long")
            return json.loads(data)
        except (ValueError, RecursionError):
            raise ServiceError(f"an answer that is no JSON: {data[:80]!r}", True) from None


def request_of(program: Program, limits: Limits, language: str) -> dict[str, Any]:
    """Return the request that runs a program."""
    data = {name: text.encode(errors="surrogatepass") for name, text in program.files.items()}
    return {
        "code": program.source,
        "language": language,
        "stdin": program.stdin,
        "compile_timeout": limits.seconds,
        "run_timeout": limits.seconds,
        "memory_limit_MB": limits.memory_mib,
        "files": {name: base64.b64encode(each).decode() for name, each in data.items()},
        "fetch_files": [],
    }


def outcome_of(answer: Any, limits: Limits) -> Outcome:
    """Return the outcome of a program in the service's answer.

    Raises:
        ServiceError: the service failed, or the answer makes no sense.
    """
    try:
        status = answer["status"]
        if status == "SandboxError":
            raise ServiceError(f"it could not run the program: {str(answer.get('message'))[:200]}", True)
        if status not in ("Success", "Failed"):
            raise ValueError(status)
        compiled, ran = answer.get("compile_result"), answer.get("run_result")
        result = ran if ran is not None else compiled
        seconds = float(result.get("execution_time") or 0.0)
        out, err = _cut(result.get("stdout"), limits), _cut(result.get("stderr"), limits)
        if not math.isfinite(seconds) or result["status"] not in ("Finished", "TimeLimitExceeded"):
            raise ValueError(result["status"])
        if result["status"] == "TimeLimitExceeded":
            return Outcome("timeout", 0, 0, out, err, seconds, "timeout")
        code = result["return_code"]
        if type(code) is not int or (status == "Success") != (code == 0):
            raise ValueError(f"{status} with return code {code}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ServiceError(f"an answer that makes no sense ({type(error).__name__}: {error})", True) from None
    code, number = (0, -code) if code < 0 else (code, 0)
    if ran is None and code == 0 and number == 0:
        raise ServiceError("an answer without a run", True)
    last = (err.strip().splitlines() or [""])[-1]
    verdict: Verdict = "ok" if code == 0 and number == 0 else "memory" if last.startswith("MemoryError") else "error"
    why = {"ok": "", "memory": "memory"}.get(verdict, last or (f"signal {number}" if number else f"exit code {code}"))
    return Outcome(verdict, code, number, out, err, seconds, why)


def _cut(text: Any, limits: Limits) -> str:
    """Return text of the service, no longer than the limit; `None` is none."""
    if text is not None and not isinstance(text, str):
        raise TypeError("text")
    return (text or "").encode(errors="replace")[: limits.output_kib << 10].decode(errors="replace")


def _after(headers: Message) -> float:
    """Return the seconds that a refusal asks to wait, where it gives a number."""
    try:
        return max(0.0, float(headers.get("Retry-After", "")))
    except ValueError:
        return 0.0
