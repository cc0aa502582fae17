"""Finds the images and videos of a row, and the places in its messages where they stand.

verl: the texts of messages hold the marks `<image>` and `<video>`, which stand in order for the items of the columns
`images` and `videos`. Hugging Face and TRL: contents are lists of parts, and a part of the type `image` holds its image
or stands for the next one of the column. If the messages have no place for the column's images, these stand before the
first text of the user, as in TRL's `prepare_multimodal_messages`.

Images are found here, and decoded by `image_files.py`.
"""

import re
from dataclasses import dataclass
from typing import Any

from spmdrl.data.row_columns import RowError, kind_of, listed

MARKS = {"<image>": "image", "<video>": "video"}
"""Mark in a text -> kind."""
HOLDERS = {
    "image": ("image", "image_url", "bytes", "path", "url", "base64"),
    "video": ("video", "video_url", "frames", "bytes", "path", "url", "base64"),
}
"""Kind -> keys of a part that hold its image or video. A part without any stands for the next one of the column."""
TYPES = {"text": "text", "image": "image", "image_url": "image", "video": "video", "video_url": "video"}
"""Type of a part -> kind. A part without a type has that of its first key here."""
OTHER = "image"
"""Column with the images of a row that has no column `images`."""
RANKS = {"image": 3, "video": 4}
"""Kind -> dimensions of an array that holds one item: [H, W, colors] or [frames, H, W, colors]."""
FILES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif", ".jp2")
"""Endings of a text in the column `image` that make it a path. Rows of agents name a container's image there."""


@dataclass(frozen=True)
class Illustrated:
    """The messages of a row, and the images and videos that stand in them, not yet decoded."""

    messages: list[dict]
    """If there are images or videos, each content is a list of {"type": "text", "text": ...}, {"type": "image"} and
    {"type": "video"}. Otherwise, texts are unchanged."""
    images: list[Any]
    """Sources for `image_files.decode`, one for each {"type": "image"}, in order."""
    videos: list[Any]
    """The videos as the row holds them, one for each {"type": "video"}, in order."""


@dataclass
class _Place:
    """A place of an image or video in a content."""

    kind: str
    source: Any = None
    """The image or video; until places are filled, None stands for the next one of the column."""


def illustrated(row: dict, messages: list[dict], images: str = "images", videos: str = "videos") -> Illustrated:
    """Return a row's messages in one form, with the images and videos that stand in them.

    images, videos: column names; an empty name stands for no column. A row without the column `images` may have its
    images in the column `image`, and likewise `video`. Marks in an assistant's text stand for nothing, and are refused
    if a column has items for them. `<video>` is also an element of HTML, and a mark only if the row has a column of
    images or videos.

    The row and the messages are not changed. Raises RowError if the numbers of places and of images differ, or if a
    content is malformed.
    """
    given = {"image": _items(row, images, "image", True), "video": _items(row, videos, "video", True)}
    contents = [_content(i, message, given) for i, message in enumerate(messages, 1)]
    if given["image"] and not _places(contents):
        _put_first(messages, contents, len(given["image"]))
    for kind, name in (("image", images), ("video", videos)):
        _fill(kind, name, [place for place in _places(contents) if place.kind == kind], given[kind], row)
    places = _places(contents)
    if not places:
        # A table gives each part the keys of all parts, and templates look whether a part has the key `image`.
        return Illustrated([_with(m, _clean(m.get("content"))) for m in messages], [], [])
    sources = {kind: [place.source for place in places if place.kind == kind] for kind in RANKS}
    out = [_with(message, _formed(content)) for message, content in zip(messages, contents, strict=True)]
    return Illustrated(out, sources["image"], sources["video"])


def has_items(row: dict, images: str = "images", videos: str = "videos", text_only: bool = False) -> bool:
    """Return True if a row's columns hold images or videos. Arguments as in `illustrated`.

    text_only: a text in the column `image` counts only if it looks like the name of an image file, because rows of
    agents name the image of a container there.
    """
    return any(_items(row, name, kind, not text_only) for name, kind in ((images, "image"), (videos, "video")))


