"""A language model as a judge: `--reward.function judge.yaml` (docs/judge.md).

A grader asks a judge questions about responses, in cases of questions that count only together, and computes rewards
from the verdicts. An asker has the judge answer: a server (judge_server.py) or the run's own engine (judge_engine.py).
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from spmdrl.config.judge import JudgeConfig
from spmdrl.data.scores import describe
from spmdrl.rewards.base import Grader, Reward, RewardError, RewardInput
from spmdrl.rewards.judge_verdict import VALUES, Question, pair_questions, question

Answer = tuple[list[float], ...] | str
"""The grades of all votes on each question of a case, or why there are none."""
log = logging.getLogger("spmdrl")


@dataclass(eq=False)
class Case:
    """Questions under way that count only if all of them are answered."""

    key: object
    response: object
    """Key of the response that messages name."""
    questions: tuple[Question, ...]
    grades: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (question, vote)."""
    failed: bool = False
    """A vote failed, so no others are worth a request."""
    why: str = ""
    """Why the last attempt that failed did."""


@dataclass
class Counters:
    """Costs of a judge so far."""

    calls: int = 0
    """Requests sent, repeated ones too."""
    repeated: int = 0
    """Those of them that were sent because one before failed."""
    bad_verdicts: int = 0
    """Answers that are no verdict in the form that the question gives."""
    cached: int = 0
    """Verdicts from the cache."""
    prompt_tokens: int = 0
    """Tokens that the server reports to have read."""
    completion_tokens: int = 0
    """Tokens that it reports to have written."""


class Asker:
    """Has a judge answer the questions of cases. Use it from one thread."""

    on_engine = False
    """True: the run's engine answers, in `drain` alone."""

    def __init__(self, cfg: JudgeConfig, name: str):
        """name: of the judge, in messages."""
        self.cfg, self.name = cfg, name
        self.spent = Counters()
        self._open: dict[Case, None] = {}
        self._done: list[tuple[object, Answer]] = []

    def submit(self, key: object, *questions: Question, response: object = None) -> None:
        """Take a case, without waiting.

        key: comes back with the answer. response: key by which messages name it, if that is another.
        """
        case = Case(key, key if response is None else response, questions)
        self._open[case] = None
        self._begin(case)

    def poll(self) -> list[tuple[object, Answer]]:
        """Return answers since the last call, without waiting. Raises RewardError."""
        done, self._done = self._done, []
        return done

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Answer]]:
        """Wait for all answers, or until `stop()`; return those since the last call. Raises RewardError."""
        raise NotImplementedError

    def close(self) -> None:
        """End all requests. May be called twice."""
        raise NotImplementedError

    def log_costs(self) -> None:
        """Write the counters to the log."""
        log.info("%s: %s", self.name, ", ".join(f"{name} {n:,}" for name, n in vars(self.spent).items()))

    def _begin(self, case: Case) -> None:
        """Start to ask the questions of a case."""

    def _grades(self, case: Case) -> tuple[list[float], ...] | None:
        """Return the grades of all votes on each question; None while some are missing."""
        votes, found = range(self.cfg.votes), case.grades
        if len(found) < len(case.questions) * self.cfg.votes:
            return None
        return tuple([found[i, vote] for vote in votes] for i in range(len(case.questions)))

    def _answer(self, case: Case, answer: Answer) -> None:
        del self._open[case]
        self._done.append((case.key, answer))

    def _no_verdict(self, why: str) -> str:
        return f"the judge gave no verdict in {1 + self.cfg.retries} attempts, at last because {why}"


@dataclass
class _Group:
    """Responses that are judged together: to one prompt if they are compared, else a single one."""

    keys: list[object] = field(default_factory=list)
    items: list[RewardInput] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    """Responses of each case, by their places in the group."""
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    """By the pair: on its two orders, or on a single response."""


