"""Images in the messages of a conversation: read once into payloads, and named in the messages.

In a `Reply` a message holds an image's data. The state of a conversation, which checkpoints save, holds its name
instead (`Payload.name`), which depends on the content alone: `{"type": "image", "name": ...}`. The segments of the
episode hold the payloads. Chat templates get `{"type": "image"}`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat

from spmdrl.data.segment import Shown
from spmdrl.env.base import Reply
from spmdrl.env.pictures import parts_in, with_images
from spmdrl.session.image_reader import ImageReader
from spmdrl.spmd.payload import Payload


def read_reply(reply: Reply, images: ImageReader | None, name: str) -> tuple[Reply, dict[str, Payload]]:
    """Return a reply whose messages name their images, and the payloads of these images by name.

    If an image cannot be read, or if `images` is None, because the run reads text only, the reply reports a failure.
    name: name of the environment.
    """
    held: dict[str, Payload] = {}
    try:
        messages, *replayed = [_named(each, images, held) for each in (reply.messages, *reply.replayed)]
    except ValueError as error:
        return replace(reply, failure=reply.failure or f"{name}: {error}"), {}
    return replace(reply, messages=messages, replayed=replayed), held


def _named(messages: list[dict], images: ImageReader | None, held: dict[str, Payload]) -> list[dict]:
    """Return messages that name their images, and add the payloads to `held`. Raises ValueError, see `read_reply`."""
    sources = [part["image"] for part in parts_in(messages) if part["type"] == "image"]
    if not sources:
        return messages
    if images is None:
        raise ValueError(
            "it shows an image, and this run reads text only because of its model, engine or another setting: change "
            "that (docs/vision.md), or take an environment without images"
        )
    payloads = images.read(sources, "")
    held |= {payload.name: payload for payload in payloads}
    return with_images(messages, [{"name": payload.name} for payload in payloads])


def expanded(reader: ImageReader, tokens: list[int], images: Sequence[Payload]) -> tuple[list[int], Shown]:
    """Return the expanded tokens of messages and the images that they show.

    images: the images of the messages, in order. Raises ValueError if the chat template does not write one placeholder
    for each of them.
    """
    found = reader.expand(tokens, images)
    return found.ids.tolist(), tuple(zip(found.firsts, images, strict=True))


def names_in(messages: Sequence[dict]) -> list[str]:
    """Return the names of the images in messages that name them, in order."""
    return [part["name"] for part in parts_in(messages) if part["type"] == "image"]


def bare(messages: Sequence[dict]) -> list[dict]:
    """Return messages for a chat template: each image is `{"type": "image"}`."""
    return with_images(messages, repeat({}))
