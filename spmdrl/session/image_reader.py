"""Reads the images of rows for a model: decodes them, processes them once, and expands their placeholders."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from spmdrl.data.image_files import data_url, decode_all, name_of
from spmdrl.data.prompt_images import PromptImage
from spmdrl.data.row_columns import RowError
from spmdrl.data.segment import Shown
from spmdrl.health.status import tick
from spmdrl.hub.build import sees_images
from spmdrl.hub.expand import Expanded, expand
from spmdrl.hub.folder import read_config
from spmdrl.hub.images import load_processor, process_image
from spmdrl.hub.resolve import resolve
from spmdrl.hub.vision import Vision, read_vision
from spmdrl.spmd.payload import Payload

LARGEST = 1 << 25
"""Maximum width times height of an image; larger ones are refused before they are decoded."""
KEPT = 256 << 20
"""Maximum number of bytes of pixels that a reader keeps for later rows with the same images."""


class ImageReader:
    """Reads images for one model. Images with equal pixels are processed once."""

    def __init__(self, folder: Path, vision: Vision, mark: str):
        """Store the arguments. folder: folder of the model. mark: text of the placeholder token."""
        self.folder, self.vision, self.mark = folder, vision, mark
        self.last: tuple[Sequence[PromptImage], Shown] = (), ()
        self.last_urls: tuple[Sequence[PromptImage], list[str]] = (), []
        self.known: OrderedDict[str, Payload] = OrderedDict()
        self.bytes = 0

    @cached_property
    def processor(self) -> Any:
        """The image processor of the model, loaded at the first image. Raises ValueError if there is no usable one."""
        return load_processor(self.folder, self.vision)

    def read(self, sources: Sequence[Any], folder: str) -> list[Payload]:
        """Return the payloads of a row's images. folder: folder from which relative paths start.

        Raises RowError if an image cannot be decoded or processed, and ValueError if the model has no usable image
        processor.
        """
        out, processor = [], self.processor if len(sources) else None
        for number, image in enumerate(decode_all(sources, folder, LARGEST), 1):
            tick()
            name = name_of(image)
            if (payload := self.known.get(name)) is None:
                try:
                    payload = self.known[name] = process_image(processor, image, self.vision)
                except ValueError as error:
                    raise RowError(f"image {number} cannot be processed for this model: {error}") from error
                self.bytes += payload.pixels.nbytes
            self.known.move_to_end(name)
            out.append(payload)
        while self.bytes > KEPT and len(self.known) > 1:
            self.bytes -= self.known.popitem(last=False)[1].pixels.nbytes
        return out

    def read_again(self, images: Sequence[PromptImage]) -> Shown:
        """Return the payloads of a prompt's images, with the indices of their first placeholders.

        The samples of a prompt are opened one after another, so the last result is kept.

        Raises ValueError if an image cannot be read any more, or has changed since the prompts were loaded.
        """
        if not images:
            return ()
        if self.last[0] is images:
            return self.last[1]
        found = [payload for each in images for payload in self.read([each.source], each.folder)]
        for each, payload in zip(images, found, strict=True):
            if each.name != payload.name:
                raise ValueError(
                    f"the image {each.source!r:.200} has changed since the prompts were loaded: start again"
                )
        self.last = images, tuple((each.at, payload) for each, payload in zip(images, found, strict=True))
        return self.last[1]

    def urls(self, images: Sequence[PromptImage]) -> list[str]:
        """Return a prompt's images as data URLs, for its environment. Raises ValueError as `read_again` does."""
        if images and self.last_urls[0] is not images:
            self.read_again(images)
            self.last_urls = images, [data_url(each.source, each.folder, LARGEST) for each in images]
        return self.last_urls[1] if images else []

    def expand(self, ids: Any, images: Sequence[Payload]) -> Expanded:
        """Return the result of `hub.expand.expand`.

        Raises RowError if ids do not have one placeholder for each image, or if they are expanded already.
        """
        count = int((torch.as_tensor(ids) == self.vision.image).sum())
        if count != len(images):
            raise RowError(
                f"its text has {count} placeholders for images, and its messages show {len(images)} images: the chat "
                f"template must write one for each (--data.chat-template), and the text {self.mark} must not stand "
                "anywhere else, as in a row or --data.system"
            )
        try:
            return expand(ids, images, self.vision)
        except ValueError as error:
            raise RowError(str(error)) from error


def image_reader(folder: Path, tokenizer: Any, trust_remote_code: bool) -> ImageReader | None:
    """Return the reader for the model in a folder, or None if the model, or spmdrl with its family, reads text only.

    tokenizer: None to compare models only; nothing can then be expanded.
    """
    config = read_config(folder, trust_remote_code)
    if not sees_images(config):
        return None
    vision = read_vision(config, tokenizer)
    return ImageReader(folder, vision, str(tokenizer.convert_ids_to_tokens(vision.image)) if tokenizer else "")


def check_same_images(path: str, folder: Path, trust_remote_code: bool, flag: str) -> None:
    """Check that a frozen model reads images as the trained one does, since both get the same pixels and tokens.

    path: the frozen model. folder: folder of the trained model. flag: name of the setting with the path.

    Raises ValueError if both read images and their families, tokens or image processors differ.
    """
    other = resolve(path, trust_remote_code)
    mine, theirs = (image_reader(each, None, trust_remote_code) for each in (folder, other))
    if not mine or not theirs:
        return
    same = mine.vision == theirs.vision and mine.processor.to_dict() == theirs.processor.to_dict()
    if not same:
        raise ValueError(
            f"{flag} {path}: it reads images in another way than the trained model (tokens, sizes or "
            "preprocessor_config.json differ), and both get the same pixels: take a model of the same family and sizes"
        )
