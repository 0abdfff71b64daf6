"""Weights in 4 bits whose groups share a scale and the value of the middle code: ComfyUI's `awq_w4a16`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from qwenimg.common.base.shape import Shape
from qwenimg.common.quant.bits import widened
from qwenimg.common.quant.quantized_tensor import unpack

if TYPE_CHECKING:
    import numpy as np

    from qwenimg.common.formats.stored import TensorSlice

MIDDLE = 8  # of the sixteen codes


class ZeroPoints(NamedTuple):
    """Codes of 4 bits, two of a row in a byte, the first in the low half. Each `group` of them shares a scale and a
    zero point. Its pieces are the bytes, I8 [out in/2], scales and zero points [in/group out]."""

    group: int

    def shape(self, pieces: Sequence[TensorSlice]) -> Shape:
        """Return the shape of the values; () if the pieces do not go together, such as of a part of the rows."""
        rows, width = pieces[0].shape
        wanted = (width * 2 // self.group, rows)
        return (rows, width * 2) if all(piece.shape == wanted for piece in pieces[1:]) else ()

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return float32(code - 8) * float32(scale) + float32(zero point), in float32."""
        import numpy as np

        codes, scales, zeros = arrays
        values = unpack(codes, 4).astype(np.float32) - np.float32(MIDDLE)
        grouped = values.reshape(len(values), -1, self.group)
        with np.errstate(over="ignore", invalid="ignore"):  # a later check refuses values that are not finite
            grouped *= widened(scales).T[..., None]
            grouped += widened(zeros).T[..., None]
        return values
