"""The contents of a weight file's header, of whichever format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from qwenimg.common.base.safe_files import OpenFile, bad
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean
from qwenimg.common.formats.arrays import empty, largest_bits

if TYPE_CHECKING:
    import numpy as np

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NUMPY = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4", "I8": "i1", "U8": "u1",
    "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
}  # fmt: skip
"""The dtype in which numpy reads a tensor of a file: numbers, or their bits."""

TOO_LARGE = {"float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119}
"""The least size that a dtype rounds to infinity: halfway from its largest number to the next power of two."""

MAX_DIM = 2**31 - 1  # frameworks hold a dimension in 32 bits
MAX_BITS = 2**63  # bits of one tensor, counting empty dimensions as 1, so that no product wraps
MAX_NAME = 512  # characters

_IN_CACHE = 1 << 20  # bytes that are read and then checked


class Stored(NamedTuple):
    """A tensor of a file; `begin` and `end` are byte offsets in the file."""

    dtype: str
    shape: Shape
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """The tensors of a file, in the order of the data, its metadata, and the file, still open."""

    file: OpenFile
    tensors: dict[str, Stored]
    metadata: dict[str, str]
    format: Literal["safetensors", "GGUF", "PyTorch"]


def check_cover(file: OpenFile, tensors: Mapping[str, Stored], start: int, alignment: int = 1) -> None:
    """Check that the tensors, in the order of their bytes, cover the file from `start` to its end, each padded to
    `alignment`. Raises ModelError."""
    at = end = start
    for name, tensor in tensors.items():
        if tensor.begin != at:
            fault = "overlaps the one before" if tensor.begin < at else "leaves a hole before it"
            raise bad(file.path, f"tensor '{clean(name, 80)}' {fault} (byte {tensor.begin}, expected {at})")
        end = tensor.end
        at = end + -end % alignment
    if end > file.size:
        raise bad(file.path, f"is cut short: it needs {end} bytes and has {file.size}: download it again")
    if at < file.size:
        raise bad(file.path, f"has {file.size - at} bytes after its last tensor: it is damaged, download it again")


class TensorSlice(NamedTuple):
    """A tensor of a file, or a range of its rows, as it is stored."""

    key: str  # the tensor's name
    file: OpenFile
    dtype: str  # as the file's header names it
    shape: Shape
    begin: int  # byte offsets in the file
    end: int


def raw(piece: TensorSlice) -> np.ndarray:
    """Return the numbers of a piece if numpy has their dtype, bfloat16 as its bits in uint16, and else bytes. Raises
    ModelError if the file changed or ended early."""
    return into(piece, _empty_for(piece))


def into(piece: TensorSlice, array: np.ndarray) -> np.ndarray:
    """Fill `array` with the bytes of a piece and return it; both have the same size. Raises ModelError if the file
    changed or ended early."""
    if array.size:
        piece.file.fill(_bytes(array), piece.begin)
    piece.file.check_unchanged()
    return array


def read_checked(piece: TensorSlice) -> tuple[np.ndarray, int]:
    """Return the numbers of a piece in float32, float16 or bfloat16, and the bits of its largest absolute value
    (`largest_bits`). Raises ModelError if the file changed or ended early."""
    array = _empty_for(piece)
    largest = fill(piece, _bytes(array), piece.begin) if array.size else 0
    piece.file.check_unchanged()
    return array, largest


def fill(piece: TensorSlice, view: memoryview, begin: int) -> int:
    """Fill `view` with bytes of the file from `begin` on. Return the bits of the largest absolute value in them,
    found while they are in the processor's cache."""
    import numpy as np

    largest = 0
    for done in range(0, len(view), _IN_CACHE):
        part = view[done : done + _IN_CACHE]
        piece.file.fill(part, begin + done)
        largest = max(largest, largest_bits(np.frombuffer(part, NUMPY[piece.dtype])))
    return largest


def _empty_for(piece: TensorSlice) -> np.ndarray:
    dtype = NUMPY.get(piece.dtype)
    return empty(piece.shape if dtype else (piece.end - piece.begin,), dtype or "u1")


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).data.cast("B")
