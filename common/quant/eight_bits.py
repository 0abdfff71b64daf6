"""Weights as 8-bit codes: floating point numbers or signed integers, with one scale for all, for each row, or for
each of the equal blocks of a row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from qwenimg.common.base.shape import Shape
from qwenimg.common.quant.bits import widened

if TYPE_CHECKING:
    import numpy as np

    from qwenimg.common.formats.stored import TensorSlice

Format = Literal["F8_E4M3", "F8_E5M2", "I8"]
FORMATS: tuple[Format, ...] = ("F8_E4M3", "F8_E5M2")  # the floating point ones


def format_of(dtype: str) -> Format | None:
    """Return the 8-bit float format that a file calls `dtype`, or None."""
    return next((format for format in FORMATS if format == dtype), None)


class EightBits(NamedTuple):
    """A code of 8 bits. Its pieces are the codes and, if there is a second one, their scale: one number, one for
    each row [out] or [out 1], or one for each block [out blocks 1]."""

    format: Format

    def shape(self, pieces: Sequence[TensorSlice]) -> Shape:
        return pieces[0].shape

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return float32(code) * float32(scale), in float32."""
        decoded: np.ndarray = table(self.format)[arrays[0].view("uint8")]
        return multiplied(decoded, *arrays[1:])


def multiplied(values: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """Multiply `values`, float32, in place by a scale as `EightBits` describes it, and return them."""
    import numpy as np

    if scale is None:
        return values
    numbers = widened(scale)
    by, into = numbers.reshape(()) if numbers.size == 1 else numbers, values
    if numbers.ndim == 3:
        by, into = numbers, values.reshape(*numbers.shape[:2], -1)
    elif numbers.size > 1:
        by = numbers.reshape(-1, *[1] * (values.ndim - 1))
    with np.errstate(over="ignore", invalid="ignore"):  # a later check refuses values that are not finite
        into *= by
    return values


@cache
def table(format: Format) -> np.ndarray:
    """Return the float32 value of each of the 256 codes. E4M3 has no infinity: all codes but two, the NaNs, are
    numbers."""
    import numpy as np

    if format == "I8":
        return np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
    mantissa_bits, bias = (3, 7) if format == "F8_E4M3" else (2, 15)
    codes = np.arange(256)
    exponent = (codes >> mantissa_bits) & (2 ** (7 - mantissa_bits) - 1)
    mantissa = codes & (2**mantissa_bits - 1)
    normal = np.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits)
    values = np.where(exponent > 0, normal, np.ldexp(mantissa, 1 - bias - mantissa_bits))
    if format == "F8_E4M3":
        values = np.where((codes & 127) == 127, np.nan, values)
    else:
        values = np.where(exponent == 31, np.where(mantissa > 0, np.nan, np.inf), values)
    return np.where(codes > 127, -values, values).astype(np.float32)
