"""A safetensors file: its header, parsed strictly, of which nothing else is read; and its bytes, to be written.

Layout: 8 bytes N (little endian), N bytes of JSON {name: {dtype, shape, data_offsets}}, then the data.
Stricter than the `safetensors` package: a header that is accepted here is accepted there, and has one meaning only (no
duplicates, holes, overlaps, trailing bytes, or sizes that a framework would wrap).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TypeGuard

from qwenimg.common.base.safe_files import OpenFile, bad, closed_on_error, open_regular
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.formats.stored import MAX_BITS, MAX_DIM, MAX_NAME, Header, Stored, check_cover

MAX_HEADER = 24 << 20  # bytes; 2,000 tensors take about 0.25 MB, one emoji in the whole makes it 216 MB of memory
MAX_TENSORS = 100_000
MAX_RANK = 8

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
FIELDS = {"dtype", "shape", "data_offsets"}

_NOT_RUN = "which is not read because it can run code: use safetensors, or convert it (docs/trouble.md)"
KINDS = (
    (
        b"version https://git-lfs",
        "a git-lfs pointer, not the weights: run `git lfs pull` or download it again",
    ),
    (b"<", "a web page, not the weights: download it again"),
    (b"GGUF", "a GGUF file, which is read for a model or a part of one: give a safetensors file here"),
    (b"PK", f"a zip archive or PyTorch pickle, {_NOT_RUN}"),
    (b"\x80", f"a Python pickle, {_NOT_RUN}"),
    (b"7z\xbc\xaf", "a 7z archive: unpack it"),
    (b"\x1f\x8b", "a gzip archive: unpack it"),
)


def read_header(path: Path) -> Header:
    """Parse the header of `path`. Raises ModelError. The caller closes `Header.file`."""
    file = open_regular(path)
    with closed_on_error(file):
        return parse(file)


def parse(file: OpenFile) -> Header:
    """Return the header of an open file, which the caller closes. Raises ModelError."""
    path = file.path
    length = _header_length(file)
    raw = file.read(8, length)
    data = strict_json(raw, f"{path} (header)", depth=3, values=12 * MAX_TENSORS)
    if not isinstance(data, dict):
        raise bad(path, "is not a safetensors file: its header is not a JSON object")
    metadata = _metadata(path, data.pop("__metadata__", {}))
    tensors = _tensors(path, data, 8 + length)
    check_cover(file, tensors, 8 + length)
    return Header(file=file, tensors=tensors, metadata=metadata, format="safetensors")


def _header_length(file: OpenFile) -> int:
    first = file.read(0, min(file.size, 64))
    length = int.from_bytes(first[:8], "little")
    if len(first) >= 8 and length <= min(MAX_HEADER, file.size - 8):
        return length
    if not first:
        raise bad(file.path, "is empty: download it again")
    kind = next((kind for magic, kind in KINDS if first.lstrip().startswith(magic)), None)
    if kind and first[8:9] != b"{":  # a header cut short begins with any byte, and has its brace there
        raise bad(file.path, f"is {kind}")
    if len(first) < 8:
        raise bad(file.path, f"has only {file.size} bytes: download it again")
    if first.isascii() and first.decode().replace("\n", " ").replace("\t", " ").replace("\r", " ").isprintable():
        raise bad(file.path, "is a text, not the weights: give the model's folder or its .safetensors file")
    if length > MAX_HEADER:
        raise bad(file.path, f"is not a safetensors file (it claims a header of {length} bytes)")
    raise bad(file.path, f"is cut short: its header has {length} bytes, the file {file.size}: download it again")


def _metadata(path: Path, data: object) -> dict[str, str]:
    if data is None:  # MLX writes null for no metadata
        return {}
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise bad(path, "its __metadata__ is not a table of strings")
    try:
        "".join(text for pair in data.items() for text in pair).encode()
    except UnicodeEncodeError:
        raise bad(path, "its __metadata__ is not Unicode text (half of a surrogate pair)") from None
    return data


def _tensors(path: Path, data: dict[str, object], start: int) -> dict[str, Stored]:
    """Return the tensors in the order of their data in the file."""
    if len(data) > MAX_TENSORS:
        raise bad(path, f"holds {len(data)} tensors; at most {MAX_TENSORS} are allowed")
    tensors = {}
    for name, fields in data.items():
        if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
            raise bad(path, f"tensor name '{clean(name, 60)}' is not 1 to {MAX_NAME} printable characters")
        try:
            tensors[name] = _stored(fields, start)
        except ValueError as error:
            raise bad(path, f"tensor '{clean(name, 80)}': {error}") from None
    return dict(sorted(tensors.items(), key=lambda item: item[1][2:]))


def _stored(fields: object, start: int) -> Stored:
    """Return one entry of the header. Raises ValueError that says what is wrong with it."""
    if not isinstance(fields, dict) or fields.keys() != FIELDS:
        raise ValueError("its entry is not exactly dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"unknown dtype '{clean(dtype, 30)}'")
    if not _naturals(shape, MAX_RANK) or max(shape, default=0) > MAX_DIM:
        raise ValueError(f"shape {clean(shape, 60)} is not up to {MAX_RANK} whole numbers below 2^31")
    if not _naturals(offsets, 2) or len(offsets) != 2:
        raise ValueError(f"data_offsets {clean(offsets, 60)} are not two whole numbers")
    if prod(d or 1 for d in shape) * BITS[dtype] > MAX_BITS:
        raise ValueError(f"shape {clean(shape, 100)} is too large")
    begin, end = offsets
    if prod(shape) * BITS[dtype] != 8 * (end - begin):
        raise ValueError(f"{dtype} of shape {clean(shape, 60)} does not take bytes {begin} to {end}")
    return Stored(dtype, tuple(shape), start + begin, start + end)


def _naturals(numbers: object, most: int) -> TypeGuard[list[int]]:
    """Return whether `numbers` is a list of at most `most` integers, none negative."""
    return isinstance(numbers, list) and len(numbers) <= most and all(type(n) is int and n >= 0 for n in numbers)


# Writing


def entry(dtype: str, shape: Shape, begin: int, end: int) -> dict[str, object]:
    """Return a tensor's entry in a header. begin, end: its place in the data."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def head(entries: Mapping[str, object], metadata: Mapping[str, str] | None = None, reserved: int = 0) -> bytes:
    """Return a file's bytes up to its data, with spaces up to `reserved` bytes of header."""
    about = {} if metadata is None else {"__metadata__": dict(metadata)}
    text = json.dumps({**about, **entries}).encode().ljust(reserved)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
