"""What numpy holds of a file's numbers, in float32."""

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
