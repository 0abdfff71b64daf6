"""The pictures that Qwen-Image-2.1 sees: each in one size, for its VAE with alpha and for its text encoder on white."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.numbers import sizes
from qwenimg.common.pictures import patches, pixels
from qwenimg.common.pictures.pixels import Uint8

MOST = 10  # pictures, by the model's card
AREA = 1024**2  # pixels of a picture as it is seen, and of an image whose size is not given


def size(picture: Uint8) -> tuple[int, int]:
    """Return width and height in which `picture` is seen, as diffusers has it: its area does not depend on the image
    that is made. Raises UsageError for a picture that is too narrow."""
    height, width = picture.shape[:2]
    patches.check_aspect(width, height)
    return sizes.of_area(AREA, width, height)


def seen(picture: Uint8) -> Uint8:
    """Return `picture` [H, W, 3 or 4] in the size in which it is seen, with alpha."""
    return pixels.fit(pixels.with_alpha(picture), *size(picture))


def values(picture: Uint8) -> NDArray[np.float32]:
    """Return `picture` for the VAE, as [1, 4, h, w] in -1..1."""
    return pixels.from_uint8(seen(picture))


def copy(picture: Uint8) -> Uint8:
    """Return `picture` as the text encoder sees it."""
    return pixels.over_white(seen(picture))
