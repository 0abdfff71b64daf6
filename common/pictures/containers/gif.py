"""The first image of a GIF as a GIF of its own: Pillow would walk through all images, and join comments block by
block."""

from __future__ import annotations

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import OpenFile, bad

MAX_BLOCKS = 400_000  # blocks of pixels, of at most 255 bytes each: 36 megapixels are 220,000 full ones
MAX_OTHERS = 10_000  # blocks before and behind the pixels: texts, and data of other programs
_EXTENSION, _PICTURE, _END = 0x21, 0x2C, 0x3B
_CONTROL = 0xF9  # an extension that says which colour of the next image is transparent


class _Reader:
    """A place in a file, from which blocks are read."""

    def __init__(self, file: OpenFile) -> None:
        self.file, self.at, self.others = file, 0, 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes. Raises ModelError where there are fewer."""
        if self.at + count > self.file.size:
            raise bad(self.file.path, "is a GIF that ends before its pixels")
        self.at += count
        return self.file.read(self.at - count, count)

    def blocks(self, most: int, what: str) -> bytes:
        """Return the blocks up to the empty one. Raises ModelError where there are more than `most`."""
        data = bytearray()
        for _ in range(most):
            length = self.take(1)
            data += length
            if length == b"\0":
                return bytes(data)
            data += self.take(length[0])
        raise bad(
            self.file.path, f"is a GIF of more than {most:,} blocks{what}; save it anew with a program for pictures"
        )


def first_picture(file: OpenFile) -> tuple[bytes, bool]:
    """Return the first image of a GIF as a file, and whether another one follows. Raises ModelError."""
    reader = _Reader(file)
    head = reader.take(13)
    colors = reader.take(_table_bytes(head[10]))
    control = _next_picture(reader)
    if control is None:
        raise bad(file.path, "is a GIF without a picture")
    place = reader.take(9)
    body = place + reader.take(_table_bytes(place[8])) + reader.take(1) + reader.blocks(MAX_BLOCKS, " of pixels")
    try:
        several = _next_picture(reader) is not None
    except ModelError:  # nothing behind the first image is needed
        several = False
    return b"GIF89a" + head[6:] + colors + control + bytes([_PICTURE]) + body + bytes([_END]), several


def _next_picture(reader: _Reader) -> bytes | None:
    """Move to the next image. Return the control block before it, b"" if it has none, or None at the end of the
    file."""
    control = b""
    while (kind := reader.take(1)[0]) == _EXTENSION:
        label = reader.take(1)
        blocks = reader.blocks(MAX_OTHERS, "")
        reader.others += 1 + len(blocks) // 255
        if reader.others > MAX_OTHERS:
            raise bad(reader.file.path, f"is a GIF of more than {MAX_OTHERS:,} blocks before its pixels")
        if label[0] == _CONTROL:
            control = bytes([_EXTENSION]) + label + blocks
    if kind == _PICTURE:
        return control
    if kind == _END:
        return None
    raise bad(reader.file.path, f"is a broken GIF: no block at byte {reader.at - 1}")


def _table_bytes(flags: int) -> int:
    """Return the bytes of the table of colours that `flags` announces."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
