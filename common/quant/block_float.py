"""Weights as 4- or 8-bit floats whose groups share an 8-bit float as scale: mxfp4, mxfp8 and nvfp4.

MLX's format: `weight` U32 as for affine codes, `scales` U8 [out, in / group], no biases. A code is E2M1 (sixteen
values) or E4M3, a scale a power of two (E8M0) or, for nvfp4, E4M3; a value is their product in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from qwenimg.common.base.shape import Shape
from qwenimg.common.quant.eight_bits import table
from qwenimg.common.quant.quantized_tensor import QuantizedTensor, QuantStorage, unpack

if TYPE_CHECKING:
    import numpy as np

    from qwenimg.common.formats.stored import TensorSlice

MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits of a code, and group
SCALES = ("U8", "F8_E8M0", "F8_E4M3")  # the names of the scales' dtype in files
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127


class BlockFloat(NamedTuple):
    """Floats of 4 or 8 bits; each group along a row shares a scale."""

    mode: str  # of MODES, which has the bits and the group

    @property
    def bits(self) -> int:
        return MODES[self.mode][0]

    @property
    def group(self) -> int:
        return MODES[self.mode][1]

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors stored with the codes."""
        return ("scales",)

    def shape(self, pieces: Sequence[TensorSlice]) -> Shape:
        *rows, words = pieces[0].shape
        return (*rows, words * 32 // self.bits)

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the float32 values of codes [out words] and scales [out groups]."""
        import numpy as np

        codes, scales = arrays
        levels = np.array(E2M1, np.float32) if self.bits == 4 else table("F8_E4M3")
        values: np.ndarray = levels[unpack(codes, self.bits)]
        with np.errstate(over="ignore", invalid="ignore"):
            values.reshape(*scales.shape, self.group)[...] *= self._scales(scales)[..., None]
        return values

    def storage(self, pieces: Sequence[TensorSlice]) -> QuantStorage[BlockFloat]:
        return QuantStorage(self, 1)

    def quantized_tensor(self, arrays: Sequence[np.ndarray], shape: Shape) -> QuantizedTensor:
        codes, scales = arrays
        return QuantizedTensor(codes, scales)

    def fits(self, shape: Shape) -> bool:
        """Return whether a weight of this shape can be quantized: a matrix whose rows divide into groups."""
        return len(shape) == 2 and shape[1] % self.group == 0

    def nbytes(self, shape: Shape, scale: int = 1) -> int:
        rows, width = shape
        return rows * (width * self.bits // 8 + width // self.group * scale)

    def _scales(self, scales: np.ndarray) -> np.ndarray:
        import numpy as np

        if self.mode == "nvfp4":
            factors: np.ndarray = table("F8_E4M3")[scales]
            return factors
        powers = np.ldexp(np.float32(1), np.arange(256) - E8M0_BIAS).astype(np.float32)
        powers[255] = np.nan
        scaled: np.ndarray = powers[scales]
        return scaled


def of_widths(width: int, words: int, groups: int) -> BlockFloat | None:
    """Return the only code with which rows of `width` values take this many words and groups, or None."""
    for mode, (bits, group) in MODES.items():
        if words * 32 == width * bits and groups * group == width and width:
            return BlockFloat(mode)
    return None
