"""How many blocks a picture consists of, before Pillow walks through them.

It keeps each block of a JPEG, goes through empty ones by the million, and few bytes make many.

What is broken is left to Pillow, which says what is wrong with it.
"""

from __future__ import annotations

import struct

from qwenimg.common.base.safe_files import OpenFile, bad

MAX_BLOCKS = 10_000  # a picture has a few dozen
MAX_PIXEL_CHUNKS = 100_000  # of a PNG: 36 megapixels of 16 bits in the 8 kB that libpng writes are 27,000
MAX_SCANS = 200  # of a JPEG; the finest of its encoders make a few dozen. Each is a pass over all pixels, of few bytes
_WINDOW = 1 << 20  # bytes looked through at once
_PIXELS = (b"IDAT", b"fdAT", b"fcTL")
_ALONE = (0x01, *range(0xD0, 0xDA))  # markers of a JPEG without a length
_FRAMES = (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_FILLS = (0x00, 0xFF)


def check_png(file: OpenFile, end: int) -> None:
    """Raises ModelError where the chunks up to the byte `end` are too many."""
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
    """Whether a JPEG is made for more than one scan, so that its decoder keeps it whole.

    Raises ModelError where scans, or the segments before the first, are too many; each byte that is none counts as one.
    """
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
    """Counted by their marker, which pixels cannot hold: a 0xFF among them is followed by 0."""
    found = 0
    for at in range(begin, file.size, _WINDOW):
        found += file.read(at, min(_WINDOW + 1, file.size - at)).count(b"\xff\xda")
        _check(file, "JPEG", "scans", found, MAX_SCANS)
    return found


def _check(file: OpenFile, kind: str, what: str, found: int, most: int) -> None:
    if found > most:
        raise bad(file.path, f"is a {kind} of more than {most:,} {what}; save it anew with a program for pictures")
