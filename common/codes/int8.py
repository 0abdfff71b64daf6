"""Weights as signed 8-bit integers with a scale for all of them, or for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwenimg.common.base.shape import Shape
from qwenimg.common.codes.float8 import multiplied

if TYPE_CHECKING:
    import numpy as np

    from qwenimg.common.codes.affine import Coded
    from qwenimg.common.formats.stored import Piece


@dataclass(frozen=True)
class Int8:
    """Codes, and their scale as `Float8` has it."""

    def shape(self, pieces: Sequence[Piece]) -> Shape:
        return pieces[0].shape

    def kept(self, pieces: Sequence[Piece]) -> None:
        """They are decoded."""

    def coded(self, arrays: Sequence[np.ndarray], shape: Shape) -> Coded:
        raise AssertionError("its codes are decoded")

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """float32(code) * float32(scale), in float32."""
        import numpy as np

        codes, scale = arrays
        return multiplied(codes.astype(np.float32), scale)
