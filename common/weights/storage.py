"""How a parameter is kept in memory, and what it then takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from qwenimg.common.base.shape import Shape

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Dense:
    """One number of `dtype`, named as torch and MLX name it, for each value."""

    dtype: str

    def nbytes(self, shape: Shape) -> int:
        return prod(shape) * BYTES[self.dtype]
