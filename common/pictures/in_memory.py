"""Conversion of images and masks that a Python caller passes as PIL images to the arrays of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.pictures import input_pixels
from qwenimg.common.pictures.input import MAX_PIXELS, MAX_SIDE
from qwenimg.common.pictures.pixels import Uint8

if TYPE_CHECKING:
    from PIL.Image import Image


def srgb(name: str, picture: Image) -> tuple[Uint8, list[str]]:
    """Return `picture` as uint8 [H, W, 3] in sRGB, or [H, W, 4] if parts are transparent, and a line for each way in
    which it was converted. `name`: the option's name. Raises UsageError."""
    return _converted(name, picture, input_pixels.srgb)


def mask(name: str, picture: Image) -> tuple[Uint8, list[str]]:
    """Return the mask that `picture` shows as uint8 [H, W], and lines as `srgb` does. Raises UsageError."""
    return _converted(name, picture, input_pixels.mask)


def fitted(name: str, mask: Uint8, like: Uint8) -> tuple[Uint8, list[str]]:
    """Return `mask` at the size of the image `like`, and lines as `srgb` does."""
    mask, notes = input_pixels.fitted(mask, like)
    return mask, [f"{name} {line}" for line in notes]


def _converted(
    name: str, picture: Image, convert: Callable[[Image], tuple[Uint8, list[str]]]
) -> tuple[Uint8, list[str]]:
    width, height = picture.size
    if not 0 < width * height <= MAX_PIXELS or max(width, height) > MAX_SIDE:
        limit = f"{MAX_PIXELS // 1_000_000} megapixels and {MAX_SIDE:,} a side"
        raise UsageError(f"{name} is {width}x{height}; expected at least one pixel and at most {limit}")
    try:
        pixels, notes = convert(picture)
    except ModelError as error:
        raise UsageError(f"{name} {error}") from None
    # An image that was opened and not loaded is decoded here, and Pillow's decoders raise errors of many types.
    except Exception as error:
        raise UsageError(f"{name} is a PIL image that cannot be read: {clean(error, 80)}") from None
    return np.ascontiguousarray(pixels), [f"{name} {line}" for line in notes]
