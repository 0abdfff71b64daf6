"""Weights as whole numbers in a rotated basis, with a scale for each row: ComfyUI's `convrot`, W = (Q s) R.

R [in in] rotates each group of G values along a row by the Kronecker power of H4, whose rows are 1 1 1 -1, 1 1 -1 1,
1 -1 1 1 and -1 1 1 1, halved; G is a power of 4. R is symmetric, and R R = 1. The product Q R is exact in float32, so
that a value is rounded once, when it is multiplied by the scale: the same bits everywhere. A layer need not decode W at
all, since x W^T = (x R) (Q s)^T. The policy int8 rounds x R to 8 bits too, each row by a
scale of its own, and multiplies whole numbers.
(ConvRot, https://arxiv.org/abs/2512.03673)

Q is stored in 8 bits; in 4; or in 4 or 6 bits, as levels times a scale for each small group, rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from qwenimg.common.base.shape import Shape
from qwenimg.common.quant.bits import widened
from qwenimg.common.quant.eight_bits import multiplied, table
from qwenimg.common.quant.quantized_tensor import QuantizedTensor, QuantStorage, unpack

if TYPE_CHECKING:
    import numpy as np

    from qwenimg.common.formats.stored import TensorSlice

H4 = ((0.5, 0.5, 0.5, -0.5), (0.5, 0.5, -0.5, 0.5), (0.5, -0.5, 0.5, 0.5), (-0.5, 0.5, 0.5, 0.5))
LARGEST = 4**8  # of a group: above, Q R may need more than the 24 bits of float32
MOST = 127  # of Q
IN_CACHE = 1 << 18  # values that are rotated at once
ROWS = 2048  # of an input that are rounded to 8 bits and multiplied at once


def is_group(size: int) -> bool:
    """Return whether `size` is a power of 4 by which values can be rotated."""
    return 4 <= size <= LARGEST and size & (size - 1) == 0 and size.bit_length() % 2 == 1


def rotated(values: np.ndarray, group: int) -> np.ndarray:
    """Return `values` [rows in], float32, times R. Sums are in one order, so that the bits are the same everywhere."""
    import numpy as np

    result = np.array(values, np.float32)
    step = max(1, IN_CACHE // max(1, result.shape[1]))
    for start in range(0, len(result), step):
        part, run = result[start : start + step], 1
        while run < group:
            a, b, c, d = (part.reshape(-1, 4, run)[:, i] for i in range(4))
            half = ((a + b) + (c + d)) * np.float32(0.5)
            a[...], b[...], c[...], d[...] = half - d, half - c, half - b, half - a
            run *= 4
    return result


class RotatedInt8(NamedTuple):
    """Q in 8 bits, by whose rotation layers turn their input. Its pieces are Q, I8 [out in], and the scale: one, or
    [out] or [out 1]."""

    rotation: int  # values of a group

    @property
    def bits(self) -> int:
        return 8

    def shape(self, pieces: Sequence[TensorSlice]) -> Shape:
        return pieces[0].shape

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return W, float32, of Q, also as the words of a `QuantizedTensor`, and its scale."""
        return _decoded(arrays[0].view("i1"), arrays[1], self.rotation)

    def storage(self, pieces: Sequence[TensorSlice]) -> QuantStorage[RotatedInt8]:
        return QuantStorage(self, 4)

    def quantized_tensor(self, arrays: Sequence[np.ndarray], shape: Shape) -> QuantizedTensor:
        return _stored(arrays[0], arrays[1])

    def fits(self, shape: Shape) -> bool:
        """Return whether a weight of this shape can be quantized so: a matrix whose rows are whole groups."""
        return len(shape) == 2 and shape[1] % self.rotation == 0

    def nbytes(self, shape: Shape, scale: int = 4) -> int:
        rows, width = shape
        return rows * (width + scale)

    def encode(self, weight: np.ndarray) -> QuantizedTensor:
        """Return `weight` [out in], float32, in this code: the largest value of a row on the largest of Q."""
        import numpy as np

        turned = rotated(weight, self.rotation)
        scales = np.abs(turned).max(1, keepdims=True, initial=0) / np.float32(MOST)
        codes = np.rint(turned / np.where(scales > 0, scales, np.float32(1)))
        return _stored(np.clip(codes, -MOST, MOST).astype(np.int8), scales)


