"""Decodes the images of rows to RGB, and names them by their content.

An image is given as a path, encoded bytes, a data URL, a PIL image, a uint8 array, or a dict with one of the KEYS.
"""

import base64
import binascii
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from spmdrl.data.row_columns import RowError, kind_of

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
"""Formats that are decoded. Pillow has others, but rows come from outside, and one of those starts other programs (EPS)
and some decode more pixels than their header states (ICO)."""
KEYS = ("bytes", "image", "path", "url", "base64", "image_url")
"""Keys of a dict that hold an image, in the order in which they are read: `datasets` writes a path beside the bytes."""
UNREAD = (
    *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
    *("sample_fps", "raw_fps"),
)
"""Keys with which qwen_vl_utils changes the pixels or positions of a single image or video; they are refused."""


class ImageError(RowError):
    """An image or video of a row cannot be used; the message gives the reason."""


def decode(source: Any, folder: str | Path, max_pixels: int) -> Image.Image:
    """Decode an image to RGB, turned as its EXIF data says, and without its alpha channel, which is put on white.

    folder: folder that relative paths start from, which is that of the row's file. max_pixels: largest width times
    height; an encoded image's header is checked before its pixels are decoded. Of an animation, the first frame is
    decoded. The source is not changed. Raises ImageError.
    """
    found = _inner(source)
    if isinstance(found, str):
        found = _of_text(found, Path(folder))
    name = "the image" if not isinstance(found, Path) else f"the image {str(found)!r}"
    try:
        if isinstance(found, Image.Image):
            return _rgb(found, name, max_pixels)
        if isinstance(found, np.ndarray):
            return _rgb(_of_array(found), name, max_pixels)
        if not isinstance(found, Path | bytes):
            raise ImageError(
                f"{name} is {kind_of(found)}: give a path, bytes, a data URL, a PIL image or a uint8 array [H, W, 3]"
            )
        with open(found, "rb") if isinstance(found, Path) else io.BytesIO(found) as file:
            return _rgb(Image.open(file, formats=FORMATS), name, max_pixels)
    except (ImageError, MemoryError):
        raise
    except UnidentifiedImageError as e:
        raise ImageError(
            f"{name} is damaged, or not an image of a format that is read here ({', '.join(FORMATS)})"
        ) from e
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise ImageError(f"{name} has too many pixels for Pillow ({e}): make it smaller") from e
    except Exception as e:  # decoders raise errors of many types for damaged files
        raise ImageError(f"{name} cannot be decoded ({type(e).__name__}: {e}): replace it, or remove the row") from e


def decode_all(sources: Sequence[Any], folder: str | Path, max_pixels: int) -> Iterator[Image.Image]:
    """Decode the images of a row like `decode`, one at a time. The message of an ImageError numbers the image."""
    for number, source in enumerate(sources, 1):
        try:
            yield decode(source, folder, max_pixels)
        except ImageError as e:
            raise ImageError(f"image {number} of {len(sources)}: {e}") from e


