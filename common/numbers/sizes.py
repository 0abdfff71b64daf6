"""Sizes of images in pixels: by aspect, rendered and cropped."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

MAX_SIDE = 16384

Shape = tuple[int, int, int]
"""(frames, rows, columns) of an image in tokens; a token is 16 x 16 pixels."""

MAX_ASPECT = 100  # longer side by shorter side
BLOCK = 32  # pixels of which pictures that a model sees have whole numbers a side


def ceil_to(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def render_size(width: int, height: int, multiple: int = 16) -> tuple[int, int]:
    """Return width and height to render; the size is cropped from it at the right and bottom. Raises UsageError."""
    _check_size(width, height)
    return ceil_to(width, multiple), ceil_to(height, multiple)


def parse_size(text: str) -> tuple[int, int]:
    """Return width and height of `1664x928`, or of `512`, a square. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,9})(?:[xX]([0-9]{1,9}))?", text.strip())
    if match is None:
        raise UsageError(f"size {clean(text, 40)!r} is not WIDTHxHEIGHT in pixels, such as 1664x928, nor one side")
    width, height = int(match[1]), int(match[2] or match[1])
    _check_size(width, height)
    return width, height


def parse_aspect(text: str) -> Fraction:
    """Return width by height of `16:9`. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]{1,4})?):([0-9]{1,4}(?:\.[0-9]{1,4})?)", text.strip())
    if match is None or not Fraction(match[1]) or not Fraction(match[2]):
        raise UsageError(f"aspect {clean(text, 40)!r} is not WIDTH:HEIGHT, such as 16:9")
    aspect = Fraction(match[1]) / Fraction(match[2])
    if max(aspect, 1 / aspect) > MAX_ASPECT:
        raise UsageError(f"aspect {text.strip()} is outside 1:{MAX_ASPECT} to {MAX_ASPECT}:1")
    return aspect


def aspect_size(aspect: Fraction, area: int) -> tuple[int, int]:
    """Return width and height in multiples of 16, nearest to `aspect`, and of those nearest to `area` pixels."""
    ratio = float(aspect)
    width, height = math.sqrt(area * ratio), math.sqrt(area / ratio)

    def error(size: tuple[int, int]) -> tuple[float, float]:
        return abs(math.log(size[0] / size[1] / ratio)), abs(math.log(size[0] * size[1] / area))

    return min(itertools.product(_neighbours(width), _neighbours(height)), key=error)


def of_area(area: int, width: int, height: int) -> tuple[int, int]:
    """Return width and height of about `area` pixels in the proportions of width x height, each the nearest multiple of
    BLOCK, at least that, as diffusers has it for the pictures of Qwen-Image-Edit."""
    ratio = width / height
    wide = math.sqrt(area * ratio)
    wide_blocks, high_blocks = (max(1, round(side / BLOCK)) for side in (wide, wide / ratio))
    return wide_blocks * BLOCK, high_blocks * BLOCK


def over_area(area: int, width: int, height: int) -> tuple[int, int]:
    """Return width and height of at least `area` pixels in the proportions of width x height, each the next multiple of
    16, as diffusers has it for LongCat-Image-Edit."""
    ratio = width / height
    wide = math.sqrt(area * ratio)
    across, down = (math.ceil(side / 16) * 16 for side in (wide, wide / ratio))
    return across, down


def _neighbours(side: float) -> tuple[int, int]:
    below = max(16, int(side) // 16 * 16)
    return below, below + 16


def _check_size(width: int, height: int) -> None:
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise UsageError(f"size {clean(width, 40)}x{clean(height, 40)} is outside 1 to {MAX_SIDE} pixels a side")
