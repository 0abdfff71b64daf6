"""The pictures that control networks keep to, made of a picture without a network of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image, ImageFilter

from qwenimg.common.pictures import canny
from qwenimg.common.pictures.pixels import Uint8

DARK = 127  # of 255: a pixel with a channel below is a line of a drawing
SQUARE = 64  # pixels: the side of a square of the palette, as in the adapters' own program
BLUR = 9  # pixels: the deviation of the blur, as in AUTOMATIC1111's extension


def scribble(picture: Uint8) -> Uint8:
    """Return the dark lines of a drawing [H, W, 3], white on black."""
    lines = picture.min(axis=2, keepdims=True) < DARK
    return np.repeat(np.where(lines, np.uint8(255), np.uint8(0)), 3, axis=2)


def invert(picture: Uint8) -> Uint8:
    """Return the negative of a picture [H, W, 3]: white lines on black, of black lines on white."""
    return np.uint8(255) - picture


def grey(picture: Uint8) -> Uint8:
    """Return the luminance (ITU-R 601-2) of a picture [H, W, 3] in all channels."""
    return np.asarray(Image.fromarray(picture).convert("L").convert("RGB"))


def blur(picture: Uint8) -> Uint8:
    """Return a picture [H, W, 3] with a Gaussian blur of BLUR pixels."""
    return np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(BLUR)))


def palette(picture: Uint8) -> Uint8:
    """Return a picture [H, W, 3] as squares of one colour, 64 pixels wide: its colours, without its shapes."""
    height, width = picture.shape[:2]
    squares = (max(1, round(width / SQUARE)), max(1, round(height / SQUARE)))
    small = Image.fromarray(picture).resize(squares, Image.Resampling.BICUBIC)
    return np.asarray(small.resize((width, height), Image.Resampling.NEAREST))


PREPROCESSORS: Mapping[str, Callable[[Uint8], Uint8]] = {
    "canny": canny.edges,
    "scribble": scribble,
    "invert": invert,
    "grey": grey,
    "blur": blur,
    "colour": palette,
}
"""By the names before `@` in `--control`."""
