"""The picture that LongCat-Image-Edit sees: as its VAE takes it, and in half the size as its text encoder does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.numbers import sizes
from qwenimg.common.pictures import patches, pixels
from qwenimg.common.pictures.pixels import Uint8

AREA = 1024**2  # pixels of a picture for the VAE, and of an image whose size is not given


def size(picture: Uint8) -> tuple[int, int]:
    """Return width and height of `picture` for the VAE. Raises UsageError for one that is too narrow."""
    height, width = picture.shape[:2]
    patches.check_aspect(width, height)
    return sizes.over_area(AREA, width, height)


def values(picture: Uint8) -> NDArray[np.float32]:
    """Return `picture` [H, W, 3] for the VAE, as [1, 3, h, w] in -1..1."""
    return pixels.from_uint8(pixels.fit(picture, *size(picture)))


def copy(picture: Uint8) -> Uint8:
    """Return `picture` as patches are made of it: in half the VAE's size, made of what the VAE takes."""
    width, height = size(picture)
    return pixels.fit(pixels.fit(picture, width, height), width // 2, height // 2)