class Judge(Grader):
    """Grader that has a judge grade each response, or compare those of a group: the `compare` of its file.

    Each response of a group is compared with others in both orders, so that a taste of the judge for the first place or
    the second cancels. The `RewardInput.group` responses of a group are submitted one after another in the order of
    their samples, so opponents do not depend on who finished first.
    """

    def __init__(self, cfg: JudgeConfig, name: str, asker: Asker):
        """name: of the judge, in messages."""
        super().__init__(name)
        self.cfg, self.asker = cfg, asker
        self.wants_groups, self.on_engine = cfg.compare > 0, asker.on_engine
        self.spent = asker.spent
        self._begun = _Group()

    def submit(self, key: object, item: RewardInput) -> None:
        """Take the next response, of a group if they are compared. Raises RewardError for a group of one."""
        if self.cfg.compare and item.group < 2:
            raise RewardError(
                f"reward function {self.name} failed on {describe(key)}: a response alone cannot be compared; sample "
                "more of a prompt (--rollout.samples-per-prompt, --eval.samples), or leave compare out of the judge"
            )
        group, size = self._begun, item.group if self.cfg.compare else 1
        group.keys.append(key)
        group.items.append(item)
        self.pending += 1
        assert size == 1 or (group.items[0].group == size and group.items[0].prompt == item.prompt), "groups come whole"
        if len(group.keys) == size:
            self._begun = _Group()
            self._ask(group)

    def poll(self) -> list[tuple[object, Reward]]:
        """See `Grader`."""
        return self._rewards(self.asker.poll())

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Reward]]:
        """See `Grader`."""
        assert not self._begun.keys, "groups come whole"
        return self._rewards(self.asker.drain(stop))

    def close(self) -> None:
        """See `Grader`."""
        self.asker.close()

    def _ask(self, group: _Group) -> None:
        cfg, items = self.cfg, group.items
        group.pairs = pairs_of(len(items), cfg.compare) if cfg.compare else [(0, 0)]
        for i, j in group.pairs:
            if questions := pair_questions(items[i], items[j], cfg) if cfg.compare else [question(items[i], cfg)]:
                self.asker.submit((group, (i, j)), *questions, response=group.keys[i])
            else:
                group.answers[i, j] = [VALUES["tie"]], [VALUES["tie"]]
        self._finish(group)

    def _rewards(self, answers: list[tuple[object, Answer]]) -> list[tuple[object, Reward]]:
        for key, answer in answers:
            group, pair = cast(tuple[_Group, tuple[int, int]], key)
            group.answers[pair] = answer
            self._finish(group)
        return self._results()

    def _finish(self, group: _Group) -> None:
        if len(group.answers) < len(group.pairs):
            return
        for i, key in enumerate(group.keys):
            compares, answers = self.cfg.compare, group.answers
            reward = _reward_of_pairs(i, answers) if compares else _reward_of(answers[0, 0], self.cfg.scale)
            if reward.ungraded:
                self._leave_out(key, reward.ungraded)
            else:
                self._answer(key, reward)


def _reward_of(answer: Answer, scale: int) -> Reward:
    """Return the reward of a sample from the grades of its votes.

    The score is their mean over the highest grade. Parts: `grade`, the mean, and `agreement`, 1 less the distance
    between the highest and the lowest vote over the highest grade.
    """
    if isinstance(answer, str):
        return Reward(math.nan, ungraded=answer)
    grades = answer[0]
    mean = math.fsum(grades) / len(grades)
    return Reward(mean / scale, {"grade": mean, "agreement": 1.0 - (max(grades) - min(grades)) / scale})


def pairs_of(group: int, compare: int) -> list[tuple[int, int]]:
    """Return the pairs to compare: places in the group, each pair once, all with as many opponents.

    All pairs if `compare` is the number of others, or more. Else the responses stand in a ring, in the order of their
    samples, and each meets its nearest neighbours on both sides, for an odd `compare` also the one opposite. If the
    group is odd too, nobody is opposite: each meets one fewer, or its two neighbours if `compare` is 1.
    """
    if compare >= group - 1:
        steps = list(range(1, group // 2 + 1))
    else:
        steps = list(range(1, compare // 2 + 1))
        if compare % 2 and group % 2 == 0:
            steps.append(group // 2)
        steps = steps or [1]
    return sorted({(min(i, j), max(i, j)) for step in steps for i in range(group) for j in [(i + step) % group]})


def _reward_of_pairs(i: int, answers: dict[tuple[int, int], Answer]) -> Reward:
    """Return the reward of the response at a place in its group.

    A comparison gives it the mean of the votes of both orders: 1 for a win, 0.5 for a tie, 0 for a loss. The score is
    the mean over comparisons in which both orders have a verdict; without any it is left out. Parts: `wins`, the share
    of comparisons with more than 0.5; `order_agreement`, 1 less the mean distance between the two orders;
    `answered`, the share of comparisons that gave a verdict.
    """
    got, apart, failed, mine = [], [], "", 0
    for pair, answer in sorted(answers.items(), key=lambda each: each[0]):
        if i not in pair:
            continue
        mine += 1
        if isinstance(answer, str):
            failed = failed or answer
            continue
        first, second = (math.fsum(votes) / len(votes) for votes in answer)
        # In the second order the other one stood first.
        values = (first, 1.0 - second) if pair[0] == i else (1.0 - first, second)
        got.append(sum(values) / 2)
        apart.append(abs(values[0] - values[1]))
    if not got:
        return Reward(math.nan, ungraded=f"none of its {mine} comparisons gave a verdict, the first because {failed}")
    parts = {
        "wins": sum(x > 0.5 for x in got) / len(got),
        "order_agreement": 1.0 - math.fsum(apart) / len(got),
        "answered": len(got) / mine,
    }
    return Reward(math.fsum(got) / len(got), parts)
