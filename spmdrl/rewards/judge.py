"""LLM judges: `--reward.function judge.yaml` (docs/judge.md).

The `Judge` grader asks questions about responses and turns the verdicts into rewards. A case is a set of questions that
counts only if all of them are answered. Each question is asked `votes` times (set in the judge's file), and each answer
is one vote. An `Asker` sends the questions to the judge model, which runs on a server (judge_server.py) or on the run's
own engine (judge_engine.py).
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
"""The grades of all votes on each question of a case, or a text that says why there are no grades."""
log = logging.getLogger("spmdrl")


@dataclass(eq=False)
class Case:
    """A set of questions that counts only if all of them are answered."""

    key: object
    response: object
    """Key of the response, for messages."""
    questions: tuple[Question, ...]
    grades: dict[tuple[int, int], float] = field(default_factory=dict)
    """Grades received so far, by (question index, vote index)."""
    failed: bool = False
    """True once a vote has failed; no more requests are then sent for this case."""
    why: str = ""
    """Why the latest attempt at a vote failed."""


@dataclass
class Counters:
    """Cumulative request, verdict and token counts of a judge, for tracking its cost."""

    calls: int = 0
    """Number of requests sent, including retries."""
    repeated: int = 0
    """Number of retries after failed requests."""
    bad_verdicts: int = 0
    """Number of answers that could not be parsed as a verdict."""
    cached: int = 0
    """Number of verdicts read from the cache."""
    prompt_tokens: int = 0
    """Prompt tokens, as the server or the engine counts them."""
    completion_tokens: int = 0
    """Completion tokens, as the server or the engine counts them."""


class Asker:
    """Base class of objects that send questions to a judge. Not thread-safe: use each from a single thread."""

    on_engine = False
    """True if the run's engine answers the questions, which happens only in `drain`."""

    def __init__(self, cfg: JudgeConfig, name: str):
        """name: name of the judge in messages."""
        self.cfg, self.name = cfg, name
        self.spent = Counters()
        self._open: dict[Case, None] = {}
        self._done: list[tuple[object, Answer]] = []

    def submit(self, key: object, *questions: Question, response: object = None) -> None:
        """Submit the questions of a case without blocking.

        key: identifies the answer. response: response key for messages, if different from `key`.
        """
        case = Case(key, key if response is None else response, questions)
        self._open[case] = None
        self._begin(case)

    def poll(self) -> list[tuple[object, Answer]]:
        """Return the answers that arrived since the last call, without blocking. Raises RewardError."""
        done, self._done = self._done, []
        return done

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Answer]]:
        """Wait for all answers, or until `stop()` returns True, and return the new answers. Raises RewardError."""
        raise NotImplementedError

    def close(self) -> None:
        """Cancel all requests. Can be called repeatedly."""
        raise NotImplementedError

    def log_costs(self) -> None:
        """Write the counters to the log."""
        log.info("%s: %s", self.name, ", ".join(f"{name} {n:,}" for name, n in vars(self.spent).items()))

    def _begin(self, case: Case) -> None:
        """Start sending the questions of a case."""

    def _grades(self, case: Case) -> tuple[list[float], ...] | None:
        """Return the grades of all votes on each question, or None while some are missing."""
        votes, found = range(self.cfg.votes), case.grades
        if len(found) < len(case.questions) * self.cfg.votes:
            return None
        return tuple([found[i, vote] for vote in votes] for i in range(len(case.questions)))

    def _answer(self, case: Case, answer: Answer) -> None:
        del self._open[case]
        self._done.append((case.key, answer))

    def _no_verdict(self, why: str) -> str:
        return f"the judge gave no verdict (attempts: {1 + self.cfg.retries}), the last time because {why}"


@dataclass
class _Group:
    """Responses that are judged together: all responses to a prompt in comparisons, otherwise a single response."""

    keys: list[object] = field(default_factory=list)
    items: list[RewardInput] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    """The pair of responses in each case, as indices into the group, or (0, 0) for a single response."""
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    """Answer for each pair in `pairs`. The answer for two responses covers both orders."""


