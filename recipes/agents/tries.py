"""A custom environment: `--env recipes/agents/tries.py:Tries`.

The class needs no base class and no registration. Each episode creates its own object, in a worker process of the rank.
"""


class Tries:
    """Asks the question of the row. After a wrong answer it shows the right letters, and x for the wrong ones."""

    timeout_s = 5.0

    def __init__(self, tries: int = 3):
        self.tries = tries

    def reset(self, row: dict, seed: int) -> None:
        """Begin an episode. Return None to start with the row's prompt, else messages or the text of a user message."""
        self.truth, self.used = row["answer"], 0

    def step(self, message: dict) -> tuple[str | None, float | None, bool]:
        """Answer a turn of the policy. Return the next message or None, the reward of this turn or None, and done."""
        self.used += 1
        guess = message["content"].strip().ljust(len(self.truth))
        if guess == self.truth or self.used == self.tries:
            return None, float(guess == self.truth), True
        return "".join(a if a == b else "x" for a, b in zip(guess, self.truth, strict=False)) + "=", None, False

    def reward(self) -> dict:
        """Return the reward at the end of the episode, which is added to those of its turns.

        `score` is the reward. Other numbers are logged as parts of the reward.
        """
        return {"score": 0.0, "tries": self.used}

    def state(self) -> dict:
        """Return the state for `restore`, as JSON values. Without both methods a resumed episode repeats its turns."""
        return {"used": self.used}

    def restore(self, state: dict) -> None:
        """Continue from a state, after a reset with the same row and seed."""
        self.used = state["used"]
