"""The picture that Flux.2 sees besides the text, in a size that its VAE takes."""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.pictures import pixels
from qwenimg.common.request.request import MULTIPLE

MOST = 10  # references; a prompt of 512 tokens and these fit into no table that is too small
LARGEST = 1024**2  # pixels; a larger picture is made smaller


def size(width: int, height: int) -> tuple[int, int]:
    """Return the width and height to which a reference picture of width x height is scaled, as diffusers does.
    Raises UsageError for a picture that is too narrow."""
    inner = [side // MULTIPLE * MULTIPLE for side in _within(width, height)]
    if not all(inner):
        raise UsageError(f"a picture of {width}x{height} is too narrow: give {MULTIPLE} pixels or more a side")
    return inner[0], inner[1]


def values(picture: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the middle of a picture [H, W, 3], made smaller if it is large, as [1, 3, h, w] in -1..1."""
    height, width = picture.shape[:2]
    columns, rows = size(width, height)
    width, height = _within(width, height)
    left, top = (width - columns) // 2, (height - rows) // 2
    return pixels.from_uint8(pixels.fit(picture, width, height)[top : top + rows, left : left + columns])


def _within(width: int, height: int) -> tuple[int, int]:
    """Return a size of about the same aspect and at most `LARGEST` pixels."""
    scale = sqrt(LARGEST / (width * height))
    return (width, height) if scale >= 1 else (int(width * scale), int(height * scale))
