"""Weights written as safetensors, a file at a time, of which one parameter is in memory.

A header comes first in its file and is known last, since whether scales fit float16 shows when they are made: room is
kept for it, and what it does not need is filled with spaces. What takes 4 bytes comes before what takes 2, so that
every tensor begins at a multiple of its size, as some readers want. A file has its name only when it is whole; its
metadata has the hash of its data, by which a later run knows it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Shape
from qwenimg.common.codes.affine import Affine, exact16
from qwenimg.common.codes.bits import finite, narrowed, widened
from qwenimg.common.formats.file_hash import hashed
from qwenimg.common.formats.safetensors import read_header
from qwenimg.common.formats.stored import Header
from qwenimg.common.weights.not_finite import not_finite
from qwenimg.common.weights.plan import Entry, parts, read_codes
from qwenimg.common.weights.storage import Packed

if TYPE_CHECKING:
    import numpy as np

HASH = "sha256"  # the metadata's name of the data's hash
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

Progress = Callable[[int], None]
"""Gets the number of bytes that were written since the last call."""


class Weight(NamedTuple):
    """A parameter as it is to be written: under `key`, in `shape`, and kept as its entry's storage says."""

    key: str
    shape: Shape
    entry: Entry

    @property
    def nbytes(self) -> int:
        return self.entry.storage.nbytes(self.entry.shape)

    def tensors(self) -> dict[str, Shape]:
        """The names and shapes in the file."""
        kept = self.entry.storage
        if not isinstance(kept, Packed):
            return {self.key: self.shape}
        layer, (rows, width) = self.key.removesuffix(".weight"), self.entry.shape
        groups: Shape = (rows, width // kept.code.group)
        words: Shape = (rows, width * kept.code.bits // 32)
        return {self.key: words} | {f"{layer}.{part}": groups for part in kept.code.parts}


class _Made(NamedTuple):
    key: str
    dtype: str  # as the header names it
    shape: Shape
    data: Iterator[np.ndarray]  # in parts


def shards(weights: Sequence[Weight], most: int) -> list[list[Weight]]:
    """`weights` in their order, in files of about `most` bytes."""
    found: list[list[Weight]] = []
    room = 0
    for weight in weights:
        if not found or weight.nbytes > room:
            found.append([])
            room = most
        found[-1].append(weight)
        room -= weight.nbytes
    return found


def write_shard(path: Path, weights: Sequence[Weight], metadata: Mapping[str, str], progress: Progress) -> None:
    """Writes `weights` as the file `path`. Raises ModelError for values that are not finite, and OSError."""
    room, tensors, digest, at = _room(weights, metadata), {}, hashlib.sha256(), 0
    temp = path.with_name(f"{path.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with io.FileIO(os.open(temp, flags, 0o666), "w") as file:
            file.seek(8 + room)
            for made in _all(weights):
                begin = at
                for part in made.data:
                    view = part.reshape(-1).data.cast("B")
                    digest.update(view)
                    _put(file, view)
                    progress(len(view))
                    at += len(view)
                tensors[made.key] = _fields(made.dtype, made.shape, begin, at)
            file.seek(0)
            _put(file, memoryview(_header(tensors, {**metadata, HASH: digest.hexdigest()}, room)))
            os.fsync(file.fileno())
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)


def is_whole(path: Path, weights: Sequence[Weight], metadata: Mapping[str, str]) -> bool:
    """Whether `path` is what `write_shard` makes of these, to the last byte."""
    try:
        with closing(_Closing(read_header(path))) as opened:
            header = opened.header
            shapes = {key: stored.shape for key, stored in header.tensors.items()}
            wanted = {key: shape for weight in weights for key, shape in weight.tensors().items()}
            digest = header.metadata.get(HASH, "")
            if shapes != wanted or header.metadata != {**metadata, HASH: digest}:
                return False
            return hashed(header.file, min((s.begin for s in header.tensors.values()), default=0)) == digest
    except ModelError:
        return False


class _Closing:
    def __init__(self, header: Header):
        self.header = header

    def close(self) -> None:
        self.header.file.close()


# One parameter


def _all(weights: Sequence[Weight]) -> Iterator[_Made]:
    """What 4 bytes divide comes first: of codes with odd scales and biases the two together are such. What ends in
    single bytes comes last."""

    def place(weight: Weight) -> int:
        kept = weight.entry.storage
        if isinstance(kept, Packed):
            return 0 if isinstance(kept.code, Affine) else 2
        return 0 if kept.dtype == "float32" else 1

    for weight in sorted(weights, key=place):
        yield from _made(weight)


def _is_packed(weight: Weight) -> bool:
    return isinstance(weight.entry.storage, Packed)


def _made(weight: Weight) -> Iterator[_Made]:
    names = weight.tensors()
    if not _is_packed(weight):
        yield _Made(weight.key, _NAMES[weight.entry.storage.dtype], weight.shape, _values(weight.entry))
        return
    kept = exact16(read_codes(weight.entry))
    for (key, shape), part in zip(names.items(), kept.arrays, strict=True):
        name = {"uint32": "U32", "uint8": "U8", "float16": "F16", "float32": "F32"}[part.dtype.name]
        yield _Made(key, name, shape, iter([part]))


def _values(entry: Entry) -> Iterator[np.ndarray]:
    """In the dtype of its storage, rounded once. Raises ModelError for what is not finite then."""
    dtype = entry.storage.dtype
    for array in parts(entry):
        made = array if entry.dtype == dtype else narrowed(widened(array), dtype)
        wrong = int((~finite(made)).sum())
        if wrong:
            own = finite(array)
            raise not_finite(entry, int((~own).sum()), float(abs(widened(array[own])).max(initial=0)), dtype)
        yield made


# Bytes


def _fields(dtype: str, shape: Shape, begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _room(weights: Sequence[Weight], metadata: Mapping[str, str]) -> int:
    """Bytes that no header of these takes more than."""
    most = 4 * sum(weight.nbytes for weight in weights) + 1  # whatever the scales are kept in
    tensors = {key: _fields("BF16", shape, most, most) for weight in weights for key, shape in weight.tensors().items()}
    return len(_header(tensors, {**metadata, HASH: "0" * 64}, 0)) - 8


def _header(tensors: Mapping[str, object], metadata: Mapping[str, str], room: int) -> bytes:
    text = json.dumps({"__metadata__": dict(metadata), **tensors}, separators=(",", ":")).encode()
    text = text.ljust(room)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _put(file: io.FileIO, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]
