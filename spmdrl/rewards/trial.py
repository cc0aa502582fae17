"""Tries a reward on correct, empty and wrong answers to the rows of a data set before a run.

A correct answer is the row's ground truth, written in each of the forms that graders look for. If the reward runs
programs or the ground truth consists of tests, the row's solution is also a correct answer, but the tests themselves
are not. The best-scoring form counts for the row. A reward that does not score this form higher than every wrong answer
trains the wrong behaviour.
"""

import contextlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from spmdrl.data.prompts import Prompt
from spmdrl.data.scores import is_right
from spmdrl.rewards.base import Grader, Reward, RewardError, RewardInput, UngradedError
from spmdrl.rewards.code_tests import read_tests

FORMS = {
    "as it is": "{}",
    "after ####": "So it is.\n#### {}",
    "in \\boxed{}": "So it is $\\boxed{{{}}}$.",
    "after Answer:": "So it is.\nAnswer: {}",
    "in <answer>": "So it is. <answer>{}</answer>",
    "in a code block": "```python\n{}\n```",
}
"""Templates that write an answer in a form that graders look for."""
SOLUTIONS = ("canonical_solution", "reference_solution", "solution", "solutions", "code")
"""Columns of programming tasks that contain a correct program."""
GARBAGE = {
    "nothing": "",
    "a space": " ",
    "words": "I am not sure, but the answer is surely right and deserves full marks.",
    "every form": "#### \n\\boxed{}\nAnswer: \n<answer></answer>",
    "a lone brace": "\\boxed{{{{",
    "a program that does nothing": "```python\npass\n```",
    "a program that leaves": "```python\nimport os\nos._exit(0)\n```",
}
"""Answers that should not be rewarded, by kind."""
RIVAL = GARBAGE["words"]
"""The wrong answer that a correct one is compared with, if the grader compares answers."""
OTHER = "another row's"
"""Prefix of `Row.kind` for answers that are correct for another row."""


@dataclass
class Row:
    """Rewards for all answers of one kind."""

    kind: str
    rewards: dict[int, Reward]
    """Rewards by prompt index."""

    @property
    def by_prompt(self) -> dict[int, float]:
        """Return the scores of the graded answers by prompt index."""
        usable = {i: r for i, r in self.rewards.items() if not r.ungraded and r.applies}
        return {i: r.score for i, r in usable.items() if math.isfinite(r.score)}

    @property
    def right(self) -> float:
        """Return the fraction of graded answers that count as correct, or NaN if none were graded."""
        scores = self.by_prompt.values()
        return sum(map(is_right, scores)) / len(scores) if scores else math.nan


@dataclass
class Trial:
    """Rewards for correct answers (`gold`) and for wrong and empty ones (`garbage`)."""

    gold: list[Row]
    garbage: list[Row]
    sources: dict[int, str]
    """The `data_source` of each prompt, by prompt index."""

    @property
    def rows(self) -> list[tuple[str, Row]]:
        """Return the rows for all kinds of answers, each labelled `gold` or `garbage`."""
        return [("gold", row) for row in self.gold] + [("garbage", row) for row in self.garbage]

    def best(self) -> dict[int, float]:
        """Return the score of each prompt's correct answer in its best form, by prompt index."""
        return _most(self.gold)

    def undeserved(self) -> dict[int, float]:
        """Return the highest score of the `GARBAGE` answers for each prompt, by prompt index."""
        return _most([row for row in self.garbage if not row.kind.startswith(OTHER)])

    def best_shares(self) -> dict[str, tuple[int, float]]:
        """Return source -> (number of prompts with a graded correct answer, fraction of these where it scores best)."""
        best, most = self.best(), self.undeserved()
        out = {}
        for source in dict.fromkeys(self.sources.values()):
            wins = [best[i] > most.get(i, -math.inf) for i, its in self.sources.items() if its == source and i in best]
            out[source] = (len(wins), sum(wins) / len(wins) if wins else math.nan)
        return out


def _most(rows: list[Row]) -> dict[int, float]:
    out: dict[int, float] = {}
    for row in rows:
        out |= {i: max(score, out.get(i, score)) for i, score in row.by_prompt.items()}
    return out


