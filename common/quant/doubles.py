"""Weights in 64-bit floats, as some programs that merge models write them: rounded once to float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from qwenimg.common.base.shape import Shape

if TYPE_CHECKING:
    import numpy as np

    from qwenimg.common.formats.stored import TensorSlice

DTYPE = "F64"


class Doubles(NamedTuple):
    """A code of one number for each value, of 64 `bits`."""

    bits: int = 64

    def shape(self, pieces: Sequence[TensorSlice]) -> Shape:
        return pieces[0].shape

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the nearest values in float32; a later check refuses those that are not finite."""
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):
            return arrays[0].view("<f8").astype(np.float32)
