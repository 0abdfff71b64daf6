"""A file of `torch.save` (.pth, .pt, .ckpt, .bin): its tensors by name, and where their bytes are.

Two layouts: a zip archive, whose `data.pkl` describes the tensors and whose `data/KEY` are their values, and before
torch 1.6 five pickles and then the values. No pickle is run (`tensor_pickle`); nothing is unpacked, since values are
stored as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Final, NamedTuple

from qwenimg.common.base.safe_files import OpenFile, bad
from qwenimg.common.base.text import clean
from qwenimg.common.formats.safetensors import BITS, MAX_TENSORS
from qwenimg.common.formats.stored import MAX_BITS, MAX_DIM, MAX_NAME, Header, Stored
from qwenimg.common.formats.tensor_pickle import PickleFault, TensorRecord, read

FORMAT: Final = "PyTorch"  # of a header
MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of the old layout
ZIP = b"PK\x03\x04"
PICKLE = b"\x80\x02"
ALONE = "*"  # the name of a tensor that is in no table
MAX_PICKLE = 16 << 20  # bytes
MAX_ENTRIES = 100_000  # files of an archive
MAX_DIRECTORY = 32 << 20  # bytes
_END = 22  # bytes of the record at an archive's end, without a comment


class Span(NamedTuple):
    """Bytes of a file."""

    begin: int
    end: int


def is_pth(file: OpenFile) -> bool:
    """Return whether the file begins as `torch.save` writes it."""
    first = file.read(0, min(file.size, 4))
    return first == ZIP or first.startswith(PICKLE)


def parse(file: OpenFile) -> Header:
    """Return the tensors of an open file, which the caller closes. A table in a table gives names with dots. Raises
    ModelError."""
    try:
        if file.read(0, min(file.size, 4)) == ZIP:
            value, spans = _of_archive(file)
        else:
            value, spans = _of_pickles(file)
        tensors = {name: _placed(name, record, spans) for name, record in _flat(value)}
    except (PickleFault, struct.error) as error:
        raise bad(file.path, str(error) if isinstance(error, PickleFault) else "is a broken PyTorch file") from None
    ordered = dict(sorted(tensors.items(), key=lambda item: item[1][2:]))
    return Header(file=file, tensors=ordered, metadata={}, format=FORMAT)


def _flat(value: Any) -> Iterator[tuple[str, TensorRecord]]:
    """Yield the tensors of tables in tables, each by its whole name; a tensor without a table as ALONE."""
    if isinstance(value, TensorRecord):
        yield ALONE, value
        return
    waiting, seen = [("", value)], 0
    while waiting:
        prefix, table = waiting.pop()
        if not isinstance(table, dict):
            raise PickleFault("it holds no table of tensors")
        for key, item in table.items():
            if not isinstance(item, TensorRecord | dict):
                continue
            name, seen = f"{prefix}{key}", seen + 1
            if seen > MAX_TENSORS:  # a table that is in itself has no end
                raise PickleFault(f"holds more than {MAX_TENSORS:,} tensors")
            if not 1 <= len(name) < MAX_NAME or not name.isprintable():
                raise PickleFault(f"tensor name '{clean(name, 60)}' is not 1 to {MAX_NAME} printable characters")
            if isinstance(item, TensorRecord):
                yield name, item
            else:
                waiting.append((f"{name}.", item))


def _placed(name: str, record: TensorRecord, spans: Mapping[str, Span]) -> Stored:
    shown, storage = clean(name, 80), record.storage
    size = BITS[storage.dtype] // 8
    span = spans.get(storage.key)
    if span is None:
        raise PickleFault(f"tensor '{shown}' has no values in the file: download it again")
    if max(record.shape, default=0) > MAX_DIM or prod(d or 1 for d in record.shape) * 8 * size > MAX_BITS:
        raise PickleFault(f"tensor '{shown}' is too large")
    begin = span.begin + record.offset * size
    end = begin + prod(record.shape) * size
    if span.end - span.begin != storage.values * size or end > span.end:
        raise PickleFault(f"tensor '{shown}' does not fit into its values: the file is damaged, download it again")
    return Stored(storage.dtype, record.shape, begin, end)


# The old layout


def _of_pickles(file: OpenFile) -> tuple[Any, dict[str, Span]]:
    """Return the table and the places of the values: [magic][version][about the machine][table][keys], then for each
    key the number of values and the values."""
    data = file.read(0, min(file.size, MAX_PICKLE))
    magic, at = read(data)
    if type(magic) is not int or magic != MAGIC:
        raise PickleFault("is a Python pickle, and none of PyTorch")
    _, at = read(data, at)
    about, at = read(data, at)
    if not isinstance(about, dict) or about.get("little_endian", True) is not True:
        raise PickleFault("was written on a machine with another order of bytes")
    value, at = read(data, at)
    keys, at = read(data, at)
    sizes = {record.storage.key: BITS[record.storage.dtype] // 8 for _, record in _flat(value)}
    if not isinstance(keys, list) or len(keys) > MAX_TENSORS:
        raise PickleFault("has no list of its values")
    spans: dict[str, Span] = {}
    for key in keys:
        if not isinstance(key, str) or key not in sizes or key in spans:
            raise PickleFault("has values of no tensor, or some twice")
        if at + 8 > file.size:
            raise PickleFault("is cut short: download it again")
        (count,) = struct.unpack("<q", file.read(at, 8))
        begin = at + 8
        if not 0 <= count < 2**40 or begin + count * sizes[key] > file.size:
            raise PickleFault("is cut short: download it again")
        at = begin + count * sizes[key]
        spans[key] = Span(begin, at)
    return value, spans


# The archive


def _of_archive(file: OpenFile) -> tuple[Any, dict[str, Span]]:
    entries = _entries(file)
    root = next((name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl")), None)
    if root is None or root.count("/") != 1:
        raise PickleFault("is a zip archive, and none of PyTorch: unpack it, or give the file of the weights")
    order = entries.get(f"{root}byteorder")
    if order is not None and file.read(order.begin, min(order.end - order.begin, 16)) != b"little":
        raise PickleFault("was written on a machine with another order of bytes")
    place = entries[f"{root}data.pkl"]
    if place.end - place.begin > MAX_PICKLE:
        raise PickleFault(f"its pickle has {place.end - place.begin:,} bytes; at most {MAX_PICKLE:,} are read")
    value, _ = read(file.read(place.begin, place.end - place.begin))
    start = f"{root}data/"
    return value, {name.removeprefix(start): span for name, span in entries.items() if name.startswith(start)}


def _entries(file: OpenFile) -> dict[str, Span]:
    """Return the bytes of each file of the archive, all stored as they are."""
    at, size, count = _directory(file)
    if not 0 < size <= MAX_DIRECTORY or count > MAX_ENTRIES or at + size > file.size:
        raise PickleFault("is a broken zip archive: download it again")
    data, entries, place = file.read(at, size), dict[str, Span](), 0
    for _ in range(count):
        fields = struct.unpack_from("<4s6H3I5H2I", data, place)
        method, packed, whole = fields[4], fields[8], fields[9]
        name_length, more, comment, offset = fields[10], fields[11], fields[12], fields[16]
        name = data[place + 46 : place + 46 + name_length].decode("utf-8", "replace")
        extra = data[place + 46 + name_length : place + 46 + name_length + more]
        whole, packed, offset = _wide(extra, whole, packed, offset)
        if fields[0] != b"PK\x01\x02" or name in entries:
            raise PickleFault("is a broken zip archive: download it again")
        if method != 0 or fields[3] & 1 or packed != whole:
            raise PickleFault(f"its part '{clean(name, 40)}' is compressed: save it again with PyTorch")
        entries[name] = _span(file, offset, whole)
        place += 46 + name_length + more + comment
    return entries


def _wide(extra: bytes, *values: int) -> list[int]:
    """Return sizes and offset, from the extra field of large archives where the header has no room for them."""
    wide, at = b"", 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + length]
        at += 4 + length
    whole = []
    for value in values:
        if value == 0xFFFFFFFF and len(wide) >= 8:
            value, wide = struct.unpack("<Q", wide[:8])[0], wide[8:]
        whole.append(value)
    return whole


def _span(file: OpenFile, offset: int, size: int) -> Span:
    """Return the begin and end of an archive member's bytes, which follow its local header."""
    if offset + 30 > file.size:
        raise PickleFault("is cut short: download it again")
    head = struct.unpack("<4s5H3I2H", file.read(offset, 30))
    begin = offset + 30 + head[9] + head[10]
    if head[0] != ZIP or begin + size > file.size:
        raise PickleFault("is a broken zip archive, or cut short: download it again")
    return Span(begin, begin + size)


def _directory(file: OpenFile) -> tuple[int, int, int]:
    """Return the place and the size of the list of parts, and their number."""
    length = min(file.size, _END + 0xFFFF)
    tail = file.read(file.size - length, length)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or place + _END > len(tail):
        raise PickleFault("is a zip archive that is cut short: download it again")
    count, size, at = struct.unpack_from("<HII", tail, place + 10)
    wide = place - 20
    if 0xFFFFFFFF in (size, at) or count == 0xFFFF:
        if wide < 0 or tail[wide : wide + 4] != b"PK\x06\x07":
            raise PickleFault("is a broken zip archive: download it again")
        (record,) = struct.unpack_from("<Q", tail, wide + 8)
        if record + 56 > file.size:
            raise PickleFault("is a broken zip archive: download it again")
        count, size, at = struct.unpack("<QQQ", file.read(record + 32, 24))
    return at, size, count
