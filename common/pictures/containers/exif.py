"""The texts of an EXIF block: UserComment, and the two tags in which ComfyUI stores its graph.

Only these are read. A general reader follows every entry of a table, and a table of 64 kB can name a gigabyte.
"""

from __future__ import annotations

import struct
from pathlib import Path

from qwenimg.common.base.safe_files import bad

MAKE, MODEL, SUB_TABLE, USER_COMMENT = 0x010F, 0x0110, 0x8769, 0x9286
_TEXTS = (1, 2, 7)  # types of one byte a value: BYTE, ASCII, UNDEFINED
_POINTERS = (4, 13)  # LONG, IFD


def texts(data: bytes, path: Path) -> dict[str, str]:
    """Return `UserComment` of the EXIF block `data`, and `prompt` if a tag holds ComfyUI's graph. Raises ModelError."""
    data = data.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(data[:4])
    try:
        if order is None:
            raise ValueError("it starts with neither II nor MM")
        return _texts(data, order)
    except (ValueError, struct.error) as error:
        raise bad(path, f"has EXIF data that cannot be read: {error}") from None


def _texts(data: bytes, order: str) -> dict[str, str]:
    first = _table(data, order, struct.unpack_from(order + "I", data, 4)[0])
    by_name: dict[str, str] = {}
    for tag in (MAKE, MODEL):
        value = first.get(tag, b"")
        if value.startswith(b"prompt:{"):
            by_name["prompt"] = value.removeprefix(b"prompt:").rstrip(b"\0").decode("utf-8")
    if SUB_TABLE in first:
        comment = _table(data, order, struct.unpack(order + "I", first[SUB_TABLE])[0]).get(USER_COMMENT, b"")
        if text := _comment(comment).rstrip("\0 "):
            by_name["UserComment"] = text
    return by_name


def _table(data: bytes, order: str, at: int) -> dict[int, bytes]:
    """Return the bytes of the needed entries, by tag, from the table at byte `at`."""
    (count,) = struct.unpack_from(order + "H", data, at)
    values: dict[int, bytes] = {}
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, length = struct.unpack_from(order + "HHI", data, entry)
        if tag in (MAKE, MODEL, USER_COMMENT) and kind in _TEXTS:
            begin = entry + 8 if length <= 4 else struct.unpack_from(order + "I", data, entry + 8)[0]
            if begin + length > len(data):
                raise ValueError(f"entry {tag:#x} ends beyond it")
            values.setdefault(tag, data[begin : begin + length])
        elif tag == SUB_TABLE and kind in _POINTERS:
            values.setdefault(tag, data[entry + 8 : entry + 12])
    return values


def _comment(raw: bytes) -> str:
    """Decode a UserComment, whose first eight bytes name the encoding. Programs that name ASCII write UTF-8."""
    if raw.startswith(b"UNICODE\0"):
        return _utf16(raw[8:])
    for name in (b"ASCII\0\0\0", b"\0" * 8):
        raw = raw.removeprefix(name)
    return raw.decode("utf-8")


def _utf16(raw: bytes) -> str:
    """Decode UTF-16 in either byte order, since programs differ: where a text has ASCII, the zeros show the order."""
    if raw.startswith((b"\xfe\xff", b"\xff\xfe")):
        return raw.decode("utf-16")
    return raw.decode("utf-16-be" if raw[::2].count(0) >= raw[1::2].count(0) else "utf-16-le")
