"""Puts the images of a row into its prompt: finds them, and expands their placeholders in the prompt's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spmdrl.data.images import illustrated
from spmdrl.data.row_columns import RowError, strings
from spmdrl.spmd.payload import Payload


class Reader(Protocol):
    """Reads images for one model (`session/image_reader.py`)."""

    mark: str
    """Text of the placeholder token."""

    def read(self, sources: Sequence[Any], folder: str) -> list[Payload]:
        """Return the payloads of a row's images. Raises RowError if an image cannot be used."""
        ...

    def expand(self, ids: Any, images: Sequence[Payload]) -> Any:
        """Return the result of `hub.expand.expand`. Raises RowError if ids and images disagree."""
        ...


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt. Its pixels are read again when the prompt is sampled, so prompts need little memory."""

    source: Any
    """The image as its row holds it (`data/image_files.py`)."""
    folder: str
    """Folder from which relative paths start."""
    name: str
    """Name of the payload (`Payload.name`), which depends on the content."""
    at: int
    """Index of the image's first placeholder among the prompt's tokens, or -1 if an environment makes the tokens."""


def with_places(row: dict, messages: list[dict], column: str, mark: str) -> tuple[list[dict], list[Any]]:
    """Return a row's messages with parts of the type `image`, and the images as the row holds them.

    column: the column with images. mark: text of the placeholder token, which no message may contain.

    Raises RowError if the numbers of places and images differ, or if the row has a video.
    """
    found = illustrated(row, messages, column)
    if found.videos:
        raise RowError("it has a video, which is not read here: give its frames as images")
    check_marks(found.messages, mark)
    return found.messages, found.images


def check_marks(messages: list[dict], mark: str) -> None:
    """Raise RowError if a message contains `mark`, the text of the placeholder of images."""
    for number, message in enumerate(messages, 1):
        if any(mark in text for text in strings(message)):
            raise RowError(f"message {number} has the text {mark}, which stands for an image: remove it")


def expanded(
    reader: Reader, tokens: list[int], sources: Sequence[Any], folder: str
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return a prompt's expanded tokens and its images.

    tokens: as the chat template gives them, with one placeholder for each image. folder: as in `PromptImage`.

    Raises RowError if an image cannot be used, or if the template writes another number of placeholders.
    """
    payloads = reader.read(sources, folder)
    found = reader.expand(tokens, payloads)
    places = zip(sources, payloads, found.firsts, strict=True)
    return found.ids.tolist(), tuple(PromptImage(source, folder, image.name, at) for source, image, at in places)


def unplaced(reader: Reader, sources: Sequence[Any], folder: str) -> tuple[PromptImage, ...]:
    """Return the images of a prompt without tokens. Arguments and errors as for `expanded`."""
    payloads = reader.read(sources, folder)
    return tuple(PromptImage(each, folder, image.name, -1) for each, image in zip(sources, payloads, strict=True))
