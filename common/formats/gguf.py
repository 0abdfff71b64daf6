"""The header of a GGUF file, parsed strictly. Nothing else of the file is read.

Layout, little endian: `GGUF`, version, number of tensors, number of keys; the keys with their values; name, dimensions,
type and offset of each tensor; padding; the data. A string is its length and UTF-8. Dimensions are written in reverse:
the first is that of a row. Every tensor begins where the one before it ends, padded to the alignment.

Unusual: ComfyUI's converter writes convolutions as rows of 256 and their true shape as a key.
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from pathlib import Path
from struct import Struct, unpack_from
from typing import NamedTuple, TypeAlias

from qwenimg.common.base.safe_files import OpenFile, bad
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean
from qwenimg.common.formats.gguf_types import TYPES
from qwenimg.common.formats.stored import MAX_BITS, MAX_DIM, MAX_NAME, Header, Stored, check_cover

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # the same layout
ARCHITECTURE = "general.architecture"
UNSPECIFIC = ("", "pig", "cow")  # architectures by programs that write no real one; the tensors' names tell it then
ORIGINAL = "comfy.gguf.orig_shape."  # followed by a tensor's name

MAX_HEADER = 32 << 20  # bytes; a text encoder's vocabulary and merges take 6 MB
MAX_TENSORS = 20_000  # an SDXL checkpoint has some 2,600
MAX_KEYS = 10_000
MAX_KEY = 1 << 11  # bytes of a key, or of a tensor's name
MAX_STRING = 1 << 20  # bytes
MAX_STRINGS = 1_000_000  # in all arrays together
MAX_RANK = 4
MAX_ORIGINAL = 8  # dimensions of a true shape
MAX_ALIGNMENT = 1 << 16
MAX_KEPT = 1 << 12  # bytes; longer values are skipped
WINDOW = 1 << 16  # bytes that are read at once

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by its type
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_UINT32, _INT32, _STRING, _ARRAY = 4, 5, 8, 9
_ALIGNMENT = "general.alignment"


Array: TypeAlias = tuple[str, ...] | tuple[float, ...]
"""The values of an array, texts or numbers."""


class _Keys(NamedTuple):
    """The keys in use: values that are no arrays, as text, true shapes by tensor, and arrays that are asked for."""

    values: dict[str, str]
    originals: dict[str, Shape]
    arrays: dict[str, Array]


def architecture(header: Header) -> str:
    """Return the architecture that a GGUF file names; "" for one that names no real one, and for other files."""
    name = header.metadata.get(ARCHITECTURE, "") if header.format == "GGUF" else ""
    return "" if name in UNSPECIFIC else name


def may_be(header: Header, architectures: Collection[str]) -> bool:
    """Return whether the header names one of `architectures`, or no architecture at all."""
    return architecture(header) in ("", *architectures)


def read_arrays(file: OpenFile, names: Collection[str]) -> dict[str, Array]:
    """Return those of the arrays `names` that an open file with a checked header has, such as its vocabulary. Raises
    ModelError."""
    reader = _HeaderReader(file)
    _, _, keys = reader.number("<I"), reader.number(), reader.number()
    return _read_keys(reader, keys, names).arrays


def parse(file: OpenFile) -> Header:
    """Return the header of an open file, which the caller closes. Raises ModelError."""
    reader = _HeaderReader(file)
    version, tensors, keys = reader.number("<I"), reader.number(), reader.number()
    if version not in VERSIONS:
        what = "is of a machine with other byte order" if version & 0xFFFF == 0 else f"is GGUF version {version}"
        raise bad(file.path, f"{what}; version {' or '.join(map(str, VERSIONS))}, little endian, is read")
    if tensors > MAX_TENSORS or keys > MAX_KEYS:
        raise bad(file.path, f"claims {tensors} tensors and {keys} keys; at most {MAX_TENSORS} and {MAX_KEYS} are read")
    used = _read_keys(reader, keys)
    if used.values.get("split.count", "0") not in ("0", "1"):
        raise bad(file.path, "is one part of a split GGUF: merge them with `llama-gguf-split --merge`")
    alignment = _alignment(file.path, used.values)
    named = _read_tensors(reader, tensors, used.originals)
    start = reader.at + -reader.at % alignment
    stored = {name: at._replace(begin=at.begin + start, end=at.end + start) for name, at in named.items()}
    stored = dict(sorted(stored.items(), key=lambda item: item[1][2:]))
    if stored:
        check_cover(file, stored, start, alignment)
    return Header(file=file, tensors=stored, metadata=used.values, format="GGUF")


class _HeaderReader:
    """A reader in windows that goes on from byte `at`, and never beyond the largest header or the end of the file."""

    def __init__(self, file: OpenFile) -> None:
        self.file, self.at = file, len(MAGIC)
        self._limit = min(file.size, MAX_HEADER)
        self._window, self._begin = b"", 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes, at most MAX_STRING of them."""
        offset = self.at - self._begin
        if offset + count > len(self._window):
            self._fill(count)
            offset = 0
        self.at += count
        return self._window[offset : offset + count]

    def skip(self, count: int) -> None:
        self._check(count)
        self.at += count

    def strings(self, count: int) -> tuple[str, ...]:
        """Read `count` strings."""
        return tuple(self.take(self.length("a string")).decode(errors="replace") for _ in range(count))

    def skip_strings(self, count: int) -> None:
        """Skip `count` strings in one loop: a vocabulary has hundreds of thousands."""
        read = Struct("<Q").unpack_from
        while count:
            self._fill(8)
            window, at = self._window, 0
            while count and at + 8 <= len(window):
                (length,) = read(window, at)
                if length > MAX_STRING:
                    self._check_length(length, "a string", MAX_STRING)
                at, count = at + 8 + length, count - 1
            self.skip(at)

    def _fill(self, count: int) -> None:
        """Read a window that begins here and has at least `count` bytes."""
        self._check(count)
        self._begin = self.at
        self._window = self.file.read(self.at, min(max(WINDOW, count), self._limit - self.at))

    def _check(self, count: int) -> None:
        """Check that `count` bytes follow."""
        if count > self._limit - self.at:
            if self._limit < self.file.size:
                raise bad(self.file.path, f"has a header of more than {MAX_HEADER} bytes: it is damaged")
            raise bad(self.file.path, f"is cut short in its header, at byte {self.file.size}: download it again")

    def number(self, kind: str = "<Q") -> int:
        """Read a number: by default unsigned, of 8 bytes."""
        value: int = unpack_from(kind, self.take({"<I": 4, "<Q": 8}[kind]))[0]
        return value

    def length(self, what: str, most: int = MAX_STRING) -> int:
        """Read the length in bytes of the string that follows."""
        length = self.number()
        self._check_length(length, what, most)
        return length

    def _check_length(self, length: int, what: str, most: int) -> None:
        if length > most:
            raise bad(self.file.path, f"claims {what} of {length} bytes; at most {most} are read")

    def text(self, what: str) -> str:
        """Read a key or a tensor's name."""
        try:
            return self.take(self.length(what, MAX_KEY)).decode()
        except UnicodeDecodeError:
            raise bad(self.file.path, f"has {what} that is not UTF-8: it is damaged") from None


