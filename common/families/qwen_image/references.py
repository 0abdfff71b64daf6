"""The pictures that Qwen-Image-Edit sees: each once as its VAE takes it, and once as its text encoder does.

Their sizes depend on their proportions alone, not on the size of the image that is made.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.numbers import sizes
from qwenimg.common.pictures import patches, pixels
from qwenimg.common.pictures.pixels import Uint8

AREA = 1024**2  # pixels of a picture for the VAE, and of an image whose size is not given


def size(picture: Uint8, area: int | None = None) -> tuple[int, int]:
    """Return width and height of `picture` in about `area` pixels for the VAE, as diffusers has it; None: AREA. Raises
    UsageError for one that is too narrow."""
    height, width = picture.shape[:2]
    patches.check_aspect(width, height)
    return sizes.of_area(AREA if area is None else area, width, height)


def values(picture: Uint8) -> NDArray[np.float32]:
    """Return `picture` [H, W, 3] for the VAE, as [1, 3, h, w] in -1..1."""
    return pixels.from_uint8(pixels.fit(picture, *size(picture)))


def copy(picture: Uint8, area: int) -> Uint8:
    """Return `picture` in the size of about `area` pixels from which the text encoder's patches are made."""
    height, width = picture.shape[:2]
    return pixels.fit(picture, *sizes.of_area(area, width, height))
