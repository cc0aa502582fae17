"""Rewards that grade the text in the last `<answer>` tags, for short answers and for reasoning-gym tasks.

The tags are optional for reasoning-gym tasks.

Short answers are compared after SQuAD normalisation (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250):
lower case, no punctuation, no articles, single spaces. Unlike in SQuAD, a number keeps its minus sign and a leading
decimal point, and numbers of equal value are equal. A decimal point between digits is removed, as in SQuAD and verl, so
4.2 becomes 42. The response format, and the score of 0.25 for too many tags, follow Search-R1
(https://arxiv.org/abs/2503.09516).

Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym) are scored by that package's own scorers.
"""

import re
import string
from collections.abc import Callable
from typing import Any

from spmdrl.data.scores import answer_of, puzzle_score
from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.text import SIGNS, to_decimal, truth_text

OPEN, CLOSE = "<answer>", "</answer>"
MOST_TAGS = 10
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MINUS = re.compile(r"(?<![\w)])-(?=\$?\.?\d)")
_POINT = re.compile(r"(?<!\w)\.(?=\d)")
_KEPT = "\u2212", "\u00b7"
"""Stand-ins for a number's minus sign and leading decimal point, which would otherwise be removed as punctuation."""
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def _normal_form(text: str) -> str:
    text = _POINT.sub(_KEPT[1], _MINUS.sub(_KEPT[0], text.translate(SIGNS)))
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _same(answer: str, truth: str) -> bool:
    value = to_decimal(truth)
    if value is not None and to_decimal(answer) == value:
        return True
    # Text that has only articles and punctuation normalises to nothing, so compare the text itself.
    return (_normal_form(truth) or truth.strip()) == (_normal_form(answer) or answer.strip())


def _tagged(text: str) -> str | None:
    """Return the text in the last pair of tags, matching pairs from the left, or None if there is no pair."""
    answer, start = None, text.find(OPEN)
    while start >= 0:
        end = text.find(CLOSE, start)
        if end < 0:
            break
        answer = text[start + len(OPEN) : end]
        start = text.find(OPEN, end)
    return answer


def _truths_of(ground_truth: object) -> list[str]:
    """Return all correct answers, given as text, as a list of texts, or as either in a dict's `target` (Search-R1)."""
    found = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    if not isinstance(found, list):
        return [truth_text(found)]
    texts = [truth_text(each, may_be_empty=True) for each in found if each is not None]
    return [text for text in texts if text.strip()] or [truth_text(None)]


def exact_match_qa(item: RewardInput) -> Reward:
    """Return 1 if the text in the last `<answer>...</answer>` equals one of the correct answers after SQuAD
    normalisation. A correct answer scores only 0.25 if there are more than 10 opening or more than 10 closing tags, so
    that repeated guessing does not pay off. The part `format` is 1 if there are tags.
    """
    truths = _truths_of(item.ground_truth)
    answer = _tagged(item.solution)
    if answer is None:
        return Reward(0.0, {"format": 0.0})
    right = any(_same(answer, truth) for truth in truths)
    many = max(item.solution.count(OPEN), item.solution.count(CLOSE)) > MOST_TAGS
    return Reward((0.25 if many else 1.0) if right else 0.0, {"format": 1.0})


def reasoning_reward(item: RewardInput) -> Reward:
    """Return the task scorer's score for the text in `<answer>` tags, or for the whole response if there are no tags.
    The score is 0 if the scorer cannot read the answer. The part `format` is 1 if there are tags.

    `extra` must have the columns of `reasoning-gym:<task>` prompts: task, config, entry.
    """
    if not {"task", "config", "entry"} <= item.extra.keys():
        raise ValueError("the reward reasoning_gym only grades prompts of --data.train reasoning-gym:<task>")
    answer, tagged = answer_of(item.solution)
    value = puzzle_score(item.extra["task"], item.extra["config"], item.extra["entry"], answer)
    return Reward(value, {"format": float(tagged)})


def load(name: str, settings: dict[str, Any]) -> Callable[[RewardInput], Reward]:
    """Import reasoning-gym and return the reward `reasoning_gym`. Raises ValueError if the package is not installed."""
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as e:
        raise ValueError("the reward reasoning_gym needs the package: pip install 'spmdrl[reasoning-gym]'") from e
    return reasoning_reward
