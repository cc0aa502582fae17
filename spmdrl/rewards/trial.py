"""Tries a reward on the rows of a data set before a run: right answers, none at all, and wrong ones.

A right answer is the truth itself, in each of the forms that graders look for; for programs a row's own solution. The
form that scores most counts, row by row, as rows of several kinds want several forms. A reward that does
not score it above every wrong answer trains the wrong behaviour, whatever its scale.
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
"""Ways to write an answer down."""
SOLUTIONS = ("canonical_solution", "reference_solution", "solution", "solutions", "code")
"""Columns of programming tasks that hold a right program."""
GARBAGE = {
    "nothing": "",
    "a space": " ",
    "words": "I am not sure, but the answer is surely right and deserves full marks.",
    "every form": "#### \n\\boxed{}\nAnswer: \n<answer></answer>",
    "a lone brace": "\\boxed{{{{",
    "a program that does nothing": "```python\npass\n```",
    "a program that leaves": "```python\nimport os\nos._exit(0)\n```",
}
"""Answers that deserve nothing."""
RIVAL = "words"
"""The one of them that a right answer meets where answers are compared."""
OTHER = "another row's"
"""Beginning of the kinds of answers that are right for another row."""


@dataclass
class Row:
    """The rewards of one kind of answer."""

    kind: str
    rewards: dict[int, Reward]
    """By the index of the prompt."""

    @property
    def by_prompt(self) -> dict[int, float]:
        """Scores of the answers that were graded."""
        usable = {i: r for i, r in self.rewards.items() if not r.ungraded and r.applies}
        return {i: r.score for i, r in usable.items() if math.isfinite(r.score)}

    @property
    def scores(self) -> list[float]:
        """The same without the prompts."""
        return list(self.by_prompt.values())

    @property
    def right(self) -> float:
        """Share of the graded answers that count as right; nan where there are none."""
        return sum(is_right(x) for x in self.scores) / len(self.scores) if self.scores else math.nan


@dataclass
class Trial:
    """Scores of answers of every kind."""

    rows: list[tuple[str, Row]]
    """`gold` or `garbage`, and a kind of it, in a fixed order."""
    sources: dict[int, str]
    """`data_source` of each prompt by its index."""

    def of(self, sort: str) -> list[Row]:
        """Return the kinds of a sort."""
        return [row for each, row in self.rows if each == sort]

    def best(self) -> dict[int, float]:
        """Return what a row's right answers got in their best form, by prompt."""
        out: dict[int, float] = {}
        for row in self.of("gold"):
            out |= {i: max(score, out.get(i, score)) for i, score in row.by_prompt.items()}
        return out

    def undeserved(self) -> dict[int, float]:
        """Return the most that an answer got which deserves nothing, by prompt."""
        out: dict[int, float] = {}
        for row in self.of("garbage"):
            if not row.kind.startswith(OTHER):
                out |= {i: max(score, out.get(i, score)) for i, score in row.by_prompt.items()}
        return out

    def best_shares(self) -> dict[str, tuple[int, float]]:
        """Return for each source how many rows have a right answer that was graded, and the share where it is best."""
        best, most = self.best(), self.undeserved()
        out = {}
        for source in dict.fromkeys(self.sources.values()):
            wins = [best[i] > most.get(i, -math.inf) for i, its in self.sources.items() if its == source and i in best]
            out[source] = (len(wins), sum(wins) / len(wins) if wins else math.nan)
        return out


def gold(prompt: Prompt, programs: bool) -> Iterator[tuple[str, str]]:
    """Yield right answers of a row: the form and the text. programs: the reward may grade programs."""
    holds_tests = _holds_tests(prompt)
    for column in SOLUTIONS if programs or holds_tests else ():
        found = _first(prompt.extra.get(column))
        if found.strip():
            yield f"column {column}", found
            if "```" not in found:
                yield f"column {column}, in a code block", FORMS["in a code block"].format(found)
    if holds_tests:
        # These are no answer.
        return
    truth = prompt.ground_truth
    truth = truth.get("target") if isinstance(truth, dict) and "target" in truth else truth
    truth = truth[0] if isinstance(truth, list) and truth else truth
    last = str(truth).rsplit("####", 1)[-1].strip()
    for form, text in FORMS.items():
        yield form, text.format(truth if form == "as it is" else last)


def _first(value: object) -> str:
    """Return a solution: a text, the first of a list, or of the JSON text of one, as APPS has them."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, str) else ""


def _holds_tests(prompt: Prompt) -> bool:
    try:
        read_tests(prompt.ground_truth, prompt.extra)
    except UngradedError:
        return False
    return True


def trial(prompts: list[Prompt], grader: Grader, programs: bool, seed: int = 0) -> Trial:
    """Grade answers of all kinds on the rows. It ends early where nothing can be graded.

    programs: the reward grades programs, or may. A grader that compares the answers of a group gets groups of two: a
    right answer and RIVAL, or an answer that deserves nothing and a right one.
    """
    answers: dict[tuple[str, str], list[tuple[Prompt, str]]] = {}
    for prompt in prompts:
        for form, text in gold(prompt, programs):
            answers.setdefault(("gold", form), []).append((prompt, text))
    for prompt, other in _others(prompts, seed):
        for kind, text in GARBAGE.items():
            answers.setdefault(("garbage", kind), []).append((prompt, text))
        if other.ground_truth != prompt.ground_truth:
            for form, text in gold(other, programs):
                answers.setdefault(("garbage", f"{OTHER}, {form}"), []).append((prompt, text))

    def rival(prompt: Prompt, sort: str) -> list[str]:
        return [GARBAGE[RIVAL]] if sort == "gold" else [text for _, text in gold(prompt, programs)][:1]

    out = Trial([], {prompt.index: prompt.data_source for prompt in prompts})
    asked = 0
    for (sort, kind), those in answers.items():
        out.rows.append((sort, _grade(kind, [(prompt, text, rival(prompt, sort)) for prompt, text in those], grader)))
        asked += len(those)
        if asked >= len(prompts) and not any(row.scores for _, row in out.rows):
            # A judge that does not answer takes its time over each.
            break
    return out


def _others(prompts: list[Prompt], seed: int) -> list[tuple[Prompt, Prompt]]:
    """Return each prompt and another one of its source, or itself where that has no other."""
    by: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by.setdefault(prompt.data_source, []).append(prompt)
    for those in by.values():
        random.Random(seed).shuffle(those)
    after = {a.index: b for those in by.values() for a, b in zip(those, those[1:] + those[:1], strict=True)}
    return [(prompt, after[prompt.index]) for prompt in prompts]


def _grade(kind: str, asked: list[tuple[Prompt, str, list[str]]], grader: Grader) -> Row:
    """Grade answers. asked: prompt, answer, and what it is compared with if the grader compares, if there is any."""
    for prompt, text, rival in asked:
        texts = [text, *rival] if grader.wants_groups else [text]
        if grader.wants_groups and not rival:
            continue
        for sample, each in enumerate(texts):
            truth, extra = prompt.ground_truth, prompt.extra
            item = RewardInput(
                prompt.data_source, each, truth, extra, prompt.content, group=len(texts), tools=prompt.tools
            )
            grader.submit((prompt.index, sample), item)
    try:
        found = {key: reward for key, reward in grader.drain() if isinstance(key, tuple) and key[1] == 0}
    except RewardError as error:
        raise RewardError(f"{error} (the answer was {kind})") from error
    return Row(kind, {prompt.index: found[prompt.index, 0] for prompt, *_ in asked if (prompt.index, 0) in found})
