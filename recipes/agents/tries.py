"""An environment of your own: `--env recipes/agents/tries.py:Tries`.

Nothing is inherited or registered. Each episode has an object of its own, in a process beside the rank's.
"""


class Tries:
    """Asks the question of the row, and shows after a wrong answer which of its letters are right, the others as x."""

    timeout_s = 5.0

    def __init__(self, tries: int = 3):
        self.tries = tries

    def reset(self, row: dict, seed: int) -> None:
        """Begin an episode. None: with the prompt of its row; else messages, or the text of a user's message."""
        self.truth, self.used = row["answer"], 0

    def step(self, message: dict) -> tuple[str | None, float | None, bool]:
        """Answer a turn of the policy: (what it sees next, the reward of this turn, whether the episode is over)."""
        self.used += 1
        guess = message["content"].strip().ljust(len(self.truth))
        if guess == self.truth or self.used == self.tries:
            return None, float(guess == self.truth), True
        return "".join(a if a == b else "x" for a, b in zip(guess, self.truth, strict=False)) + "=", None, False

    def reward(self) -> dict:
        """Grade the episode at its end, beside what its turns earned; further numbers are parts, which are logged."""
        return {"score": 0.0, "tries": self.used}

    def state(self) -> dict:
        """Return, as JSON, what `restore` needs; without the two methods a resumed episode is played again."""
        return {"used": self.used}

    def restore(self, state: dict) -> None:
        """Go on from a state, after a reset with the same row and seed."""
        self.used = state["used"]
