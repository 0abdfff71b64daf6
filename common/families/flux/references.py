"""The picture that FLUX.1 Kontext sees besides the text, in one of the sizes that it was trained with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.pictures import pixels
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.request.request import MULTIPLE

SIZES = (
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
    (1024, 1024),
    (1104, 944),
    (1184, 880),
    (1248, 832),
    (1328, 800),
    (1392, 752),
    (1456, 720),
    (1504, 688),
    (1568, 672),
)
"""Width and height in pixels of about a megapixel, as in diffusers."""


def size(picture: Uint8) -> tuple[int, int]:
    """Return width and height in which `picture` is seen: the pair of SIZES with the most similar proportions.
    Raises UsageError for a picture that is too narrow."""
    height, width = (side // MULTIPLE for side in picture.shape[:2])
    if not (width and height):
        shown = "x".join(map(str, picture.shape[1::-1]))
        raise UsageError(f"a picture of {shown} is too narrow: give {MULTIPLE} pixels or more a side")
    _, *nearest = min((abs(width / height - one / other), one, other) for one, other in SIZES)
    return nearest[0], nearest[1]


def values(picture: Uint8) -> NDArray[np.float32]:
    """Return `picture` [H, W, 3] for the VAE, as [1, 3, h, w] in -1..1."""
    return pixels.from_uint8(pixels.fit(picture, *size(picture)))
