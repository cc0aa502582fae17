"""An environment that shows a small picture and lets the policy look closer: `--env recipes/vl_zoom/zoom.py:Zoom`.

Rows have a question in `prompt`, one picture in `images`, and the right word in `answer`; `pictures.py` draws them.
"""

import re
from typing import Any

from spmdrl.env import open_image

SCALE = 1000
"""The policy gives positions in thousandths of the picture's width and height."""


class Zoom:
    """Shows the row's picture reduced to few pixels. The tool `zoom` shows a part of it from the original pixels."""

    def __init__(self, side: int = 224, looks: int = 3):
        """Store the settings. side: longest side of a picture that is shown, in pixels. looks: maximum of zooms."""
        self.side, self.looks = side, looks

    def reset(self, row: dict, seed: int) -> list[dict]:
        """Return the row's prompt with the reduced picture in place of the picture."""
        self.picture, self.truth, self.used = open_image(row["images"][0]), str(row["answer"]), 0
        small = {"type": "image", "image": self._fitted(self.picture)}
        return [{**m, "content": [small if p["type"] == "image" else p for p in m["content"]]} for m in row["prompt"]]

    def zoom(self, x: int, y: int, w: int, h: int) -> Any:
        """Look closer at a part of the picture. The unit is a thousandth of the picture's width or height.

        Args:
            x: Left end of the part, from 0 to 1000.
            y: Upper end of the part, from 0 to 1000.
            w: Width of the part.
            h: Height of the part.
        """
        if self.used >= self.looks:
            return f"You have looked {self.looks} times already: answer."
        if not (0 <= x < SCALE and 0 <= y < SCALE and 0 < w <= SCALE - x and 0 < h <= SCALE - y):
            raise ValueError(
                f"the part must lie inside the picture: 0 <= x, x + w <= {SCALE}, and the same for y and h"
            )
        self.used += 1
        wide, high = self.picture.size
        box = x * wide // SCALE, y * high // SCALE, -(-(x + w) * wide // SCALE), -(-(y + h) * high // SCALE)
        return self._fitted(self.picture.crop(box), enlarge=True)

    def step(self, message: dict) -> tuple[None, float | None, bool]:
        """End the episode with the first message that calls no tool; its last word is the answer."""
        if message.get("tool_calls"):
            return None, None, False
        words = re.findall(r"\w+", message["content"].lower())
        return None, float(bool(words) and words[-1] == self.truth.lower()), True

    def reward(self) -> dict:
        """Return the number of zooms as a part of the reward; the score is the reward of the answer."""
        return {"score": 0.0, "looks": self.used}

    def state(self) -> dict:
        """Return the number of zooms; the picture comes from the row."""
        return {"used": self.used}

    def restore(self, state: dict) -> None:
        """Continue from a state, after a reset with the same row."""
        self.used = state["used"]

    def _fitted(self, picture: Any, enlarge: bool = False) -> Any:
        """Return a picture whose longer side is `side`, or shorter unless `enlarge` is set."""
        scale = self.side / max(picture.size)
        scale = scale if enlarge else min(scale, 1.0)
        return picture.resize([max(1, round(length * scale)) for length in picture.size])
