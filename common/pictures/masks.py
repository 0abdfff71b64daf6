"""Masks of a picture: blurred, and filled; and the masked area alone, cut out of a picture and put back into it.

Names and formulas follow AUTOMATIC1111's web UI. The area and its scaling also equal diffusers' `padding_mask_crop`,
pixel by pixel."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.pictures.pixels import ROWS, Uint8, fit, has_alpha, with_alpha

MOST_SCALED = 4  # times as many pixels as are drawn or seen that an image may have while it is put back
_REACH = 2.5  # standard deviations after which a blur is cut off, as OpenCV's caller has it there
# Radii of the blurs that fill a hole, from coarse to fine, and how often each is laid over the one before it.
_FILL = ((256, 1), (64, 1), (16, 2), (4, 4), (2, 2), (0, 1))


class Box(NamedTuple):
    """A part of a picture, in pixels."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def height(self) -> int:
        return self.bottom - self.top


def blurred(mask: Uint8, sigma: float) -> Uint8:
    """Return a mask [H, W] blurred by a Gaussian of `sigma` pixels, first along x, then along y, each rounded. Beyond
    the border the mask is mirrored."""
    reach = int(_REACH * sigma + 0.5)
    if not reach or not mask.any():
        return mask
    weights = np.array([math.exp(-((i / sigma) ** 2) / 2) for i in range(-reach, reach + 1)])
    weights /= weights.sum()
    return _along_rows(_along_rows(mask, weights, reach).T, weights, reach).T


def _along_rows(mask: Uint8, weights: NDArray[np.float64], reach: int) -> Uint8:
    smooth = np.empty_like(mask)
    for row, values in zip(smooth, mask, strict=True):
        row[:] = np.rint(np.convolve(np.pad(values.astype(np.float64), reach, mode="reflect"), weights, mode="valid"))
    return smooth


def filled(picture: Uint8, hole: Uint8) -> Uint8:
    """Return a picture [H, W, C] whose masked part (`hole` [H, W] bright) is filled with the blurred colours around
    it."""
    from PIL import Image, ImageFilter

    around = Image.fromarray(np.dstack((picture[..., :3], 255 - hole))).convert("RGBa")
    result = Image.new("RGBA", around.size)
    for radius, times in _FILL:
        layer = around.filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(times):
            result.alpha_composite(layer)
    colours = np.asarray(result.convert("RGB"))
    return np.dstack((colours, np.maximum(picture[..., 3], hole))) if has_alpha(picture) else colours


def area(mask: Uint8, padding: int, width: int, height: int) -> Box | None:
    """Return the box around the mask [H, W] with `padding` pixels on each side, widened to the proportions of width x
    height within the picture; None if the mask is black."""
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    if not len(columns):
        return None
    most_rows, most_columns = mask.shape
    left, right = max(int(columns[0]) - padding, 0), min(int(columns[-1]) + 1 + padding, most_columns)
    top, bottom = max(int(rows[0]) - padding, 0), min(int(rows[-1]) + 1 + padding, most_rows)
    wanted = width / height  # in floats, as there: the sides are cut to whole pixels
    if (right - left) / (bottom - top) > wanted:
        top, bottom = _extended(top, bottom, int((right - left) / wanted), most_rows)
    else:
        left, right = _extended(left, right, int((bottom - top) * wanted), most_columns)
    return Box(left, top, right, bottom)


def _extended(begin: int, end: int, length: int, most: int) -> tuple[int, int]:
    """Return begin and end of `length` pixels around the middle of those given, moved and cut to lie in `most`."""
    begin -= (max(length, end - begin) - (end - begin)) // 2
    length = min(max(length, end - begin), most)
    begin = min(max(begin, 0), most - length)
    return begin, begin + length


def cut(picture: Uint8, box: Box, width: int, height: int) -> Uint8:
    """Return the part [H, W] or [H, W, C] of a picture, scaled into width x height; what the proportions leave free is
    filled with the colours of its borders."""
    from PIL import Image

    part = np.ascontiguousarray(picture[box.top : box.bottom, box.left : box.right])
    wide = width * box.height < height * box.width
    columns = width if wide else max(1, box.width * height // box.height)
    rows = max(1, box.height * width // box.width) if wide else height
    scaled = Image.fromarray(fit(part, columns, rows))
    if (columns, rows) == (width, height):
        return np.asarray(scaled)
    left, top = width // 2 - columns // 2, height // 2 - rows // 2
    result = Image.new(scaled.mode, (width, height))
    result.paste(scaled, (left, top))
    if left:
        result.paste(scaled.resize((left, height), box=(0, 0, 0, height)), (0, 0))
        result.paste(scaled.resize((left, height), box=(columns, 0, columns, height)), (left + columns, 0))
    if top:
        result.paste(scaled.resize((width, top), box=(0, 0, width, 0)), (0, 0))
        result.paste(scaled.resize((width, top), box=(0, rows, width, rows)), (0, top + rows))
    return np.asarray(result)


def put_back(picture: Uint8, drawn: Uint8, box: Box, mask: Uint8) -> Uint8:
    """Return a picture with what was `drawn` of its part, scaled to cover that: all of it where the mask [H, W] is
    255, nothing where it is 0, in between by its value."""
    from PIL import Image

    height, width = drawn.shape[:2]
    wide = box.width * height > box.height * width
    columns = box.width if wide else width * box.height // height
    rows = height * box.width // width if wide else box.height
    left, top = columns // 2 - box.width // 2, rows // 2 - box.height // 2
    if columns * rows <= MOST_SCALED * max(box.width * box.height, width * height):
        part = fit(drawn, columns, rows)[top : top + box.height, left : left + box.width]
    else:  # to cover a strip, what is not seen could take any amount of memory
        seen = (left / columns, top / rows, (left + box.width) / columns, (top + box.height) / rows)
        within = (seen[0] * width, seen[1] * height, seen[2] * width, seen[3] * height)
        lanczos = Image.Resampling.LANCZOS
        part = np.asarray(Image.fromarray(drawn).resize((box.width, box.height), lanczos, box=within))
    if has_alpha(part) != has_alpha(picture):
        part, picture = with_alpha(part), with_alpha(picture)
    whole = picture.copy()
    for begin in range(0, box.height, ROWS):
        there = slice(box.top + begin, box.top + min(begin + ROWS, box.height)), slice(box.left, box.right)
        whole[there] = _blended(picture[there], part[begin : begin + ROWS], mask[there])
    return whole


def _blended(below: Uint8, above: Uint8, mask: Uint8) -> Uint8:
    share = mask.astype(np.float32)[..., None] / np.float32(255)
    over, under = share, 1 - share
    if has_alpha(below):  # colours count by their alpha
        over, under = share * above[..., 3:], (1 - share) * below[..., 3:]
    total = np.maximum(over + under, np.float32(1e-6))
    mixed = np.rint((over * above + under * below) / total).astype(np.uint8)
    if has_alpha(below):
        mixed[..., 3:] = np.rint(over + under)
    return np.where(mask[..., None] == 0, below, np.where(mask[..., None] == 255, above, mixed))