class RotatedInt4(NamedTuple):
    """Q in 4 bits, two of a row in a byte, the first in the low one. Its pieces are the bytes, I8 [out in/2], and the
    scale as for `RotatedInt8`."""

    rotation: int

    @property
    def bits(self) -> int:
        return 4

    def shape(self, pieces: Sequence[TensorSlice]) -> Shape:
        rows, width = pieces[0].shape
        return (rows, width * 2)

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return _decoded(self._whole(arrays[0]), arrays[1], self.rotation)

    def storage(self, pieces: Sequence[TensorSlice]) -> QuantStorage[RotatedInt8]:
        return QuantStorage(RotatedInt8(self.rotation), 4)

    def quantized_tensor(self, arrays: Sequence[np.ndarray], shape: Shape) -> QuantizedTensor:
        return _stored(self._whole(arrays[0]), arrays[1])

    def _whole(self, packed: np.ndarray) -> np.ndarray:
        """Return Q, int8 [out in]."""
        import numpy as np

        return (unpack(packed, 4) ^ np.uint8(8)).view(np.int8) - np.int8(8)


class RotatedLevels(NamedTuple):
    """Q as level * scale of a group, rounded to a whole number of at most 127. Its pieces are the codes, I8 [out
    in*bits/8]; the scales of groups, E4M3 or float32 [out in/group]; the scales of rows [out]; and perhaps 16 levels.

    Without levels a code stands for its distance from the middle. In 6 bits a row has all low halves of 4 bits, then
    all high ones of 2.
    """

    rotation: int
    bits: int  # 4 or 6

    def shape(self, pieces: Sequence[TensorSlice]) -> Shape:
        rows, width = pieces[0].shape
        return (rows, width * 8 // self.bits)

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return _decoded(*self._whole(arrays), self.rotation)

    def storage(self, pieces: Sequence[TensorSlice]) -> QuantStorage[RotatedInt8]:
        return QuantStorage(RotatedInt8(self.rotation), 4)

    def quantized_tensor(self, arrays: Sequence[np.ndarray], shape: Shape) -> QuantizedTensor:
        return _stored(*self._whole(arrays))

    def _whole(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return Q, int8 [out in], and the scales of rows, float32, NaN where a row has a level or scale that is
        not finite."""
        import numpy as np

        packed, groups, rows, *levels = arrays
        width = packed.shape[1] * 8 // self.bits
        codes = unpack(packed[:, : width // 2], 4)
        if self.bits == 6:
            codes = codes | unpack(packed[:, width // 2 :], 2) << np.uint8(4)
        if levels:
            values: np.ndarray = widened(levels[0]).reshape(-1)[codes]
        else:
            values = codes.astype(np.float32) - np.float32(1 << (self.bits - 1))
        scales = table("F8_E4M3")[groups] if groups.dtype == np.uint8 else widened(groups)
        with np.errstate(over="ignore", invalid="ignore"):
            values.reshape(*scales.shape, -1)[...] *= scales[..., None]
        finite = np.isfinite(values).all(1)
        whole = np.clip(np.rint(np.where(finite[:, None], values, np.float32(0))), -MOST, MOST).astype(np.int8)
        return whole, np.where(finite, widened(rows).reshape(-1), np.float32(np.nan))


Rotated: TypeAlias = RotatedInt8 | RotatedInt4 | RotatedLevels


def _decoded(whole: np.ndarray, scale: np.ndarray, group: int) -> np.ndarray:
    """Return W of Q, int8 [out in], and its scale."""
    return multiplied(rotated(whole, group), scale)


def _stored(whole: np.ndarray, scale: np.ndarray) -> QuantizedTensor:
    """Return Q, int8 [out in], as words, with a scale [out 1] for every row."""
    import numpy as np

    scales = np.broadcast_to(widened(scale).reshape(-1, 1), (len(whole), 1))
    return QuantizedTensor(np.ascontiguousarray(whole).view("<u4"), scales.copy())