def _alignment(path: Path, values: dict[str, str]) -> int:
    alignment = int(values.get(_ALIGNMENT, "32"))
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise bad(path, f"has alignment {alignment}, which is not a power of two up to {MAX_ALIGNMENT}")
    return alignment


# Keys


def _read_keys(reader: _HeaderReader, count: int, wanted: Collection[str] = ()) -> _Keys:
    """Read the keys; of arrays, those `wanted`."""
    keys = _Keys({}, {}, {})
    seen: set[str] = set()
    strings = 0
    for _ in range(count):
        key = reader.text("a key")
        if key in seen:
            raise bad(reader.file.path, f"has key '{clean(key, 80)}' twice")
        seen.add(key)
        kind = reader.number("<I")
        if key == _ALIGNMENT and kind != _UINT32:
            raise bad(reader.file.path, f"has {key} of type {kind}; expected {_UINT32}, an unsigned number")
        if kind == _ARRAY:
            strings += _read_array(reader, key, keys, MAX_STRINGS - strings, key in wanted)
        elif kind == _STRING:
            length = reader.length(f"a value of '{clean(key, 40)}'")
            raw = reader.take(length)
            if length <= MAX_KEPT:
                keys.values[key] = raw.decode(errors="replace")
        elif kind in _SIZES:
            keys.values[key] = str(unpack_from(_FORMATS[kind], reader.take(_SIZES[kind]))[0])
        else:
            raise bad(reader.file.path, f"has key '{clean(key, 80)}' of unknown type {kind}")
    return keys