def data_url(source: Any, folder: str | Path, max_pixels: int) -> str:
    """Return an image as a data URL, which `decode` reads to the same pixels.

    A data URL is returned unchanged, an encoded image keeps its bytes, and pixels are encoded as PNG. Arguments and
    errors as for `decode`.
    """
    image, found = decode(source, folder, max_pixels), _inner(source)
    if isinstance(found, str) and found[:5].lower() == "data:":
        return found
    if isinstance(found, str):
        found = _of_text(found, Path(folder))
    kind, raw = "image/png", found.read_bytes() if isinstance(found, Path) else found
    if isinstance(raw, bytes):
        kind = Image.open(io.BytesIO(raw), formats=FORMATS).get_format_mimetype() or kind
    else:
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        raw = file.getvalue()
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def name_of(image: Image.Image) -> str:
    """Return the name of a decoded image: the SHA-256 of its size and RGB bytes, 64 hexadecimal digits."""
    assert image.mode == "RGB", image.mode
    digest = hashlib.sha256(f"{image.width}x{image.height}:".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def _check_keys(given: dict) -> None:
    if unread := [key for key in UNREAD if given.get(key) is not None]:
        raise ImageError(
            f"the row sets {', '.join(unread)} for one image or video, which is not read here: resize it in the file, "
            "and remove these keys"
        )


def _inner(source: Any) -> Any:
    """Return the path, text, bytes, PIL image or array of a source. Raises ImageError if a dict holds none of them."""
    while isinstance(source, dict):
        _check_keys(source)
        key = next((key for key in KEYS if source.get(key) is not None), None)
        if key is None:
            keys = ", ".join(map(str, source)) or "none"
            raise ImageError(f"the image is a dict without an image (its keys: {keys}): one of {', '.join(KEYS)}")
        source = source[key]
        if key == "bytes" and isinstance(source, str):
            raise ImageError("the bytes of the image are text: give text in base64 under the key 'base64'")
        if key == "base64" and isinstance(source, str) and not source.startswith("data:"):
            return _of_base64(source)
    if isinstance(source, os.PathLike):
        return os.fspath(source)
    return bytes(source) if isinstance(source, bytearray | memoryview) else source


def _of_text(text: str, folder: Path) -> Path | bytes:
    """Return the file of a path or file URL, or the bytes of a data URL."""
    scheme = text[:16].partition(":")[0].lower()
    if scheme == "data":
        head, _, body = text.partition(",")
        if not head.lower().endswith(";base64"):
            raise ImageError(f"the data URL {text[:40]!r} is not in base64: data:image/png;base64,...")
        return _of_base64(body)
    if scheme == "file":
        text = unquote(text[len("file:") :].removeprefix("//"))
    elif "://" in text[:16]:
        raise ImageError(
            f"the image {text[:120]!r} is on the network, and nothing is downloaded here: download it first, and give "
            "the path of the file"
        )
    # Joining keeps absolute paths. `isfile` is False for pipes and devices, which could block or never end.
    path = folder / os.path.expanduser(text)
    if not os.path.isfile(path):
        where = f"{str(path)[:200]!r}"
        raise ImageError(f"there is no image file {where}: relative paths start from the folder of the row's file")
    return path


def _of_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as e:
        raise ImageError(f"the image {text[:20]!r}... is not base64 ({e})") from e


def _of_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (3, 4):
        raise ImageError(
            f"the image is an array of {array.dtype} with the shape {list(array.shape)}: give uint8 [H, W, 3] or "
            "[H, W, 4]"
        )
    if not array.size:
        raise ImageError(f"the image is empty: its size is {array.shape[1]} x {array.shape[0]}")
    return Image.fromarray(array)


def _check_size(width: int, height: int, name: str, max_pixels: int) -> None:
    if not width or not height:
        raise ImageError(f"{name} is empty: its size is {width} x {height}")
    if width * height > max_pixels:
        raise ImageError(
            f"{name} has {width} x {height} = {width * height:,} pixels, and at most {max_pixels:,} are decoded: make "
            "it smaller"
        )


def _rgb(image: Image.Image, name: str, max_pixels: int) -> Image.Image:
    """Return an opened image in RGB, as a new image. name: words for error messages."""
    _check_size(image.width, image.height, name, min(max_pixels, Image.MAX_IMAGE_PIXELS or max_pixels))
    mode, form = image.mode, image.format
    image.load()
    image = ImageOps.exif_transpose(image)
    if mode.startswith("I;16") or (mode == "I" and form == "PPM"):
        # Pillow would clip these values to 255, although their range is 0 to 65535.
        levels = (np.asarray(image).astype(np.uint32) + 128) // 257
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    if mode in ("I", "F"):
        raise ImageError(f"{name} holds numbers of 32 bits without a known range (mode {mode}): convert it to 8 bits")
    if image.has_transparency_data:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return image.convert("RGB")
