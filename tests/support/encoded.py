"""What tests of several rooms share of `test_encode` and `test_input_image`."""

from __future__ import annotations

import struct
import zlib


def exif(*entries: tuple[int, int, int, bytes], order: str = "<", sub: bytes = b"") -> bytes:
    """An EXIF block of one table, (tag, type, count, four bytes), with `sub` behind it."""
    table = struct.pack(order + "H", len(entries))
    table += b"".join(struct.pack(order + "HHI", *entry[:3]) + entry[3] for entry in entries)
    head = b"II*\0" if order == "<" else b"MM\0*"
    return head + struct.pack(order + "I", 8) + table + struct.pack(order + "I", 0) + sub


def commented(comment: bytes, order: str = "<") -> bytes:
    """An EXIF block whose UserComment is `comment`."""
    at = 8 + 2 + 12 + 4
    inner = struct.pack(order + "HHHII", 1, 0x9286, 7, len(comment), at + 18) + bytes(4) + comment
    return exif((0x8769, 4, 1, struct.pack(order + "I", at)), order=order, sub=inner)


def jpeg(*segments: tuple[int, bytes]) -> bytes:
    """A JPEG up to where its pixels would be."""
    body = b"".join(struct.pack(">BBH", 0xFF, kind, len(data) + 2) + data for kind, data in segments)
    return b"\xff\xd8" + body + b"\xff\xda\0\x02"


def huge_png(side: int) -> bytes:
    """A file of a few bytes that claims to have `side` x `side` pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
