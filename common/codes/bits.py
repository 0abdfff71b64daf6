"""Between float32 and what numpy holds of a file's numbers: bfloat16 as its bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def widened(array: np.ndarray) -> np.ndarray:
    """float32 of float16, of float32 as it is, and of uint16, which holds the bits of bfloat16."""
    import numpy as np

    if array.dtype == np.uint16:
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype(np.float32, copy=False)


def narrowed(array: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded once to float16, bfloat16 (its bits, uint16) or float32; what is too large becomes infinite."""
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
    """Of each number of a file whether it is finite."""
    import numpy as np

    found: np.ndarray = (array & 0x7F80) != 0x7F80 if array.dtype == np.uint16 else np.isfinite(array)
    return found
