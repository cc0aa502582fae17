"""Packed batches with images of unlike sizes, for the tiny models of `vision_models.py`."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from spmdrl.data.batch import Batch
from spmdrl.data.placeholders import with_images
from spmdrl.hub.expand import expand
from spmdrl.hub.images import Payload, process_image
from spmdrl.hub.vision import Vision, read_vision
from tests.unit import vision_models

Row = tuple[list[str], tuple[int, ...], int]
"""Texts around the images of a prompt, the numbers of its images, and the length of its response."""
ROWS: list[Row] = [
    (["look ", " what?"], (0,), 3),
    (["look ", " what?"], (0,), 5),
    (["two ", " and ", " which?"], (1, 0), 4),
    (["two ", " and ", " which?"], (1, 0), 2),
    (["no image"], (), 4),
    (["no image"], (), 3),
    (["look ", " what?"], (2,), 3),
]
"""Groups of samples of one prompt with 0, 1 and 2 images; the last prompt differs from the first only in its image."""


@cache
def facts(family: str) -> tuple[Vision, list[Payload]]:
    """Facts of a family, and three of its images."""
    vision = read_vision(vision_models.config(family), vision_models.tokenizer())
    processor = vision_models.image_processor(family)
    return vision, [process_image(processor, image, vision) for image in vision_models.images(3)]


def batch_of(family: str, rows: list[Row] | None = None, images: list[Payload] | None = None) -> Batch:
    """Packs rows, in which responses are random. images: another list of three images."""
    vision, found = facts(family)
    rows, images = ROWS if rows is None else rows, found if images is None else images
    rng, tokens, masks, seen = torch.Generator().manual_seed(1), [], [], []
    for texts, numbers, length in rows:
        row = tuple(images[i] for i in numbers)
        text = texts[0] + "".join(vision_models.image_text(family) + x for x in texts[1:])
        ids = vision_models.tokenizer()(text, add_special_tokens=False)["input_ids"]
        prompt, response = expand(ids, row, vision).ids, torch.randint(110, 300, (length,), generator=rng)
        tokens.append(torch.cat([prompt, response]))
        masks.append(torch.arange(len(tokens[-1])) >= len(prompt))
        seen.append(row)
    index, lengths = torch.arange(len(rows)), torch.tensor([len(x) for x in tokens], dtype=torch.int64)
    place = {"position": index, "sample": index * 0, "update": index * 0, "work": lengths}
    token = {"tokens": torch.cat(tokens), "mask": torch.cat(masks)}
    return with_images(Batch(lengths, token, place), seen, vision.image)


def save(family: str, folder: Path, **text: Any) -> str:
    """Writes a tiny model with its tokenizer and the settings of its image processor; returns the folder."""
    import json

    model = vision_models.tiny(family)
    for name, value in text.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    vision_models.tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(vision_models.processor_settings(family)))
    return str(folder)
