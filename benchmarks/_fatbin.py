"""Removes device code for other GPUs from CUDA libraries, for `pack_vllm.py`.

The section `.nv_fatbin` of a library holds fat binaries, one for each compiled source file. A fat binary is a header of
16 bytes (magic number, version, size of the header as 16 bits, size of the rest as 64 bits) followed by images. An
image is machine code (cubin) or PTX for one architecture, with a header of its own: kind as 16 bits at byte 0 (1 for
PTX, 2 for a cubin), size of the header as 32 bits at 4, size of the body as 64 bits at 8, architecture as 32 bits at
28. The layout was read from libraries of CUDA 13; `cuobjdump` lists the same images of sm_90 before and after.

The library keeps its size and all addresses: each fat binary stays where it starts, keeps fewer images and is followed
by zeros. The loader takes the image that fits the GPU and never looks behind the last one.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"\x50\xed\x55\xba"
CUBIN = 2
SYMBOLS = (".symtab", ".strtab")
"""Sections for debuggers, which the dynamic linker does not read."""


@dataclass(frozen=True)
class Image:
    """One image of a fat binary: code for one architecture, such as 90 for H100."""

    kind: int
    arch: int
    data: bytes
    """Header and body."""


@dataclass
class Pruned:
    """A library without code for other architectures."""

    data: bytes
    fat_binaries: int = 0
    without: int = 0
    """Number of fat binaries that had no code for the architecture; their kernels cannot run on it."""
    kept: int = 0
    """Bytes of images of the architecture."""


def sections(library: bytes) -> dict[str, tuple[int, int]]:
    """Return offset and size of each section of a 64-bit little-endian ELF file by its name."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    rows = [struct.unpack_from("<I20xQQ", library, table + i * size) for i in range(count)]
    out = {}
    for name, offset, nbytes in rows:
        at = rows[names][1] + name
        out[library[at : library.index(b"\0", at)].decode()] = (offset, nbytes)
    return out


def fat_binaries(library: bytes, offset: int, size: int) -> Iterator[tuple[int, int, int, list[Image]]]:
    """Yield the header's start, the images' start and end, and the images of each fat binary in a range of bytes."""
    at, end = offset, offset + size
    while at < end:
        if library[at : at + 4] != MAGIC:
            at += 8  # There is padding between fat binaries.
            continue
        header, nbytes = struct.unpack_from("<HQ", library, at + 6)
        start, stop = at + header, at + header + nbytes
        if stop > end:
            raise ValueError(f"the fat binary at byte {at} is longer than its section")
        yield at, start, stop, list(_images(library, start, stop))
        at = stop


def _images(library: bytes, at: int, stop: int) -> Iterator[Image]:
    while at < stop:
        kind, header, body = struct.unpack_from("<H2xIQ", library, at)
        (arch,) = struct.unpack_from("<I", library, at + 28)
        after = at + header + body
        if after > stop or after % 8 or not header:
            raise ValueError(f"the image at byte {at} does not end inside its fat binary")
        yield Image(kind, arch, bytes(library[at:after]))
        at = after


def pruned(library: bytes, arch: int) -> Pruned:
    """Keep only machine code for one architecture, and replace symbols for debuggers by zeros.

    A fat binary without such code gets one small image of another architecture, so that none is empty. A call of its
    kernels fails with "no kernel image is available for execution on the device". PTX, which the driver could compile,
    is removed too.
    """
    out, found = bytearray(library), sections(library)
    for name in SYMBOLS:
        if name in found:
            offset, size = found[name]
            out[offset : offset + size] = bytes(size)
    result = Pruned(b"")
    if ".nv_fatbin" in found:
        parts = list(fat_binaries(library, *found[".nv_fatbin"]))
        others = [i.data for *_, images in parts for i in images if i.kind == CUBIN and i.arch != arch]
        for header, start, stop, images in parts:
            kept = [image.data for image in images if image.kind == CUBIN and image.arch == arch]
            result.fat_binaries += 1
            result.kept += sum(map(len, kept))
            if not kept:
                result.without += 1
                fitting = [data for data in others if len(data) <= stop - start]
                kept = [min(fitting, key=len)] if fitting else [image.data for image in images]
            data = b"".join(kept)
            out[start:stop] = data + bytes(stop - start - len(data))
            struct.pack_into("<Q", out, header + 8, len(data))
    result.data = bytes(out)
    return result
