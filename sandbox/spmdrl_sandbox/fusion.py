"""Client of a SandboxFusion service (https://github.com/bytedance/SandboxFusion), which runs programs.

Programs are sent by POST to URL/run_code. The service's configuration determines how well they are isolated. The
service enforces only the time and memory limits. The verdict is `failure` if no try gets a valid answer, or if the
service refuses the program. A `failure` does not count as an error of the program. The module needs only the standard
library.
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
"""Seconds that an answer may take in addition to the program's time, since the service may queue programs."""
MOST_BYTES = 64 << 20
"""Maximum size of an answer in bytes."""
LONGEST_WAIT = 30.0
"""Maximum seconds between two tries, even if the service demands a longer wait."""


class ServiceError(Exception):
    """The service did not run the program, for the reason in the message."""

    def __init__(self, why: str, again: bool, after: float = 0.0):
        """Create the error. again: whether another try may help. after: minimum seconds to wait before the next try."""
        super().__init__(why)
        self.again, self.after = again, after


class Fusion:
    """A service with the interface of `Warm`, but without sessions. Its methods may be called from any thread."""

    def __init__(
        self,
        url: str,
        language: str = "python",
        tries: int = 4,
        wait: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Create a client.

        url: address of the service, with or without /run_code. language: language of programs, as the service names
        it. tries: maximum number of times that a program is sent. wait: seconds to wait after the first try; each
        further wait is twice as long. sleep: function that waits.
        """
        self.url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self.parts = urlsplit(self.url)
        if self.parts.scheme not in ("http", "https") or not self.parts.hostname:
            raise SandboxError(f"{url!r} is not the address of a service", "give a url with http:// or https://")
        self.language, self.tries, self.wait, self.sleep = language, tries, wait, sleep
        self.name = f"SandboxFusion ({self.parts.scheme}://{self.parts.netloc.rpartition('@')[2]}{self.parts.path})"

    def run(self, program: Program, limits: Limits) -> Outcome:
        """Run a program to its end and return its outcome, with the verdict `failure` after a fault of the service.

        Raises:
            SandboxError: the program is a command, which the service does not run.
        """
        if program.argv:
            raise SandboxError(
                "SandboxFusion only runs sources, not commands", "give `source` and the service's `language`"
            )
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
        """Do nothing, because each request closes its connection."""

    def send(self, message: dict[str, Any]) -> None:
        """Raise SandboxError, because the service has no sessions."""
        raise SandboxError("SandboxFusion has no sessions: a program runs once, to its end", "use open_sandbox()")

    def _ask(self, body: bytes, seconds: float) -> Any:
        """Send a request and return the parsed JSON of the answer. seconds: maximum time for the complete answer.

        Raises:
            ServiceError: there is no usable answer.
        """
        kind = http.client.HTTPSConnection if self.parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.parts.hostname or "", self.parts.port, timeout=seconds)
        late = threading.Event()

        def cut() -> None:
            # A socket's timeout starts again at each read, so it would not expire if an answer arrived byte by byte.
            late.set()
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, cut)
        try:
            connection.connect()
            # Keep the socket for `cut`: the connection drops it when an answer with `Connection: close` begins.
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
            # After any other status code, the same request would fail again.
            again = answer.status >= 500 or answer.status in (408, 425, 429)
            raise ServiceError(f"HTTP {answer.status} {answer.reason}", again, _after(answer.headers))
        if late.is_set():
            raise ServiceError(f"no answer within {seconds:g} s", True)
        try:
            if len(data) > MOST_BYTES:
                raise ValueError("too long")
            return json.loads(data)
        except (ValueError, RecursionError):
            raise ServiceError(f"an answer that is not JSON: {data[:80]!r}", True) from None


def request_of(program: Program, limits: Limits, language: str) -> dict[str, Any]:
    """Return the JSON object that asks the service to run a program."""
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
    """Return the outcome of a program from the service's answer.

    Raises:
        ServiceError: the service failed, or its answer is invalid.
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
        raise ServiceError(f"an invalid answer ({type(error).__name__}: {error})", True) from None
    code, number = (0, -code) if code < 0 else (code, 0)
    if ran is None and code == 0 and number == 0:
        raise ServiceError("an answer without a run", True)
    last = (err.strip().splitlines() or [""])[-1]
    verdict: Verdict = "ok" if code == 0 and number == 0 else "memory" if last.startswith("MemoryError") else "error"
    why = {"ok": "", "memory": "memory"}.get(verdict, last or (f"signal {number}" if number else f"exit code {code}"))
    return Outcome(verdict, code, number, out, err, seconds, why)


def _cut(text: Any, limits: Limits) -> str:
    """Return a program's output, cut to `output_kib`. None becomes an empty text; other types raise TypeError."""
    if text is not None and not isinstance(text, str):
        raise TypeError("text")
    return (text or "").encode(errors="replace")[: limits.output_kib << 10].decode(errors="replace")


def _after(headers: Message) -> float:
    """Return the seconds to wait from the header `Retry-After`, or 0 if the header is missing or not a number."""
    try:
        return max(0.0, float(headers.get("Retry-After", "")))
    except ValueError:
        return 0.0