def _items(row: dict, name: str, kind: str, texts: bool) -> list | None:
    """Return the images or videos in a column, or None if the row has no such column.

    texts: whether any text in the column `image` is the path of an image.
    """
    if not name:
        return None
    value, one = row.get(name), RANKS[kind]
    if value is not None and name == f"{kind}s" and row.get(kind) is not None:
        other = row[kind]
        if not isinstance(other, str) or _is_image_file(other):
            raise RowError(f"both of its columns {name!r} and {kind!r} hold {kind}s: leave one of them out")
    if value is None and name == f"{kind}s":
        value = row.get(kind)
        if isinstance(value, str) and not texts and not _is_image_file(value):
            return None
        if kind == "video" and value is not None:
            return [value]
    if value is None:
        return None
    several = isinstance(value, list | tuple) or getattr(value, "ndim", one) != one
    return list(value) if several else [value]


def _is_image_file(text: str) -> bool:
    return text.lower().endswith(FILES) or text.lower().startswith(("data:", "http://", "https://", "file:"))


def _content(i: int, message: dict, given: dict[str, list | None]) -> list | None:
    """Return the parts of message `i`: texts and places; None if it has no content. given: kind -> items of the row."""
    content = listed(message.get("content"))
    if content is None:
        return None
    if isinstance(content, list):
        return [_part(f"part {j} of message {i}", part) for j, part in enumerate(content, 1)]
    if not isinstance(content, str):
        raise RowError(f"the content of message {i} is {kind_of(content)}, not text or a list of parts")
    counted = {m: kind for m, kind in MARKS.items() if kind == "image" or any(g is not None for g in given.values())}
    if message.get("role") == "assistant":
        if wrong := [mark for mark, kind in counted.items() if mark in content and given[kind]]:
            raise RowError(
                f"message {i} (assistant) has the mark {wrong[0]}: images and videos stand in the messages of the "
                "user, the system or a tool; remove the mark"
            )
        return [content]
    pieces = re.split(f"({'|'.join(counted)})", content)
    return [_Place(counted[piece]) if piece in counted else piece for piece in pieces if piece]


def _part(where: str, part: Any) -> str | _Place:
    """Return one part of a content as text or a place. where: words for error messages."""
    if not isinstance(part, dict):
        raise RowError(f"{where} is {kind_of(part)}, not an object with a type")
    part = _clean(part)
    given = part.get("type", next((key for key in TYPES if key in part), None))
    kind = TYPES.get(given) if isinstance(given, str) else None
    if kind is None:
        raise RowError(f"{where} has the type {given!r}; known types are {', '.join(TYPES)}")
    if kind != "text":
        source = {key: value for key, value in part.items() if key != "type"}
        return _Place(kind, source if source.keys() & {*HOLDERS[kind]} else None)
    if not isinstance(part.get("text"), str):
        raise RowError(f"{where} is a text without text: its 'text' is {kind_of(part.get('text'))}")
    return part["text"]


def _put_first(messages: list[dict], contents: list[list | None], count: int) -> None:
    """Put places of images before the first content of the user, if it is text."""
    for message, content in zip(messages, contents, strict=True):
        if message.get("role") == "user" and content is not None:
            if isinstance(message["content"], str):
                content[:0] = [_Place("image") for _ in range(count)]
            return


def _fill(kind: str, name: str, places: list[_Place], items: list | None, row: dict) -> None:
    """Fill the open places with the items of the column. Raises RowError if their numbers differ."""
    places, items = [place for place in places if place.source is None], items or []
    if len(places) != len(items):
        mark = next(mark for mark, each in MARKS.items() if each == kind)
        raise RowError(
            f"its messages have {len(places)} places for {kind}s of a column (the mark {mark} in a text, or a part of "
            f"the type {kind!r} that holds none), and the column {name!r} has {len(items)}: the numbers must agree; "
            f"the row's columns are {', '.join(map(str, row)) or 'none'}"
        )
    for place, item in zip(places, items, strict=True):
        place.source = item


def _places(contents: list[list | None]) -> list[_Place]:
    return [part for content in contents for part in content or () if isinstance(part, _Place)]


def _formed(content: list | None) -> list | None:
    """Return a content's parts as chat templates read them, without empty texts."""
    if content is None:
        return None
    return [{"type": p.kind} if isinstance(p, _Place) else {"type": "text", "text": p} for p in content if p]


def _clean(value: Any) -> Any:
    """Remove keys whose value is None from a part, or from each part of a list."""
    value = listed(value)
    if isinstance(value, list):
        return [_clean(part) for part in value]
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _with(message: dict, content: Any) -> dict:
    return message if content is None else {**message, "content": content}