def _read_array(reader: _HeaderReader, key: str, keys: _Keys, strings: int, wanted: bool) -> int:
    """Skip an array that is not `wanted`, but keep a tensor's true shape. An array may have so many `strings`. Return
    how many it has."""
    kind, count = reader.number("<I"), reader.number()
    if kind == _STRING:
        if count > strings:
            raise bad(reader.file.path, f"has more than {MAX_STRINGS} strings in arrays, in key '{clean(key, 80)}' too")
        if wanted:
            keys.arrays[key] = reader.strings(count)
        else:
            reader.skip_strings(count)
        return count
    if kind not in _SIZES:
        raise bad(reader.file.path, f"has key '{clean(key, 80)}', an array of type {kind}, which is not read")
    if key.startswith(ORIGINAL) and kind == _INT32 and 1 <= count <= MAX_ORIGINAL:
        keys.originals[key.removeprefix(ORIGINAL)] = unpack_from(f"<{count}i", reader.take(4 * count))
    elif wanted and count <= MAX_STRINGS:
        keys.arrays[key] = unpack_from(f"<{count}{_FORMATS[kind][1]}", reader.take(_SIZES[kind] * count))
    else:
        reader.skip(_SIZES[kind] * count)
    return 0


# Tensors


def _read_tensors(reader: _HeaderReader, count: int, originals: dict[str, Shape]) -> dict[str, Stored]:
    """Return the tensors by name, their bytes counted from the start of the data."""
    tensors: dict[str, Stored] = {}
    for _ in range(count):
        name = reader.text("a tensor's name")
        if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
            raise bad(reader.file.path, f"tensor name '{clean(name, 60)}' is not 1 to {MAX_NAME} printable characters")
        if name in tensors:
            raise bad(reader.file.path, f"tensor '{clean(name, 80)}' occurs twice")
        rank = reader.number("<I")
        if not 1 <= rank <= MAX_RANK:
            raise bad(reader.file.path, f"tensor '{clean(name, 80)}' has {rank} dimensions; 1 to {MAX_RANK} are read")
        *dims, kind, offset = unpack_from(f"<{rank}QIQ", reader.take(8 * rank + 12))
        try:
            tensors[name] = _stored(dims[::-1], kind, offset, originals.get(name))
        except ValueError as error:
            raise bad(reader.file.path, f"tensor '{clean(name, 80)}': {error}") from None
    return tensors


def _stored(shape: list[int], kind: int, offset: int, original: Shape | None) -> Stored:
    """Return one tensor. Raises ValueError that says what is wrong with it."""
    if kind not in TYPES:
        raise ValueError(f"unknown type {kind}")
    type = TYPES[kind]
    if min(shape) < 1 or max(shape) > MAX_DIM:
        raise ValueError(f"shape {clean(shape, 100)} is not of whole numbers from 1 to 2^31 - 1")
    count = prod(shape)
    if count * 64 > MAX_BITS or offset * 8 > MAX_BITS:
        raise ValueError(f"shape {clean(shape, 100)} at byte {offset} is too large")
    if shape[-1] % type.values:
        raise ValueError(f"rows of {shape[-1]} values are no whole blocks of {type.values} ({type.name})")
    size = count // type.values * type.bytes
    if original is not None and (min(original) < 1 or prod(original) != count):
        raise ValueError(f"its true shape {clean(list(original), 60)} is not that of {count} values")
    return Stored(type.name, tuple(original or shape), offset, offset + size)