class Judge(Grader):
    """Grader that has a judge grade each response or, with `compare` in the judge's file, compare a group's responses.

    Responses are compared in both orders, so that the judge's position bias cancels out. A group consists of
    `RewardInput.group` responses, which are submitted consecutively in sample order, so opponents do not depend on
    which response finished first.
    """

    def __init__(self, cfg: JudgeConfig, name: str, asker: Asker):
        """name: name of the judge in messages."""
        super().__init__(name)
        self.cfg, self.asker = cfg, asker
        self.wants_groups, self.on_engine = cfg.compare > 0, asker.on_engine
        self.spent = asker.spent
        self._begun = _Group()

    def submit(self, key: object, item: RewardInput) -> None:
        """Submit the next response. Raises RewardError if responses are compared but the group has only one."""
        if self.cfg.compare and item.group < 2:
            raise RewardError(
                f"reward function {self.name} failed on {describe(key)}: a single response cannot be compared; sample "
                "more per prompt (--rollout.samples-per-prompt, --eval.samples), or remove compare in the judge's file"
            )
        group, size = self._begun, item.group if self.cfg.compare else 1
        group.keys.append(key)
        group.items.append(item)
        self.pending += 1
        assert size == 1 or (group.items[0].group == size and group.items[0].prompt == item.prompt), "incomplete group"
        if len(group.keys) == size:
            self._begun = _Group()
            self._ask(group)

    def poll(self) -> list[tuple[object, Reward]]:
        """Implement `Grader.poll`."""
        return self._rewards(self.asker.poll())

    def drain(self, stop: Callable[[], bool] | None = None) -> list[tuple[object, Reward]]:
        """Implement `Grader.drain`."""
        assert not self._begun.keys, "incomplete group"
        return self._rewards(self.asker.drain(stop))

    def close(self) -> None:
        """Implement `Grader.close`."""
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
    """Compute a sample's reward from the grades of its votes.

    The score is the mean grade divided by `scale`, the highest possible grade. The part `grade` is the mean grade. The
    part `agreement` is 1 - (highest grade - lowest grade) / scale.
    """
    if isinstance(answer, str):
        return Reward(math.nan, ungraded=answer)
    grades = answer[0]
    mean = math.fsum(grades) / len(grades)
    return Reward(mean / scale, {"grade": mean, "agreement": 1.0 - (max(grades) - min(grades)) / scale})


def pairs_of(group: int, compare: int) -> list[tuple[int, int]]:
    """Return the pairs of responses to compare, as indices into the group.

    Every response gets the same number of opponents. group: number of responses. compare: requested number of opponents
    per response. If `compare` is at least `group` - 1, all pairs are returned. Otherwise the responses form a ring in
    sample order, and each response is compared with its nearest neighbours on both sides. For an odd `compare`, each is
    also compared with the response opposite it in the ring. In an odd-sized group no response is opposite, so each gets
    one opponent fewer, or two neighbours if `compare` is 1.
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
    """Compute the reward of response `i` in a group.

    The value of a comparison is the mean over the votes in both orders, with 1 for a win, 0.5 for a tie and 0 for a
    loss. The score is the mean over comparisons with a verdict in both orders. If there are none, the response is
    ungraded. The part `wins` is the fraction of comparisons with a value above 0.5. The part `order_agreement` is 1
    minus the mean difference between the two orders. The part `answered` is the fraction of comparisons that have a
    verdict.
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
        # `second` is the grade of the pair's second response, which the judge saw first in the swapped order.
        values = (first, 1.0 - second) if pair[0] == i else (1.0 - first, second)
        got.append(sum(values) / 2)
        apart.append(abs(values[0] - values[1]))
    if not got:
        return Reward(math.nan, ungraded=f"it got no verdict (comparisons: {mine}), the first time because {failed}")
    parts = {
        "wins": sum(x > 0.5 for x in got) / len(got),
        "order_agreement": 1.0 - math.fsum(apart) / len(got),
        "answered": len(got) / mine,
    }
    return Reward(math.fsum(got) / len(got), parts)
