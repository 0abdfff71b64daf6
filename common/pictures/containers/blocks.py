"""Limits on the number of blocks in an image file, checked before Pillow reads it.

Pillow keeps each block of a JPEG and walks through empty ones by the million, and many blocks fit into few bytes. A
broken file is left to Pillow, whose error says what is wrong with it.
"""

from __future__ import annotations

import struct

from qwenimg.common.base.safe_files import OpenFile, bad

MAX_BLOCKS = 10_000  # an image has a few dozen
MAX_PIXEL_CHUNKS = 100_000  # in a PNG: 36 megapixels of 16 bits in libpng's chunks of 8 kB are 27,000
MAX_SCANS = 200  # in a JPEG; encoders make a few dozen at most. A scan of few bytes is a pass over all pixels
_WINDOW = 1 << 20  # bytes searched at once
_PIXELS = (b"IDAT", b"fdAT", b"fcTL")
_ALONE = (0x01, *range(0xD0, 0xDA))  # markers of a JPEG without a length
_FRAMES = (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_FILLS = (0x00, 0xFF)


def check_png(file: OpenFile, end: int) -> None:
    """Raise ModelError if there are too many chunks up to the byte `end`."""
    at, blocks, pixels = 8, 0, 0
    while at + 12 <= end:
        length, name = struct.unpack(">I4s", file.read(at, 8))
        if name == b"IEND":
            return
        if name in _PIXELS:
            pixels += 1
        else:
            blocks += 1
        _check(file, "PNG", "chunks", blocks, MAX_BLOCKS)
        _check(file, "PNG", "chunks of pixels", pixels, MAX_PIXEL_CHUNKS)
        at += 12 + length


def check_bmp(file: OpenFile) -> None:
    """Raise ModelError for a run-length encoded BMP, which Pillow decodes in Python, run by run."""
    if file.size >= 34 and struct.unpack("<I", file.read(30, 4))[0] in (1, 2) and file.read(14, 1)[0] >= 40:
        raise bad(file.path, "is a BMP in run-length encoding; save it without, or as PNG")


def check_jpeg(file: OpenFile) -> bool:
    """Return whether a JPEG has several scans, or a first one without all colours, so that its decoder keeps it whole.
    Raises ModelError for too many scans, or segments before them; a byte that begins no segment counts as one."""
    at, blocks, colors = 2, 0, 0
    while at + 10 <= file.size:
        start, marker, length = struct.unpack(">BBH", file.read(at, 4))
        if start == 0xFF and marker == 0xDA:
            return _scans(file, at) > 1 or file.read(at + 4, 1)[0] < colors
        if start == 0xFF and marker in _FRAMES:
            colors = file.read(at + 9, 1)[0]
        blocks += 1
        _check(file, "JPEG", "segments", blocks, MAX_BLOCKS)
        if start != 0xFF or marker in _FILLS:
            at += 1
        else:
            at += 2 if marker in _ALONE else 2 + max(2, length)
    return False


def _scans(file: OpenFile, begin: int) -> int:
    """Count scans by their marker, which pixels cannot hold: a 0xFF among them is followed by 0."""
    count = 0
    for at in range(begin, file.size, _WINDOW):
        count += file.read(at, min(_WINDOW + 1, file.size - at)).count(b"\xff\xda")
        _check(file, "JPEG", "scans", count, MAX_SCANS)
    return count


def _check(file: OpenFile, kind: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise bad(file.path, f"is a {kind} of more than {most:,} {what}; save it anew with a program for pictures")
