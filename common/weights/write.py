"""Weights written as safetensors files, one parameter in memory at a time.

A header comes first in its file but is known last, since only encoding shows whether scales fit float16. So space is
reserved for it, and filled with spaces where it is not needed. Tensors of 4-byte numbers come before those of 2 bytes,
so that every tensor begins at a multiple of its size, as some readers require. A file gets its name only when it is
whole. Its metadata has the hash of its data, by which a later run recognizes it.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Shape
from qwenimg.common.formats.file_hash import hashed
from qwenimg.common.formats.safetensors import entry, head, read_header
from qwenimg.common.quant.affine import Affine, exact16
from qwenimg.common.quant.bits import finite, narrowed, widened
from qwenimg.common.quant.rotated import RotatedInt8
from qwenimg.common.weights import comfy
from qwenimg.common.weights.plan import Entry
from qwenimg.common.weights.sources import ROTATION
from qwenimg.common.weights.storage import Packed, rotation_of
from qwenimg.common.weights.values import not_finite, read_chunks, read_quantized

if TYPE_CHECKING:
    import numpy as np

HASH = "sha256"  # the key of the data's hash in the metadata
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_OF_NUMPY = {"uint32": "U32", "uint8": "U8", "int8": "I8", "float16": "F16", "float32": "F32"}

Progress = Callable[[int], None]
"""Called with the number of bytes written since the last call."""


class Weight(NamedTuple):
    """A parameter to be written: under `key`, in `shape`, in its entry's storage."""

    key: str
    shape: Shape
    entry: Entry

    @property
    def nbytes(self) -> int:
        return self.entry.storage.nbytes(self.entry.shape)

    def tensors(self) -> dict[str, Shape]:
        """Return the names and shapes in the file."""
        storage = self.entry.storage
        if not isinstance(storage, Packed):
            return {self.key: self.shape}
        layer, (rows, width) = self.key.removesuffix(".weight"), self.entry.shape
        if isinstance(storage.code, RotatedInt8):
            descriptor = comfy.described(storage.code)
            return {
                self.key: (rows, width),
                f"{layer}.weight_scale": (rows, 1),
                f"{layer}.comfy_quant": descriptor.shape,
            }
        groups: Shape = (rows, width // storage.code.group)
        words: Shape = (rows, width * storage.code.bits // 32)
        marker: dict[str, Shape] = {f"{layer}.{ROTATION}": (1,)} if rotation_of(storage.code) else {}
        return {self.key: words} | {f"{layer}.{part}": groups for part in storage.code.parts} | marker


class _Tensor(NamedTuple):
    key: str
    dtype: str  # as the header names it
    shape: Shape
    data: Iterator[np.ndarray]  # in parts


def shards(weights: Sequence[Weight], most: int) -> list[list[Weight]]:
    """Split `weights`, in their order, into files of about `most` bytes."""
    files: list[list[Weight]] = []
    budget = 0
    for weight in weights:
        if not files or weight.nbytes > budget:
            files.append([])
            budget = most
        files[-1].append(weight)
        budget -= weight.nbytes
    return files


def write_shard(path: Path, weights: Sequence[Weight], metadata: Mapping[str, str], progress: Progress) -> None:
    """Write `weights` as the file `path`. Raises ModelError for values that are not finite, and OSError."""
    reserved, tensors, digest, at = _header_bytes(weights, metadata), {}, hashlib.sha256(), 0
    temp = path.with_name(f"{path.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with io.FileIO(os.open(temp, flags, 0o666), "w") as file:
            file.seek(8 + reserved)
            for tensor in _all(weights):
                begin = at
                for part in tensor.data:
                    view = part.reshape(-1).data.cast("B")
                    digest.update(view)
                    _put(file, view)
                    progress(len(view))
                    at += len(view)
                tensors[tensor.key] = entry(tensor.dtype, tensor.shape, begin, at)
            file.seek(0)
            _put(file, memoryview(head(tensors, {**metadata, HASH: digest.hexdigest()}, reserved)))
            os.fsync(file.fileno())
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)


def is_whole(path: Path, weights: Sequence[Weight], metadata: Mapping[str, str]) -> bool:
    """Return whether `path` is, to the last byte, what `write_shard` makes of these."""
    try:
        header = read_header(path)
        with closing(header.file):
            shapes = {key: stored.shape for key, stored in header.tensors.items()}
            wanted = {key: shape for weight in weights for key, shape in weight.tensors().items()}
            digest = header.metadata.get(HASH, "")
            if shapes != wanted or header.metadata != {**metadata, HASH: digest}:
                return False
            return hashed(header.file, min((s.begin for s in header.tensors.values()), default=0)) == digest
    except ModelError:
        return False


# One parameter


def _all(weights: Sequence[Weight]) -> Iterator[_Tensor]:
    """Yield the tensors whose sizes 4 divides first: codes with odd scales and biases are such together. Tensors of
    single bytes come last."""

    def place(weight: Weight) -> int:
        storage = weight.entry.storage
        if isinstance(storage, Packed):
            return 0 if isinstance(storage.code, Affine | RotatedInt8) else 2
        return 0 if storage.dtype == "float32" else 1

    for weight in sorted(weights, key=place):
        yield from _tensors_of(weight)


def _tensors_of(weight: Weight) -> Iterator[_Tensor]:
    import numpy as np

    names = weight.tensors()
    if not isinstance(weight.entry.storage, Packed):
        yield _Tensor(weight.key, _NAMES[weight.entry.storage.dtype], weight.shape, _values(weight.entry))
        return
    code, coded = weight.entry.storage.code, exact16(read_quantized(weight.entry))
    parts = coded.arrays
    if isinstance(code, RotatedInt8):
        parts = [coded.codes.view("i1"), coded.scales, comfy.described(code)]
    elif rotation := rotation_of(code):
        parts = [*parts, np.array([rotation], "<u4")]
    for (key, shape), part in zip(names.items(), parts, strict=True):
        yield _Tensor(key, _OF_NUMPY[part.dtype.name], shape, iter([part]))


def _values(entry: Entry) -> Iterator[np.ndarray]:
    """Yield the values in the dtype of their storage, rounded once. Raises ModelError for values that are not finite
    then."""
    dtype = entry.storage.dtype
    for array in read_chunks(entry):
        rounded = array if entry.dtype == dtype else narrowed(widened(array), dtype)
        wrong = int((~finite(rounded)).sum())
        if wrong:
            was_finite = finite(array)
            raise not_finite(
                entry, int((~was_finite).sum()), float(abs(widened(array[was_finite])).max(initial=0)), dtype
            )
        yield rounded


# Bytes


def _header_bytes(weights: Sequence[Weight], metadata: Mapping[str, str]) -> int:
    """Return an upper limit of the bytes of a header of these weights."""
    most = 4 * sum(weight.nbytes for weight in weights) + 1  # whatever the scales are kept in
    tensors = {key: entry("BF16", shape, most, most) for weight in weights for key, shape in weight.tensors().items()}
    return len(head(tensors, {**metadata, HASH: "0" * 64}, 0)) - 8


def _put(file: io.FileIO, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]
