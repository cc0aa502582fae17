"""Tools that run a model's Python programs in the sandbox, separately or in a session that keeps variables."""

import atexit
import threading
from typing import Any, cast

from spmdrl.env.base import BrokenError, Stateless
from spmdrl_sandbox.base import Limits, Outcome, Program, SandboxError
from spmdrl_sandbox.open import open_for
from spmdrl_sandbox.session import Answer, Session
from spmdrl_sandbox.warm import Warm


class Sandboxes:
    """Keeps this process's idle sandboxes for later programs, by provider. The class is thread-safe."""

    def __init__(self) -> None:
        self.idle: dict[str, list[Warm]] = {}
        self.lock = threading.Lock()

    def take(self, provider: str) -> Warm:
        """Return an idle sandbox, or start one. Raises BrokenError if no sandbox works on this machine."""
        with self.lock:
            if idle := self.idle.get(provider):
                return idle.pop()
        try:
            return open_for(provider)
        except SandboxError as error:
            raise BrokenError(f"no sandbox works on this machine: {error}") from None

    def give_back(self, provider: str, warm: Warm) -> None:
        """Keep an idle sandbox for later programs."""
        with self.lock:
            self.idle.setdefault(provider, []).append(warm)

    def close(self) -> None:
        """Shut down the idle sandboxes."""
        with self.lock:
            idle, self.idle = [warm for each in self.idle.values() for warm in each], {}
        for warm in idle:
            warm.close()


SANDBOXES = Sandboxes()
atexit.register(SANDBOXES.close)


class Python(Stateless):
    """The tool `python`, which runs each program separately in the sandbox (docs/sandbox.md). It has no state."""

    def __init__(self, provider: str = "auto", seconds: float = 10.0, memory_mib: int = 512) -> None:
        """Store the settings.

        Args:
            provider: sandbox type, a value of `--sandbox.provider`.
            seconds: maximum wall time per program, in seconds.
            memory_mib: maximum memory per program, in MiB.
        """
        self.provider = provider
        self.limits = Limits(seconds=seconds, cpu_seconds=max(1, round(seconds)), memory_mib=memory_mib)
        self.timeout_s = seconds + 20.0

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept for the next program.

        Args:
            code: The program. Print what you want to see.
        """
        warm = SANDBOXES.take(self.provider)
        try:
            ended = warm.run(Program(code), self.limits)
        except SandboxError as error:
            warm.close()
            raise BrokenError(f"the sandbox has ended: {error}") from None
        SANDBOXES.give_back(self.provider, warm)
        return as_text(ended, self.limits)


class PythonSession:
    """The tool `python` in a session that keeps variables between calls. A resumed episode reruns its programs."""

    parallel_calls = False

    def __init__(
        self, provider: str = "auto", seconds: float = 10.0, memory_mib: int = 512, lifetime: float = 3600.0
    ) -> None:
        """Store the settings.

        Args:
            provider: sandbox type, a value of `--sandbox.provider`.
            seconds: maximum wall time per call, in seconds.
            memory_mib: maximum memory of the session, in MiB.
            lifetime: maximum wall time of a session, in seconds.
        """
        self.provider, self.seconds = provider, seconds
        self.limits = Limits(seconds=lifetime, cpu_seconds=max(1, round(lifetime)), memory_mib=memory_mib)
        self.timeout_s = seconds + 20.0
        self.warm: Warm | None = None
        self.session: Session | None = None
        self.lock = threading.Lock()

    def reset(self, row: dict, seed: int) -> None:
        """Start an episode with its row's prompt and no variables."""
        self.close()

    def python(self, code: str) -> str:
        """Run Python as a cell of a notebook: variables are kept, and the value of the last expression is printed.

        Args:
            code: The lines to run.
        """
        with self.lock:
            if self.session is None:
                self.warm = SANDBOXES.take(self.provider)
            try:
                self.session = self.session or Session(cast(Warm, self.warm), self.limits)
                answer = self.session.run(code, self.seconds)
            except SandboxError as error:
                self._end()
                raise BrokenError(f"the sandbox has ended: {error}") from None
            ended = self.session.channel.outcome is not None
            if ended:
                self._end()
        return _answer_text(answer) + ("\nThe session has ended: its variables are lost." if ended else "")

    def close(self) -> None:
        """End the session. May be called twice."""
        with self.lock:
            self._end()

    def _end(self) -> None:
        warm, session, self.warm, self.session = self.warm, self.session, None, None
        if warm is None:
            return
        try:
            if session is not None:
                session.close()
            SANDBOXES.give_back(self.provider, warm)
        except SandboxError:
            warm.close()


def as_text(ended: Outcome, limits: Limits) -> str:
    """Return a program's output and its failure as text for the model. Raises BrokenError if the sandbox failed."""
    if ended.verdict == "failure":
        raise BrokenError(f"the program could not be run: {ended.why}")
    why = {
        "ok": "",
        "timeout": f"The program was stopped after {limits.seconds:g} s.",
        "memory": f"The program was stopped: it may use {limits.memory_mib} MiB of memory.",
        "output": f"The program was stopped: it printed more than {limits.output_kib} KiB.",
    }.get(ended.verdict, "" if ended.stderr.strip() else f"The program failed: {ended.why}.")
    return _joined(ended.stdout, ended.stderr, why)


def _answer_text(answer: Answer) -> str:
    if answer.verdict == "ok":
        return _joined(answer.printed)
    return _joined(answer.printed, f"{answer.error}: {answer.why}" if answer.error else f"It failed: {answer.why}.")


def _joined(*parts: Any) -> str:
    text = "\n".join(part.rstrip() for part in parts if part.strip())
    return text or "(nothing was printed)"
