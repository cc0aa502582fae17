"""Reads the images of rows for a model: decodes them, processes them once, and expands their placeholders."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmdrl.data.image_files import decode_all, name_of
from spmdrl.data.row_columns import RowError
from spmdrl.hub.expand import Expanded, expand
from spmdrl.hub.folder import plain_errors
from spmdrl.hub.images import load_processor, process_image
from spmdrl.hub.vision import Vision, read_vision, reads_images
from spmdrl.spmd.payload import Payload

LARGEST = 1 << 25
"""Maximum width times height of an image; larger ones are refused before they are decoded."""
KEPT = 256 << 20
"""Maximum number of bytes of pixels that a reader keeps for later rows with the same images."""


class ImageReader:
    """Reads images for one model. Images with equal pixels are processed once."""

    def __init__(self, folder: Path, vision: Vision):
        """Load the image processor of the model in `folder`. Raises ValueError if there is no usable one."""
        self.vision = vision
        self.processor = load_processor(folder, vision)
        self.known: OrderedDict[str, Payload] = OrderedDict()
        self.bytes = 0

    def read(self, sources: Sequence[Any], folder: str) -> list[Payload]:
        """Return the payloads of a row's images. folder: folder from which relative paths start.

        Raises RowError if an image cannot be decoded or processed.
        """
        out = []
        for number, image in enumerate(decode_all(sources, folder, LARGEST), 1):
            name = name_of(image)
            if (payload := self.known.get(name)) is None:
                try:
                    payload = self.known[name] = process_image(self.processor, image, self.vision)
                except ValueError as error:
                    raise RowError(f"image {number} cannot be processed for this model: {error}") from error
                self.bytes += payload.pixels.nbytes
            self.known.move_to_end(name)
            out.append(payload)
        while self.bytes > KEPT and len(self.known) > 1:
            self.bytes -= self.known.popitem(last=False)[1].pixels.nbytes
        return out

    def expand(self, ids: Any, images: Sequence[Payload]) -> Expanded:
        """Return the result of `hub.expand.expand`. Raises RowError instead of ValueError."""
        try:
            return expand(ids, images, self.vision)
        except ValueError as error:
            raise RowError(str(error)) from error


def image_reader(folder: Path, tokenizer: Any, trust_remote_code: bool) -> ImageReader | None:
    """Return the reader for the model in a folder, or None if the model reads text only.

    Raises ValueError if the model reads images, but its family or its image processor is not supported.
    """
    from transformers import AutoConfig

    with plain_errors(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    if not reads_images(config):
        return None
    return ImageReader(folder, read_vision(config, tokenizer))
