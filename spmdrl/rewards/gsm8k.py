"""Grade-school maths (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168): a number after `####` ends the truth.

`gsm8k` is strict: the response must end its work with `#### n` too. `gsm8k_flexible` takes the last number it holds.
"""

import re
from decimal import Decimal

from spmdrl.rewards.base import Reward, RewardInput
from spmdrl.rewards.text import NUMBER, SIGNS, to_decimal, truth_text

_MARKED = re.compile(rf"####\s*({NUMBER.pattern})")


def truth_of(ground_truth: object) -> Decimal:
    """The number of a truth, `...#### 72` or plain `72`. Raises ValueError when there is none."""
    value = to_decimal(truth_text(ground_truth).rsplit("####", 1)[-1].strip().rstrip("."))
    if value is None:
        raise ValueError(
            f"no number to compare with in the truth {str(ground_truth)[-60:]!r}: "
            "change --data.answer-column or --reward.function"
        )
    return value


def _grade(item: RewardInput) -> tuple[float, float, float]:
    """(strict, flexible, format), each 0 or 1."""
    truth = truth_of(item.ground_truth)
    solution = item.solution.translate(SIGNS)
    marked = _MARKED.findall(solution)
    numbers = [m.group() for m in NUMBER.finditer(solution)]
    strict = bool(marked) and to_decimal(marked[-1]) == truth
    flexible = bool(numbers) and to_decimal(numbers[-1]) == truth
    return float(strict), float(flexible), float(bool(marked))


def gsm8k(item: RewardInput) -> Reward:
    """1 if the number behind the last `####` equals the truth: a number, or GSM8K's answer that ends in `#### n`.
    Parts: `flexible`, the score of `gsm8k_flexible`; `format`, there is a `#### n`.
    """
    strict, flexible, form = _grade(item)
    return Reward(strict, {"flexible": flexible, "format": form})


def gsm8k_flexible(item: RewardInput) -> Reward:
    """1 if the last number equals the truth, which is as for `gsm8k`. Parts: `strict`, the score of `gsm8k`;
    `format`, there is a `#### n`.
    """
    strict, flexible, form = _grade(item)
    return Reward(flexible, {"strict": strict, "format": form})
