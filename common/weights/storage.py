"""The storage of a parameter in memory, and the bytes that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from qwenimg.common.base.shape import Shape
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.quant.affine import Affine
from qwenimg.common.quant.block_float import BlockFloat
from qwenimg.common.quant.rotated import RotatedInt8

QuantFormat: TypeAlias = Affine | BlockFloat | RotatedInt8
"""The codes that a linear layer computes with."""


def rotation_of(code: QuantFormat) -> int:
    """Return how many values of a group a layer in this code rotates its input by; 0 without a rotation."""
    return 0 if isinstance(code, BlockFloat) else code.rotation


@dataclass(frozen=True)
class Dense:
    """Storage of one number of `dtype`, named as in torch and MLX, for each value."""

    dtype: str

    def nbytes(self, shape: Shape) -> int:
        return prod(shape) * BYTES[self.dtype]

    def computing(self, dtype: str, rounds: bool) -> Dense:
        return Dense(dtype)


@dataclass(frozen=True)
class Packed:
    """Storage of a linear layer's weight as codes, which are decoded to `dtype` when the layer computes."""

    code: QuantFormat
    dtype: str
    scale: int = 2  # bytes of a group's scale, and of its bias
    int8: bool = False  # whether the input is rounded to 8 bits too, and whole numbers are multiplied

    def nbytes(self, shape: Shape) -> int:
        return self.code.nbytes(shape, self.scale)

    def computing(self, dtype: str, rounds: bool) -> Packed:
        return Packed(self.code, dtype, self.scale, rounds and isinstance(self.code, RotatedInt8))


Storage = Dense | Packed
