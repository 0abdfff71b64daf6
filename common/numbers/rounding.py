"""Rounding of float32 to 16-bit formats; numpy has no bfloat16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def nearest(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Return `values` rounded to the nearest numbers of `dtype`, ties to even, as float32."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)
    return values
