"""Finds the images in the values that environments and tools return, and encodes them as data URLs.

An image is a PIL image, or a part of a content: `{"type": "image", "image": ...}`, `{"type": "image_url", ...}`. The
part holds a PIL image, a uint8 array [H, W, 3], bytes, a path (relative to the working directory) or a data URL. PIL is
imported only if there is an image.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from spmdrl.data.images import HOLDERS, TYPES, illustrated
from spmdrl.env.base import BrokenError

PIXELS = 1 << 24
"""Maximum width times height of an image; an environment that shows a larger one fails."""
Part = dict[str, Any]


def parts_of(value: Any, exact: bool = False) -> list[Part] | None:
    """Return a value as a list of parts of the types `text` and `image`, or None if it is no content of this form.

    The value is a PIL image, or a list of texts, PIL images and parts, not of texts alone. exact: True if parts with
    text must have no other keys, for values that may as well be JSON.
    """
    if _is_pil(value):
        return [{"type": "image", "image": value}]
    if not isinstance(value, list | tuple) or all(isinstance(each, str) for each in value):
        return None
    parts = [_part(each, exact) for each in value]
    found = [part for part in parts if part is not None]
    return found if len(found) == len(parts) else None


def has_images(value: Any) -> bool:
    """Return True if messages, a message or a content shows an image."""
    if (parts := parts_of(value)) is not None:
        return any(part["type"] == "image" for part in parts)
    if isinstance(value, dict):
        return "role" in value and has_images(value.get("content"))
    return isinstance(value, list | tuple) and any(isinstance(each, dict) and has_images(each) for each in value)


def encoded(value: Any) -> Any:
    """Return messages, a message or a content in which each image is `{"type": "image", "image": data URL}`.

    Other values are returned unchanged. A file's bytes stay as they are; pixels are encoded as PNG. Raises BrokenError
    if an image cannot be decoded or has more than `PIXELS` pixels.
    """
    if (parts := parts_of(value)) is not None:
        return [part if part["type"] == "text" else {"type": "image", "image": _url(part)} for part in parts]
    if isinstance(value, dict) and "role" in value:
        return {**value, "content": encoded(value.get("content"))}
    if isinstance(value, list | tuple):
        return [encoded(each) if isinstance(each, dict) else each for each in value]
    return value


def parts_in(messages: Sequence[dict]) -> Iterator[Part]:
    """Yield the parts of all messages whose content is a list."""
    for message in messages:
        if isinstance(message.get("content"), list):
            yield from message["content"]


def with_images(messages: Sequence[dict], images: Iterable[dict]) -> list[dict]:
    """Return messages in which the parts with images have other keys. images: the keys of each part, in order."""
    out, left = [], iter(images)
    for message in messages:
        content: Any = message.get("content")
        if isinstance(content, list):
            content = [{"type": "image"} | next(left) if part["type"] == "image" else part for part in content]
            message = message | {"content": content}
        out.append(message)
    return out


def row_with_images(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as a run gives it to an environment: its images as data URLs, and in their places in the prompt.

    Raises ValueError if an image cannot be read, or if the numbers of places and images differ.
    """
    prompt = row.get("prompt") or ""
    found = illustrated(row, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    if not found.images:
        return row
    try:
        urls = [_url({"image": each}) for each in found.images]
    except BrokenError as e:
        raise ValueError(str(e)) from e
    return {**row, "images": urls, "prompt": with_images(found.messages, [{"image": url} for url in urls])}


def open_image(source: Any) -> Any:
    """Return an image as a PIL image in RGB: a data URL of `row["images"]`, or another form of an image.

    Raises BrokenError if it cannot be decoded.
    """
    from spmdrl.data.image_files import ImageError, decode

    try:
        return decode(source, "", PIXELS)
    except ImageError as e:
        raise BrokenError(str(e)) from e


def in_words(content: Any) -> str:
    """Return a message's content as text for people, with the size of each image in its place: `[image 64x48]`."""
    if not isinstance(content, list):
        return str(content or "")
    words = []
    for part in content:
        if part["type"] == "text":
            words.append(part["text"])
            continue
        try:
            image = open_image(part["image"])
            words.append(f"[image {image.width}x{image.height}]")
        except BrokenError as e:
            words.append(f"[image: {e}]")
    return " ".join(words)


def _is_pil(value: Any) -> bool:
    module = sys.modules.get("PIL.Image")  # without this module, no value is a PIL image
    return module is not None and isinstance(value, module.Image)


def _part(value: Any, exact: bool) -> Part | None:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if _is_pil(value):
        return {"type": "image", "image": value}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text" and isinstance(value.get("text"), str) and not (exact and len(value) > 2):
        return {"type": "text", "text": value["text"]}
    if not isinstance(kind, str) or TYPES.get(kind) != "image":
        return None
    held = {key: value[key] for key in HOLDERS["image"] if value.get(key) is not None}
    return {"type": "image"} | held if held else None


def _url(part: Part) -> str:
    from spmdrl.data.image_files import ImageError, data_url

    try:
        return data_url({key: value for key, value in part.items() if key != "type"}, "", PIXELS)
    except ImageError as e:
        raise BrokenError(str(e)) from e
