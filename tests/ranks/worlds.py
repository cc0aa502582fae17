"""Environments of tests: games over turns that the demo's untrained policy plays with its few tokens."""

import os
import random
import time

from spmdrl.env import History


class Echoes:
    """Answers the first letter of a message with a letter drawn by seed and turn; 0.25 for each vowel, 1 for an `e`."""

    def __init__(self, turns: int = 3, uneven: bool = False, pause: float = 0.0):
        self.most, self.uneven, self.pause = turns, uneven, pause

    def reset(self, row, seed):
        self.seed, self.turn = seed, 0
        self.turns = 1 + seed % self.most if self.uneven else self.most
        return "say:"

    def step(self, message):
        time.sleep(self.pause)
        self.turn += 1
        first = next((c for c in message["content"] if c.isalpha()), "a")
        drawn = random.Random(f"{self.seed} {self.turn} {first}").choice("abcdefghij")
        return f"{drawn}{first}=", 0.25 * (first in "aeiou"), self.turn >= self.turns

    def reward(self):
        return {"score": 1.0 if self.turn % 2 else 0.5, "odd": self.turn % 2}


class Counts(Echoes):
    """The same, and it can be saved."""

    def state(self):
        return {"turn": self.turn}

    def restore(self, state):
        self.turn = state["turn"]


class Sums(Echoes):
    """After every second turn a short history takes the place of the long one; its state is the letter it drew."""

    drawn = ""

    def step(self, message):
        text, reward, done = super().step(message)
        self.drawn = text[0]
        if self.turn % 2:
            return text, reward, done
        told = [
            {"role": "user", "content": "sum:"},
            {"role": "assistant", "content": self.drawn},
            {"role": "user", "content": text},
        ]
        return History(told), reward, done

    def state_key(self):
        return self.drawn


class Breaks(Echoes):
    """Its second turn fails for one seed of four, by an error or by the end of its process."""

    def step(self, message):
        if self.turn == 1 and self.seed % 8 == 3:
            raise RuntimeError("it is broken")
        if self.turn == 1 and self.seed % 8 == 1:
            os._exit(3)
        return super().step(message)


class Slow(Echoes):
    """A turn takes a moment that depends on the seed, and one seed of eight hangs."""

    timeout_s = 0.5

    def step(self, message):
        time.sleep(60 if self.turn == 1 and self.seed % 8 == 3 else 0.02 * (self.seed % 3))
        return super().step(message)
