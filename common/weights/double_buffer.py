"""Blocks that were read and checked before, read again into memory that exists: one half for the block that computes,
one for the block that is read meanwhile.

The system clears new memory page by page, which takes about as long as reading: docs/measured/memory.md.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from qwenimg.common.base.shape import Shape
from qwenimg.common.formats.stored import DTYPES, NUMPY, TensorSlice, into
from qwenimg.common.weights.plan import Entry
from qwenimg.common.weights.storage import Packed
from qwenimg.common.weights.streaming import Blocks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes: TypeAlias = NDArray[np.uint8]

Memory = TypeVar("Memory")

ALIGNED = 256  # bytes, as in torch's allocator: kernels read wide words
_BYTES = {"float32": 4, "uint32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
_AT_ONCE = 1 << 18  # values that are widened while they are in the processor's cache


class PlacedArray(NamedTuple):
    """One array of an entry in its storage, and its place in a block's memory."""

    piece: TensorSlice
    dtype: str
    shape: Shape
    begin: int  # bytes

    @property
    def end(self) -> int:
        return self.begin + prod(self.shape) * _BYTES[self.dtype]


class DoubleBuffer(Generic[Memory]):
    """Two buffers used in turn. make(size) returns a buffer of `size` bytes, and the same bytes as a numpy array."""

    def __init__(self, blocks: Blocks, make: Callable[[int], tuple[Memory, Bytes]]):
        """Lay out the arrays of `blocks`. Every entry must satisfy `streaming.is_read_in_place`."""
        self._make, self._turn = make, 0
        self._parts = {path: _placed(block) for path, block in blocks.items()}
        self._size = max(parts[-1][-1].end for parts in self._parts.values())
        self._pieces: list[tuple[Memory, Bytes] | None] = [None, None]

    def turn(self) -> None:
        """Switch to the other piece for the next read. It is made the first time."""
        self._turn = 1 - self._turn
        if self._pieces[self._turn] is None:
            self._pieces[self._turn] = self._make(self._size)

    def read(self, path: str) -> tuple[Memory, list[list[PlacedArray]]]:
        """Read a block. Return the memory that holds it now, and the places of its entries' arrays. Raises
        ModelError if a file changed or ended early."""
        piece = self._pieces[self._turn]
        assert piece is not None
        memory, view = piece
        for part in (part for parts in self._parts[path] for part in parts):
            _fill(part, view[part.begin : part.end])
        return memory, self._parts[path]


def _placed(block: list[Entry]) -> list[list[PlacedArray]]:
    """Return the arrays of each entry, laid out one after the other."""
    begin, placed = 0, []
    for entry in block:
        parts = []
        for piece, dtype, shape in _arrays(entry):
            parts.append(PlacedArray(piece, dtype, shape, begin))
            begin = -(-parts[-1].end // ALIGNED) * ALIGNED
        placed.append(parts)
    return placed


def _arrays(entry: Entry) -> list[tuple[TensorSlice, str, Shape]]:
    """Return the arrays of a `straight` entry in its storage: its values; or its codes, and their scales and biases."""
    pieces = entry.source.pieces
    if not isinstance(entry.storage, Packed):
        return [(pieces[0], entry.storage.dtype, entry.shape)]
    # numpy has no bfloat16: such scales become float32
    dtypes = {"U32": "uint32", "F32": "float32", "BF16": "float32", "F16": "float16"}
    return [(piece, dtypes.get(piece.dtype, "uint8"), piece.shape) for piece in pieces]


def _fill(part: PlacedArray, memory: Bytes) -> None:
    piece = part.piece
    if piece.end - piece.begin == len(memory):
        into(piece, memory)
    else:
        _widen(piece, memory)


def _widen(piece: TensorSlice, memory: Bytes) -> None:
    """Fill `memory` with the float32 values of float16 or bfloat16."""
    import numpy as np

    assert DTYPES[piece.dtype] in ("float16", "bfloat16")
    values, few = memory.view("<f4"), np.empty(_AT_ONCE, NUMPY[piece.dtype])
    for start in range(0, len(values), _AT_ONCE):
        now = values[start : start + _AT_ONCE]
        stored = few[: len(now)]
        piece.file.fill(stored.view("u1").data, piece.begin + 2 * start)
        if piece.dtype == "BF16":
            np.left_shift(stored, 16, out=now.view("<u4"), dtype="<u4")
        else:
            now[...] = stored
    piece.file.check_unchanged()
