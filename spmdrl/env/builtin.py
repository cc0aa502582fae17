"""Built-in games. Small tokenizers can encode their texts: lower-case letters, digits and a few punctuation marks."""

import random
import re
from typing import Any

from spmdrl.env.answers import Answer

_NUMBER = re.compile(r"\d{1,9}")


class _Game:
    parallel_calls = False

    def __init__(self, numbers: int = 8, turns: int = 4, late: float = 0.0):
        """Check and store the settings of the game.

        Args:
            numbers: the hidden number is between 1 and this number.
            turns: maximum number of guesses in an episode.
            late: reward penalty for each wrong guess before the right one.
        """
        if numbers < 1 or turns < 1 or not 0 <= late * turns <= 1:
            raise ValueError("numbers and turns must be 1 or more, and late from 0 to 1 / turns")
        self._numbers, self._turns, self._late = numbers, turns, late
        self._number, self._used, self._found = 0, 0, False

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        """Take the hidden number from the row's `number` column, or draw it from the seed. Return the prompt."""
        self._number = int(row.get("number") or random.Random(seed).randint(1, self._numbers))
        self._used, self._found = 0, False
        return row.get("prompt") or f"guess 1-{self._numbers}:"

    def _compare(self, guess: int | None) -> tuple[str, float | None, bool]:
        self._used += 1
        self._found = guess == self._number
        done = self._found or self._used >= self._turns
        reward = (1.0 - self._late * (self._used - 1)) * self._found if done else None
        if guess is None:
            return "no number", reward, done
        return "yes" if self._found else "higher" if guess < self._number else "lower", reward, done

    def state(self) -> dict[str, Any]:
        """Return the hidden number, the number of guesses made, and whether it was found."""
        return {"number": self._number, "used": self._used, "found": self._found}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the game to a state that `state` returned."""
        self._number, self._used, self._found = state["number"], state["used"], state["found"]


class Guess(_Game):
    """A number-guessing game. The first number in a message is the guess; the answer to a wrong guess is `higher` or
    `lower`.

    The reward is 1 for the right number, minus `late` for each wrong guess before it, and 0 if it is not found. Binary
    search finds each of n numbers within log2(n) + 1 guesses.
    """

    def step(self, message: dict[str, Any]) -> tuple[str | None, float | None, bool]:
        """Compare the first number in a message with the hidden one."""
        guess = _NUMBER.search(message["content"] or "")
        text, reward, done = self._compare(int(guess[0]) if guess else None)
        return (None if done else text), reward, done


class GuessTool(_Game):
    """The same game as `guess`, but the policy guesses by calling a tool."""

    def guess(self, number: int) -> Answer:
        """Compare a number with the hidden one.

        Args:
            number: The number that you guess.
        """
        return Answer(*self._compare(number))
