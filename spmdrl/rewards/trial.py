"""Tries a reward on the rows of a data set before a run: right answers, none at all, and wrong ones.

A right answer is the truth itself, in each of the forms that graders look for; for programs a row's own solution. A
reward that gives a right answer little, or a wrong one something, teaches something else than what was meant.
"""

import contextlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from spmdrl.data.prompts import Prompt
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
ENOUGH = 0.95
"""Least share of right answers that should get a score of at least 1."""


@dataclass
class Row:
    """The rewards of one kind of answer."""

    kind: str
    rewards: list[Reward]

    @property
    def scores(self) -> list[float]:
        """Scores of the answers that were graded."""
        return [r.score for r in self.rewards if not r.ungraded and r.applies and math.isfinite(r.score)]

    @property
    def right(self) -> float:
        """Share of the graded answers with a score of at least 1; nan where there are none."""
        return sum(x >= 1.0 for x in self.scores) / len(self.scores) if self.scores else math.nan


def gold(prompt: Prompt, programs: bool) -> Iterator[tuple[str, str]]:
    """Yield right answers of a row: the form and the text. programs: the truth may be tests of a program."""
    for column in SOLUTIONS if programs else ():
        found = _first(prompt.extra.get(column))
        if found.strip():
            yield f"column {column}", found
            if "```" not in found:
                yield f"column {column}, in a code block", FORMS["in a code block"].format(found)
    if programs and _holds_tests(prompt):
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


def trial(prompts: list[Prompt], grader: Grader, programs: bool, seed: int = 0) -> list[tuple[str, Row]]:
    """Grade answers of all kinds on the rows; returns (`gold` or `garbage`, what the kind got), in a fixed order.

    programs: the reward grades programs, or may. A grader that compares the answers of a group gets groups of two: a
    right answer and RIVAL, or an answer that deserves nothing and a right one.
    """
    answers: dict[tuple[str, str], list[tuple[Prompt, str]]] = {}
    for prompt in prompts:
        for form, text in gold(prompt, programs):
            answers.setdefault(("gold", form), []).append((prompt, text))
    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    for prompt, other in zip(prompts, shuffled, strict=True):
        for kind, text in GARBAGE.items():
            answers.setdefault(("garbage", kind), []).append((prompt, text))
        if other.ground_truth != prompt.ground_truth:
            for form, text in gold(other, programs):
                answers.setdefault(("garbage", f"another row's, {form}"), []).append((prompt, text))

    def rival(prompt: Prompt, sort: str) -> list[str]:
        return [GARBAGE[RIVAL]] if sort == "gold" else [text for _, text in gold(prompt, programs)][:1]

    return [
        (sort, _grade(kind, [(prompt, text, rival(prompt, sort)) for prompt, text in asked], grader))
        for (sort, kind), asked in answers.items()
    ]


def _grade(kind: str, asked: list[tuple[Prompt, str, list[str]]], grader: Grader) -> Row:
    """Grade answers. asked: prompt, answer, and what it is compared with if the grader compares, if there is any."""
    row = Row(kind, [])
    for prompt, text, rival in asked:
        texts = [text, *rival] if grader.wants_groups else [text]
        if grader.wants_groups and not rival:
            continue
        for sample, each in enumerate(texts):
            truth, extra = prompt.ground_truth, prompt.extra
            item = RewardInput(prompt.data_source, each, truth, extra, prompt.asked, len(texts))
            grader.submit((prompt.index, sample), item)
    try:
        row.rewards = [reward for key, reward in grader.drain() if isinstance(key, tuple) and key[1] == 0]
    except RewardError as error:
        raise RewardError(f"{error} (the answer was {kind})") from error
    return row


def verdicts(rows: list[tuple[str, Row]]) -> list[str]:
    """Return what is wrong with a reward, by what answers of each kind got; empty if nothing is."""
    out = []
    right = [row for sort, row in rows if sort == "gold" and row.scores]
    best = max(right, key=lambda row: row.right, default=None)
    if best is None:
        out.append("no row holds an answer that can be tried: nothing is known of right answers")
    elif not best.right >= ENOUGH:
        out.append(
            f"right answers get a score of 1 in {best.right:.1%} of the rows at best ({best.kind}): the reward does "
            "not find the truth (--reward.function, --data.answer-column), or rows are wrong"
        )
    for sort, row in rows:
        if sort == "garbage" and row.scores and row.right > 0 and not _may_be_right(row):
            out.append(f"{row.right:.1%} of the answers `{row.kind}` get a score of 1, and they say nothing")
    left_out = sum(bool(r.ungraded) for _, row in rows for r in row.rewards)
    total = sum(len(row.rewards) for _, row in rows)
    if left_out:
        first = next(r.ungraded for _, row in rows for r in row.rewards if r.ungraded)
        out.append(f"{left_out} of {total} answers could not be graded, the first because {first}")
    if late := sum(r.timed_out for _, row in rows for r in row.rewards):
        out.append(f"{late} of {total} gradings took too long (--reward.timeout)")
    return out


def _may_be_right(row: Row) -> bool:
    """Another row's answer can be right by chance: short truths are often the same in another form."""
    return row.kind.startswith("another row's") and row.right < 0.2


def table(rows: list[tuple[str, Row]]) -> str:
    """Return the table that a user reads."""
    lines = [f"{'answers':8} {'written':40} {'tried':>6} {'score >= 1':>10} {'mean':>8} {'least':>8} {'most':>8}"]
    for sort, row in rows:
        scores = row.scores
        numbers = "not graded"
        if scores:
            numbers = f"{row.right:10.1%} {sum(scores) / len(scores):8.3f} {min(scores):8.3f} {max(scores):8.3f}"
        lines.append(f"{sort:8} {row.kind:40} {len(row.rewards):6} {numbers:>10}")
    return "\n".join(lines)


def as_json(rows: list[tuple[str, Row]], found: list[str]) -> str:
    """Return rows and verdicts as one JSON object."""
    kinds = [
        {"answers": sort, "written": row.kind, "tried": len(row.rewards), "right": row.right if row.scores else None}
        for sort, row in rows
    ]
    return json.dumps({"ok": not found, "problems": found, "kinds": kinds})
