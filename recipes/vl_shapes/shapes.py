"""Draws images of coloured shapes, and asks which shape there is most of.

    python recipes/vl_shapes/shapes.py samples.png [--seed 0]

An image of 64 x 64 pixels shows two to thirteen circles, squares and triangles, each in a cell of its own of a 4 x 4
grid, moved, scaled and coloured at random. One kind has two to five shapes, and each other kind has fewer. The command
writes a picture of 24 images for a person to look at; `run.py` makes the data of the recipe.
"""

import argparse
import io
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

SIDE, CELLS, MOST = 64, 4, 5
"""Side of an image in pixels, cells of the grid along a side, and most shapes of a kind."""
ASKED = "<image>Which shape is there most of?"
KINDS, NONE = ("circle", "square", "triangle"), "none"
Colour = tuple[int, int, int]
COLOURS: Sequence[Colour] = (
    (214, 40, 40),
    (40, 160, 70),
    (45, 85, 215),
    (240, 200, 40),
    (150, 60, 180),
    (40, 190, 200),
)
ROUND = 4
"""Images are drawn this many times larger and then reduced, which smooths edges."""


def place(
    draw: ImageDraw.ImageDraw, kind: str, colour: tuple[int, int, int], x: float, y: float, radius: float
) -> None:
    """Draw a shape with its centre at (x, y); `radius` is half of its height, in pixels of `draw`."""
    box = (x - radius, y - radius, x + radius, y + radius)
    if kind == "circle":
        draw.ellipse(box, fill=colour)
    elif kind == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)], fill=colour)


@dataclass(frozen=True)
class Question:
    """An image, what it shows, and a question about it."""

    image: Image.Image
    cells: list[str]
    """Kind of the shape in each cell, row by row, or `none`."""
    text: str
    """The question, with the mark `<image>` before it."""
    answer: str


def picture(kinds: list[str], rng: random.Random) -> tuple[Image.Image, list[str]]:
    """Return an image with shapes of these kinds, in cells and colours of `rng`, and what each cell shows."""
    cell = SIDE * ROUND / CELLS
    image = Image.new("RGB", (SIDE * ROUND, SIDE * ROUND), (rng.randint(225, 255),) * 3)
    draw, cells = ImageDraw.Draw(image), [NONE] * CELLS * CELLS
    for kind, at in zip(kinds, rng.sample(range(CELLS * CELLS), len(kinds)), strict=True):
        radius = cell * rng.uniform(0.32, 0.44)
        free = cell / 2 - radius
        x, y = ((part + 0.5) * cell + rng.uniform(-free, free) for part in (at % CELLS, at // CELLS))
        place(draw, kind, rng.choice(COLOURS), x, y, radius)
        cells[at] = kind
    return image.resize((SIDE, SIDE), Image.Resampling.BOX), cells


def question(rng: random.Random) -> Question:
    """Draw an image with more shapes of one kind than of each other kind, and ask for this kind."""
    most, *others = rng.sample(KINDS, len(KINDS))
    count = rng.randint(2, MOST)
    kinds = [most] * count + [other for other in others for _ in range(rng.randint(0, count - 1))]
    return Question(*picture(kinds, rng), ASKED, most)


def questions(seed: str, count: int) -> Iterator[tuple[Question, dict]]:
    """Yield questions, each with the columns that its rows for SFT and RL share: the image as PNG."""
    rng = random.Random(seed)
    for _ in range(count):
        made, file = question(rng), io.BytesIO()
        made.image.save(file, "PNG")
        yield made, {"images": [{"bytes": file.getvalue()}]}


def dialogues(seed: int, count: int) -> Iterator[dict]:
    """Yield rows for `spmdrl.sft`."""
    for made, row in questions(f"sft {seed}", count):
        messages = [{"role": "user", "content": made.text}, {"role": "assistant", "content": made.answer}]
        yield {"messages": messages, **row}


def prompts(split: str, seed: int, count: int) -> Iterator[dict]:
    """Yield rows for `spmdrl.train` in verl's form. split: `train` or `eval`, which have other images."""
    for made, row in questions(f"{split} {seed}", count):
        truth = {"style": "rule", "ground_truth": made.answer}
        yield {"prompt": [{"role": "user", "content": made.text}], **row, "reward_model": truth}


def write(file: Path, rows: Iterable[dict]) -> Path:
    """Write rows as .parquet, and return the file."""
    pq.write_table(pa.Table.from_pylist(list(rows)), file, row_group_size=64)
    return file


def samples(seed: int, columns: int = 8, rows: int = 3) -> Image.Image:
    """Return a picture of held-out images, enlarged, each with its answer below."""
    side, below, gap = 2 * SIDE, 20, 12
    sheet = Image.new("RGB", (columns * (side + gap) - gap, rows * (side + below + gap) - gap), (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    for number, (made, _) in enumerate(questions(f"eval {seed}", columns * rows)):
        x, y = number % columns * (side + gap), number // columns * (side + below + gap)
        sheet.paste(made.image.resize((side, side), Image.Resampling.LANCZOS), (x, y))
        draw.text((x + side / 2, y + side + below / 2), made.answer, (0, 0, 0), anchor="mm")
    return sheet.quantize(64)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    samples(args.seed).save(args.file)
