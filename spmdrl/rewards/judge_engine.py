"""Questions to a judge on the run's own engine: rounds of attempts, votes, costs.

All ranks of an engine ask the same in the same order, and hear the same answers. Random words and seeds come from the
questions and the step, so that neither the ranks nor the order of their work play a part.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from spmdrl.config.judge import JudgeConfig
from spmdrl.rewards.judge_asker import Answer, Case, Counters
from spmdrl.rewards.judge_verdict import BadVerdictError, Question

log = logging.getLogger("spmdrl")


@dataclass(frozen=True)
class Ask:
    """One attempt at one vote on a question."""

    question: Question
    vote: int
    attempt: int
    digest: str = field(init=False)
    """Hash of the question and the vote."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.question.digest(self.vote))

    def nonce(self, key: tuple[int, ...]) -> str:
        """Return the word of the lines around the material: a hash of the material, which no response can hold."""
        return hashlib.sha256(f"{key} {self.digest} {self.attempt}".encode()).hexdigest()[:32]


@dataclass(frozen=True)
class JudgeReply:
    """The judge's own words."""

    text: str = ""
    why: str = ""
    """Why they are no verdict, whatever they say."""
    final: bool = False
    """True: no further attempt would help."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


Run = Callable[[JudgeConfig, list[Ask], Callable[[], bool] | None], list[JudgeReply] | None]
"""Has the engine answer; a function to be called meanwhile, whose value plays no part. None: it was abandoned."""


class EngineAsker:
    """Asks the run's engine. `run` is given by the rollout that asks."""

    on_engine = True

    def __init__(self, cfg: JudgeConfig, name: str):
        """name: what messages call the judge."""
        self.cfg, self.name = cfg, name
        self.spent = Counters()
        self.run: Run | None = None
        self.quiet = False
        """True on ranks whose engine has another rank that tells of costs."""
        self._open: list[Case] = []
        self._why: dict[Case, str] = {}

    @property
    def pending(self) -> int:
        """Cases submitted and not yet answered."""
        return len(self._open)

    def submit(self, key: object, *questions: Question, response: object = None) -> None:
        """Take a case."""
        self._open.append(Case(key, key if response is None else response, questions))

    def poll(self) -> list[tuple[object, Answer]]:
        """Nothing: the engine samples."""
        return []

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Answer]]:
        """Have the engine answer all that was submitted, unless the rollout is abandoned. stop: called meanwhile."""
        assert self.run or not self._open, "a rollout asks"
        done: list[tuple[object, Answer]] = []
        for attempt in range(1 + self.cfg.retries):
            if not self._open:
                break
            asks = [
                (Ask(question, vote, attempt), case, (i, vote))
                for case in self._open
                for i, question in enumerate(case.questions)
                for vote in range(self.cfg.votes)
                if (i, vote) not in case.verdicts
            ]
            # In an order that does not tell which response ended first.
            asks.sort(key=lambda each: each[0].digest)
            assert self.run
            said = self.run(self.cfg, [ask for ask, _, _ in asks], stop)
            if said is None:
                return done
            for (ask, case, place), answer in zip(asks, said, strict=True):
                self._hear(ask, case, place, answer)
            done += self._answered()
        for case in self._open:
            attempts = 1 + self.cfg.retries
            why = f"the judge gave no verdict in {attempts} attempts, at last because {self._why.pop(case, '')}"
            done.append((case.key, why))
        self._open = []
        return done

    def close(self) -> None:
        """Tell of the costs."""
        if self.spent.calls and not self.quiet:
            log.info("%s: %s", self.name, ", ".join(f"{name} {n:,}" for name, n in vars(self.spent).items()))
        self.quiet = True

    def _hear(self, ask: Ask, case: Case, place: tuple[int, int], answer: JudgeReply) -> None:
        spent = self.spent
        if answer.final:
            case.failed, self._why[case] = True, answer.why
            return
        spent.calls += 1
        spent.repeated += ask.attempt > 0
        spent.prompt_tokens += answer.prompt_tokens
        spent.completion_tokens += answer.completion_tokens
        try:
            if answer.why:
                raise BadVerdictError(answer.why)
            case.verdicts[place] = ask.question.read(answer.text)
        except BadVerdictError as error:
            spent.bad_verdicts += 1
            self._why[case] = str(error)

    def _answered(self) -> list[tuple[object, Answer]]:
        """Take the cases that are over out of those that are open."""
        done: list[tuple[object, Answer]] = []
        still = []
        for case in self._open:
            if case.failed:
                done.append((case.key, self._why.pop(case)))
            elif len(case.verdicts) == len(case.questions) * self.cfg.votes:
                self._why.pop(case, None)
                done.append((case.key, case.answer(self.cfg.votes)))
            else:
                still.append(case)
        self._open = still
        return done
