"""A judge that runs on the run's own engine.

All ranks of an engine ask the same questions in the same order and get the same replies. Seeds and delimiter nonces
(judge_verdict.py) are derived from the question and the step, so they depend neither on the rank nor on the order of
the questions.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from spmdrl.config.judge import JudgeConfig
from spmdrl.rewards.judge import Answer, Asker, Case
from spmdrl.rewards.judge_verdict import BadVerdictError, Question


@dataclass
class Ask:
    """One attempt at one vote on a question."""

    question: Question
    vote: int
    attempt: int
    digest: str = field(init=False)
    """Hash of the question and the vote, identical on all ranks."""

    def __post_init__(self) -> None:
        self.digest = self.question.digest(self.vote)

    def nonce(self, key: tuple[int, ...]) -> str:
        """Return the nonce for the delimiter lines: a hash of the question. As the question includes the response, the
        response cannot contain the nonce.

        key: the numbers that the rollout seeds are derived from.
        """
        return hashlib.sha256(f"{key} {self.digest} {self.attempt}".encode()).hexdigest()[:32]


@dataclass(frozen=True)
class JudgeReply:
    """The judge's reply to a question."""

    text: str = ""
    why: str = ""
    """Why the reply is not a verdict and should not be parsed, or empty if it should be parsed."""
    final: bool = False
    """True if retrying would fail too."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


Run = Callable[[JudgeConfig, list[Ask], Callable[[], bool] | None], list[JudgeReply] | None]
"""Function that generates replies with the engine and repeatedly calls its third argument while it waits. It returns
None if the rollout was abandoned."""


class EngineAsker(Asker):
    """Asker that uses the run's engine. The rollout must set `run` before it calls `drain`."""

    on_engine = True

    def __init__(self, cfg: JudgeConfig, name: str):
        """name: name of the judge in messages."""
        super().__init__(cfg, name)
        self.run: Run | None = None
        self.quiet = False
        """True if another rank of the engine logs the costs."""

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Answer]]:
        """Have the engine answer all cases unless the rollout is abandoned. stop: called while the engine generates."""
        assert self.run or not self._open, "`run` is not set"
        for attempt in range(1 + self.cfg.retries):
            if not self._open:
                break
            asks = [
                (Ask(question, vote, attempt), case, (i, vote))
                for case in self._open
                for i, question in enumerate(case.questions)
                for vote in range(self.cfg.votes)
                if (i, vote) not in case.grades
            ]
            # Sort by hash, so that the order does not depend on which response finished first.
            asks.sort(key=lambda each: each[0].digest)
            assert self.run
            replies = self.run(self.cfg, [ask for ask, _, _ in asks], stop)
            if replies is None:
                return self.poll()
            for (ask, case, place), reply in zip(asks, replies, strict=True):
                self._take(ask, case, place, reply)
            for case in list(self._open):
                if case.failed:
                    self._answer(case, case.why)
                elif grades := self._grades(case):
                    self._answer(case, grades)
        for case in list(self._open):
            self._answer(case, self._no_verdict(case.why))
        return self.poll()

    def close(self) -> None:
        """Log the costs."""
        if self.spent.calls and not self.quiet:
            self.log_costs()
        self.quiet = True

    def _take(self, ask: Ask, case: Case, place: tuple[int, int], reply: JudgeReply) -> None:
        spent = self.spent
        if reply.final:
            case.failed, case.why = True, reply.why
            return
        spent.calls += 1
        spent.repeated += ask.attempt > 0
        spent.prompt_tokens += reply.prompt_tokens
        spent.completion_tokens += reply.completion_tokens
        try:
            if reply.why:
                raise BadVerdictError(reply.why)
            case.grades[place] = ask.question.read(reply.text)
        except BadVerdictError as error:
            spent.bad_verdicts += 1
            case.why = str(error)
