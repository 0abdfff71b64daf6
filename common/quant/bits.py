"""Conversion between float32 and a file's numbers in numpy, where bfloat16 is its bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def widened(array: np.ndarray) -> np.ndarray:
    """Return float16, float32 or bfloat16 (its bits, uint16) as float32."""
    import numpy as np

    if array.dtype == np.uint16:
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype(np.float32, copy=False)


def narrowed(array: np.ndarray, dtype: str) -> np.ndarray:
    """Round float32 once to float16, bfloat16 (its bits, uint16) or float32; a value that is too large becomes
    infinite."""
    import numpy as np

    if dtype == "float32":
        return array
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16)
    assert dtype == "bfloat16", dtype
    bits = np.ascontiguousarray(array).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16  # ties to even
    return np.where(np.isnan(array), np.uint32(0x7FC0), nearest).astype(np.uint16)


def finite(array: np.ndarray) -> np.ndarray:
    """Return for each number of a file whether it is finite."""
    import numpy as np

    mask: np.ndarray = (array & 0x7F80) != 0x7F80 if array.dtype == np.uint16 else np.isfinite(array)
    return mask
