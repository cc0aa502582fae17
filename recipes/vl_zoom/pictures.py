"""Draws pictures with a small word in them, which cannot be read once the picture is reduced.

    python recipes/vl_zoom/pictures.py [--out runs/vl_zoom] [--rows 2048] [--held-out 128] [--side 896]

Writes `train.jsonl` and `test.jsonl`, with the columns `prompt`, `images` and `answer`, and their pictures.
"""

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
"""Letters of the words, without I and O, which look like digits."""
QUESTION = (
    "<image>A word of four letters is written somewhere in this picture, in a white box that is too small to read. "
    "Use the tool zoom to look closer. Then give the word as the last word of your answer."
)


def draw(seed: int, side: int) -> tuple[Image.Image, str, tuple[int, int, int, int]]:
    """Return a square picture, the word in it, and the white box around the word: left, top, right, bottom."""
    rng = random.Random(seed)
    picture = Image.new("RGB", (side, side), "#dddddd")
    pen = ImageDraw.Draw(picture)
    for _ in range(12):
        x, y, size = rng.randrange(side), rng.randrange(side), rng.randrange(side // 16, side // 6)
        shape = rng.choice((pen.ellipse, pen.rectangle))
        shape((x - size, y - size, x + size, y + size), fill=tuple(rng.randrange(40, 220) for _ in range(3)))
    word = "".join(rng.choice(LETTERS) for _ in range(4))
    x, y = rng.randrange(8, side - 48), rng.randrange(8, side - 24)
    box = x - 4, y - 2, x + 34, y + 14
    pen.rectangle(box, fill="white")
    pen.text((x, y), word, fill="black")
    return picture, word, box


def write(out: Path, name: str, seeds: range, side: int) -> Path:
    """Write `NAME.jsonl` and its pictures, and return the file."""
    (out / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for seed in seeds:
        picture, word, _ = draw(seed, side)
        picture.save(out / name / f"{seed}.png")
        lines.append(json.dumps({"prompt": QUESTION, "images": [f"{name}/{seed}.png"], "answer": word}))
    file = out / f"{name}.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/vl_zoom"))
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--side", type=int, default=896, help="side of the pictures in pixels")
    args = parser.parse_args()
    print(write(args.out, "test", range(args.held_out), args.side))
    print(write(args.out, "train", range(args.held_out, args.held_out + args.rows), args.side))