def trial(prompts: list[Prompt], grader: Grader, programs: bool, seed: int = 0) -> Trial:
    """Grade answers of all kinds on the rows; return early if no answer can be graded.

    programs: True if the reward can grade programs. A grader that compares answers receives groups of two: a correct
    answer and RIVAL, or a wrong answer and a correct one.
    """
    answers: dict[tuple[str, str], list[tuple[Prompt, str]]] = {}
    for prompt in prompts:
        for form, text in _right(prompt, programs):
            answers.setdefault(("gold", form), []).append((prompt, text))
    for prompt, other in _others(prompts, seed):
        for kind, text in GARBAGE.items():
            answers.setdefault(("garbage", kind), []).append((prompt, text))
        if other.ground_truth != prompt.ground_truth:
            for form, text in _right(other, programs):
                answers.setdefault(("garbage", f"{OTHER}, {form}"), []).append((prompt, text))
    out = Trial([], [], {prompt.index: prompt.data_source for prompt in prompts})
    count = 0
    for (sort, kind), these in answers.items():
        rivals = [[RIVAL] if sort == "gold" else [text for _, text in _right(p, programs)][:1] for p, _ in these]
        getattr(out, sort).append(_grade(kind, these, rivals, grader))
        count += len(these)
        if count >= len(prompts) and not any(row.by_prompt for _, row in out.rows):
            # Stop, because a judge that does not respond would be just as slow for all other answers.
            break
    return out


def _right(prompt: Prompt, programs: bool) -> Iterator[tuple[str, str]]:
    """Yield the form and the text of each correct answer to a row. programs: True if the reward can grade programs."""
    truth = prompt.ground_truth
    try:
        read_tests(truth, prompt.extra)
        holds_tests = True
    except UngradedError:
        holds_tests = False
    for column in SOLUTIONS if programs or holds_tests else ():
        found = _first(prompt.extra.get(column))
        if found.strip():
            yield f"column {column}", found
            if "```" not in found:
                yield f"column {column}, in a code block", FORMS["in a code block"].format(found)
    if holds_tests:
        # The ground truth consists of tests, which are not an answer.
        return
    truth = truth.get("target") if isinstance(truth, dict) and "target" in truth else truth
    truth = truth[0] if isinstance(truth, list) and truth else truth
    last = str(truth).rsplit("####", 1)[-1].strip()
    for form, text in FORMS.items():
        yield form, text.format(truth if form == "as it is" else last)


def _first(value: object) -> str:
    """Return a solution given as text, as a list (its first item), or as a JSON-encoded list, as in APPS."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, str) else ""


def _others(prompts: list[Prompt], seed: int) -> list[tuple[Prompt, Prompt]]:
    """Pair each prompt with another prompt from its source, or with itself if the source has only one prompt."""
    by: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by.setdefault(prompt.data_source, []).append(prompt)
    for these in by.values():
        random.Random(seed).shuffle(these)
    after = {a.index: b for these in by.values() for a, b in zip(these, these[1:] + these[:1], strict=True)}
    return [(prompt, after[prompt.index]) for prompt in prompts]


def _grade(kind: str, answers: list[tuple[Prompt, str]], rivals: list[list[str]], grader: Grader) -> Row:
    """Grade answers of one kind and return their rewards.

    If the grader compares responses, each answer is submitted with its rival; answers without a rival are skipped.
    """
    for (prompt, text), rival in zip(answers, rivals, strict=True):
        if grader.wants_groups and not rival:
            continue
        texts = [text, *rival] if grader.wants_groups else [text]
        for sample, each in enumerate(texts):
            row = prompt.data_source, each, prompt.ground_truth, prompt.extra, prompt.content
            grader.submit((prompt.index, sample), RewardInput(*row, group=len(texts), tools=prompt.tools))
    try:
        found = dict(grader.drain())
    except RewardError as error:
        raise RewardError(f"{error} (the answer was {kind})") from error
    return Row(kind, {p.index: found[p.index, 0] for p, _ in answers if (p.index, 0) in found})
