"""The first image of a TIFF as a small TIFF of its own: only its pixels and the entries that describe their format.

A TIFF is tables of entries that point anywhere into the file, and a table of 64 kB can name a gigabyte. Pillow and
libtiff see only the file written here, after every number in it was checked.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NoReturn

from qwenimg.common.base.safe_files import OpenFile, bad

MAX_ENTRIES = 1_000  # entries of the table; an image has a few dozen
MAX_PIECES = 100_000  # strips or tiles
MAX_TILE = 1 << 22  # pixels of a tile, which is decoded at once
MAX_CHANNELS = 5
MAX_PROFILE = 4 << 20  # bytes
_PREVIEW, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _KIND = 254, 256, 257, 258, 259, 262
_STRIPS, _ORIENTATION, _CHANNELS, _ROWS, _STRIP_BYTES = 273, 274, 277, 278, 279
_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES, _PROFILE = 322, 323, 324, 325, 34675
_OTHERS = (266, 284, 317, 320, 338, 339)  # order of bits, planes, predictor, palette, further channels, kind of numbers
_BYTES = {1: 1, 3: 2, 4: 4, 7: 1}  # bytes of a value by the type of an entry: BYTE, SHORT, LONG, UNDEFINED
_FORMATS = {1: "B", 3: "H", 4: "I", 7: "B"}
_KINDS = (0, 1, 2, 3, 5)  # grey (0 and 1), RGB, palette, CMYK
_COMPRESSIONS = {1: "none", 5: "LZW", 8: "deflate", 32946: "deflate", 32773: "PackBits"}

_Table = dict[int, tuple[int, bytes]]
"""Type and bytes of each entry, by tag."""


def first_picture(file: OpenFile, most_bytes: int) -> tuple[bytes, bool]:
    """Return the first image of a TIFF as a file, and whether another one follows. Raises ModelError, also for more
    than `most_bytes` of stored pixels."""
    order = "<" if file.read(0, 2) == b"II" else ">"
    if file.size < 8 or struct.unpack(order + "H", file.read(2, 2))[0] != 42:
        _refuse(file, "is a TIFF that is not read (BigTIFF)")
    table, following = _table(file, order)
    numbers = {
        tag: struct.unpack(f"{order}{len(data) // _BYTES[kind]}{_FORMATS[kind]}", data)
        for tag, (kind, data) in table.items()
    }
    _check(file, numbers)
    return _written(file, order, table, numbers, most_bytes), following != 0


def _table(file: OpenFile, order: str) -> tuple[_Table, int]:
    """Return the entries of the first table that are used here, and the place of the next table."""
    (at,) = struct.unpack(order + "I", file.read(4, 4))
    (count,) = struct.unpack(order + "H", _bytes(file, at, 2))
    if count > MAX_ENTRIES:
        _refuse(file, f"is a TIFF of more than {MAX_ENTRIES:,} entries")
    raw = _bytes(file, at + 2, 12 * count + 4)
    table: _Table = {}
    for entry in range(0, 12 * count, 12):
        tag, kind, values = struct.unpack_from(order + "HHI", raw, entry)
        if tag not in _KNOWN or kind not in _BYTES or not values:
            continue
        length = values * _BYTES[kind]
        if length > MAX_PROFILE:
            if tag == _PROFILE:
                continue
            _refuse(file, f"is a TIFF of {values:,} values in entry {tag}")
        (at,) = struct.unpack_from(order + "I", raw, entry + 8)
        table[tag] = kind, raw[entry + 8 : entry + 8 + length] if length <= 4 else _bytes(file, at, length)
    return table, struct.unpack_from(order + "I", raw, 12 * count)[0]


def _check(file: OpenFile, numbers: Mapping[int, tuple[int, ...]]) -> None:
    """Raise ModelError for a kind of TIFF that is not read, and for numbers that no image has."""
    for tag in (_WIDTH, _HEIGHT, _KIND):
        if tag not in numbers:
            _refuse(file, f"is a TIFF without entry {tag}")
    if numbers.get(_PREVIEW, (0,))[0] & 1:
        _refuse(file, "is a TIFF that begins with a preview, as raw photographs do")
    compression, bits = numbers.get(_COMPRESSION, (1,))[0], numbers.get(_BITS, (1,))
    if compression not in _COMPRESSIONS:
        _refuse(
            file, f"is a TIFF in compression {compression}; {', '.join(dict.fromkeys(_COMPRESSIONS.values()))} are read"
        )
    if numbers[_KIND][0] not in _KINDS:
        _refuse(file, f"is a TIFF of colour kind {numbers[_KIND][0]}; grey, RGB, palette and CMYK are read")
    channels = numbers.get(_CHANNELS, (1,))[0]
    if not 1 <= channels <= MAX_CHANNELS or any(one not in (1, 2, 4, 8, 16) for one in bits):
        _refuse(
            file, f"is a TIFF of {channels} channels in {bits[0]} bits; up to {MAX_CHANNELS} in 1 to 16 bits are read"
        )
    if any(one != 1 for one in numbers.get(339, ())):
        _refuse(file, "is a TIFF of signed or floating-point numbers")
    tile = numbers.get(_TILE_WIDTH, (1,))[0] * numbers.get(_TILE_HEIGHT, (1,))[0]
    if not 0 < tile <= MAX_TILE:
        _refuse(file, f"is a TIFF in tiles of {tile:,} pixels; at most {MAX_TILE:,} are read")


def _written(
    file: OpenFile, order: str, table: _Table, numbers: Mapping[int, tuple[int, ...]], most_bytes: int
) -> bytes:
    """Return the new file: its pieces one after the other, and a table that points to them."""
    tiled = _TILES in numbers
    offsets, lengths = (numbers.get(tag, ()) for tag in ((_TILES, _TILE_BYTES) if tiled else (_STRIPS, _STRIP_BYTES)))
    if not offsets or len(offsets) != len(lengths) or len(offsets) > MAX_PIECES:
        _refuse(
            file, f"is a TIFF of {len(offsets):,} pieces with {len(lengths):,} lengths; at most {MAX_PIECES:,} are read"
        )
    if sum(lengths) > most_bytes:
        _refuse(file, f"is a TIFF of {sum(lengths):,} bytes of pixels; at most {most_bytes:,} are read")
    out, places = bytearray(8), list[int]()
    for at, length in zip(offsets, lengths, strict=True):
        places.append(len(out))
        out += _bytes(file, at, length)
    out += bytes(len(out) % 2)
    height = numbers[_HEIGHT][0]
    entries = {tag: table[tag] for tag in table if tag not in (_STRIPS, _STRIP_BYTES, _TILES, _TILE_BYTES, _PREVIEW)}
    entries[_TILES if tiled else _STRIPS] = 4, struct.pack(f"{order}{len(places)}I", *places)
    entries[_TILE_BYTES if tiled else _STRIP_BYTES] = 4, struct.pack(f"{order}{len(lengths)}I", *lengths)
    if not tiled:
        entries[_ROWS] = 4, struct.pack(order + "I", min(height, numbers.get(_ROWS, (height,))[0]))
    out[:8] = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, len(out))
    return bytes(out + _packed(order, entries, len(out)))


def _packed(order: str, entries: _Table, at: int) -> bytes:
    """Return a table of `entries` that begins at byte `at`, followed by the values that are too long for an entry."""
    head, behind = bytearray(struct.pack(order + "H", len(entries))), bytearray()
    end = at + 2 + 12 * len(entries) + 4
    for tag, (kind, data) in sorted(entries.items()):
        head += struct.pack(order + "HHI", tag, kind, len(data) // _BYTES[kind])
        if len(data) <= 4:
            head += data.ljust(4, b"\0")
        else:
            head += struct.pack(order + "I", end + len(behind))
            behind += data + bytes(len(data) % 2)
    return bytes(head + bytes(4) + behind)


def _bytes(file: OpenFile, at: int, count: int) -> bytes:
    if at + count > file.size:
        _refuse(file, "is a TIFF that ends before its pixels")
    return file.read(at, count)


def _refuse(file: OpenFile, what: str) -> NoReturn:
    raise bad(file.path, f"{what}; save it as PNG")


_KNOWN = frozenset(
    {_PREVIEW, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _KIND, _STRIPS, _ORIENTATION, _CHANNELS, _ROWS, _STRIP_BYTES}
    | {_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES, _PROFILE, *_OTHERS}
)
