"""Puzzles from reasoning-gym (https://github.com/open-thought/reasoning-gym) with several attempts."""

from collections.abc import Callable
from typing import Any

from spmdrl.config.user_code import error_text
from spmdrl.data.builtin import nearest
from spmdrl.data.scores import answer_of, data_set_score, is_right, puzzle_score
from spmdrl.env.messages import opening, seed_of

ASK = "Put your final answer between <answer> and </answer>."
KEEPS = ("best", "last")


class Attempts:
    """A puzzle that the policy may answer several times. Each wrong attempt except the last is answered with a message.

    A row from the data source `reasoning-gym:<task>` contains its puzzle in the columns task, config and entry, and all
    samples of the prompt share this puzzle. For other rows, a puzzle is generated from the row's `seed` column if
    present, otherwise from the sample's own seed. An attempt is the text in `<answer>` tags, or the whole message if
    there are no tags. An attempt is correct if the task scores it 1. The reward is the score of the best or the last
    attempt (`keep`). The reward's parts are `first` (the score of the first attempt), `attempts` (the number of
    attempts) and `format` (the fraction of attempts with tags).
    """

    def __init__(self, task: str, attempts: int = 3, keep: str = "best", **config: Any):
        """Check and store the settings. task: name of a reasoning-gym task.

        attempts: maximum number of attempts. keep: which attempt is rewarded, `best` or `last`. config: task settings
        for rows without a puzzle.
        """
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError as e:
            raise ValueError(
                f"reasoning_gym:{task} needs the package: pip install 'spmdrl[reasoning-gym]' ({e})"
            ) from e
        if task not in DATASETS:
            raise ValueError(f"there is no task reasoning_gym:{task}: {nearest(task, DATASETS)}")
        if type(attempts) is not int or attempts < 1:
            raise ValueError(f"reasoning_gym:{task}: attempts must be a whole number of 1 or more, not {attempts!r}")
        if keep not in KEEPS:
            raise ValueError(f"reasoning_gym:{task}: keep must be {' or '.join(KEEPS)}, not {keep!r}")
        self._task, self._attempts, self._keep, self._config = task, attempts, keep, config
        self._score: Callable[[str], float] = lambda answer: 0.0
        self._scores: list[float] = []
        self._tagged = 0

    def reset(self, row: dict, seed: int) -> list[dict] | None:
        """Take the row's puzzle and return None, or draw a puzzle and return the messages."""
        self._scores, self._tagged = [], 0
        if "entry" in row and "task" in row:
            if row["task"] != self._task:
                raise ValueError(f"reasoning_gym:{self._task} got a row of the task {row['task']}: name that task")
            self._score = lambda answer: puzzle_score(row["task"], row["config"], row["entry"], answer)
            return None
        import reasoning_gym

        config = {**self._config, "size": 1, "seed": seed_of(row, seed)}
        try:
            made = reasoning_gym.create_dataset(self._task, **config)
            entry = made[0]
        except Exception as e:  # the tasks raise errors of many types for wrong settings
            raise ValueError(f"reasoning_gym:{self._task} refuses {self._config} ({error_text(e)})") from e
        self._score = lambda answer: data_set_score(made, entry, answer)
        return opening(row, f"{entry['question']}\n\n{ASK}")

    def step(self, message: dict) -> tuple[str | None, None, bool]:
        """Score an attempt. Return (request for another attempt or None, no reward, whether the episode is done)."""
        answer, tagged = answer_of(message.get("content") or "")
        self._scores.append(self._score(answer))
        self._tagged += tagged
        left = self._attempts - len(self._scores)
        if is_right(self._scores[-1]) or left <= 0:
            return None, None, True
        again = f"You have {left} attempts left." if left > 1 else "You have one attempt left."
        return f"Your answer is not right. {again}", None, False

    def reward(self) -> dict[str, float]:
        """Return the score of the best or the last attempt (0 if there was none), and the parts of the reward."""
        scores = self._scores or [0.0]
        kept = max(scores) if self._keep == "best" else scores[-1]
        tagged = self._tagged / len(scores)
        return {"score": kept, "first": scores[0], "attempts": float(len(self._scores)), "format": tagged}

    def state(self) -> dict[str, Any]:
        """Return the scores of the attempts so far, and the number of attempts with tags."""
        return {"scores": self._scores, "tagged": self._tagged}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._scores, self._tagged = list(state["scores"]), state["tagged"]
