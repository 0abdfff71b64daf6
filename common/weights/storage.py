"""How a parameter is kept in memory, and what it then takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from qwenimg.common.base.shape import Shape
from qwenimg.common.codes.affine import Affine
from qwenimg.common.codes.block_float import BlockFloat
from qwenimg.common.precision.precision import BYTES

Codes: TypeAlias = Affine | BlockFloat
"""What a linear layer's weight may be kept in."""


@dataclass(frozen=True)
class Dense:
    """One number of `dtype`, named as torch and MLX name it, for each value."""

    dtype: str

    def nbytes(self, shape: Shape) -> int:
        return prod(shape) * BYTES[self.dtype]

    def computing(self, dtype: str) -> Dense:
        return Dense(dtype)


@dataclass(frozen=True)
class Packed:
    """The codes of a linear layer's weight, decoded to `dtype` when the layer computes."""

    code: Codes
    dtype: str
    scale: int = 2  # bytes of a group's scale, and of its bias

    def nbytes(self, shape: Shape) -> int:
        return self.code.nbytes(shape, self.scale)

    def computing(self, dtype: str) -> Packed:
        return Packed(self.code, dtype, self.scale)


Storage = Dense | Packed
