"""8-bit images from decoded pixels, their size, and comparison. Pillow is imported when it is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qwenimg.common.base.errors import NumericsError

Uint8 = npt.NDArray[np.uint8]

ROWS = 256  # rows of a strip, where a second copy of a large image would take too much memory
HALF = 128  # a mask's value from which on the image is regenerated
BLANK_STD = 1.0  # of 255: below it the image is one colour to the eye
BLANK_CLIPPED = 0.99  # share of values at exactly 0 or 255


def to_uint8(pixels: npt.NDArray[Any]) -> Uint8:
    """Convert pixels [C, H, W] in -1..1, C 3 or 4, to [H, W, C] in 0..255, rounded half to even, clamped.

    The arithmetic equals diffusers' VaeImageProcessor, in float32. Raises NumericsError if a value is not finite."""
    assert pixels.ndim == 3 and pixels.shape[0] in (3, 4), pixels.shape
    broken = pixels.size - int(np.isfinite(pixels).sum())
    if broken:
        raise NumericsError(
            f"the decoded picture has {broken:,} of {pixels.size:,} values that are not finite; "
            "no file was written, try --precision fp32"
        )
    unit = np.clip(pixels.astype(np.float32) * 0.5 + 0.5, 0.0, 1.0)
    return np.ascontiguousarray((unit * 255.0).round().astype(np.uint8).transpose(1, 2, 0))


def from_uint8(pixels: Uint8) -> npt.NDArray[np.float32]:
    """Convert pixels [H, W, C] in 0..255 to [1, C, H, W] in -1..1."""
    unit = pixels.astype(np.float32) / np.float32(255)
    return np.ascontiguousarray((unit * np.float32(2) - np.float32(1)).transpose(2, 0, 1)[None])


def zero_to_one(pixels: Uint8) -> npt.NDArray[np.float32]:
    """Convert pixels [H, W, C] in 0..255 to [1, C, H, W] in 0..1."""
    return np.ascontiguousarray((pixels.astype(np.float32) / np.float32(255)).transpose(2, 0, 1)[None])


def has_alpha(pixels: Uint8) -> bool:
    """Return whether pixels are [H, W, 4]."""
    return pixels.ndim == 3 and pixels.shape[2:] == (4,)


def over_white(pixels: Uint8) -> Uint8:
    """Return [H, W, 4] as [H, W, 3] on white, strip by strip as Pillow blends; [H, W, 3] unchanged."""
    from PIL import Image

    if not has_alpha(pixels):
        return pixels
    opaque = np.empty((*pixels.shape[:2], 3), np.uint8)
    for top in range(0, len(pixels), ROWS):
        layer = Image.fromarray(np.ascontiguousarray(pixels[top : top + ROWS]))
        white = Image.new("RGB", layer.size, "white")
        opaque[top : top + ROWS] = np.asarray(Image.composite(layer.convert("RGB"), white, layer.getchannel("A")))
    return opaque


def with_alpha(pixels: Uint8) -> Uint8:
    """Return [H, W, 3] as [H, W, 4], opaque; [H, W, 4] unchanged."""
    if has_alpha(pixels):
        return pixels
    return np.concatenate((pixels, np.full((*pixels.shape[:2], 1), 255, np.uint8)), axis=2)


def composed(layers: Sequence[Uint8]) -> Uint8:
    """Return layers [H, W, 4] as one [H, W, 4], each over those before it."""
    from PIL import Image

    below, *others = (Image.fromarray(np.ascontiguousarray(layer)) for layer in layers)
    for layer in others:
        below = Image.alpha_composite(below, layer)
    return np.asarray(below)


def fit(pixels: Uint8, width: int, height: int) -> Uint8:
    """Resample [H, W] or [H, W, C] to `width` x `height` as diffusers does; return it unchanged if it has that size.
    Colours are weighted by alpha, so that transparent pixels do not bleed into others."""
    from PIL import Image

    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


def nearest(pixels: Uint8, width: int, height: int) -> Uint8:
    """Resample [H, W, C] to `width` x `height` by the nearest pixel."""
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST))


def extend(pixels: npt.NDArray[Any], width: int, height: int) -> npt.NDArray[Any]:
    """Pad [h, w, ...] to `height` x `width` by repeating its last row and column."""
    down, right = height - pixels.shape[0], width - pixels.shape[1]
    return np.pad(pixels, ((0, down), (0, right), *[(0, 0)] * (pixels.ndim - 2)), mode="edge")


def shares(values: npt.NDArray[Any], rows: int, columns: int) -> npt.NDArray[np.float64]:
    """Return the means of [H W] over rows x columns parts, of which each is as large as others to a pixel."""
    means: npt.NDArray[Any] = values
    for axis, count in enumerate((rows, columns)):
        starts = np.arange(count) * means.shape[axis] // count
        each = np.diff([*starts, means.shape[axis]])
        means = np.add.reduceat(means, starts, axis=axis) / (each[:, None] if axis == 0 else each)
    return means


def crop(pixels: Uint8, width: int, height: int, left: int = 0, top: int = 0) -> Uint8:
    """Return `width` x `height` of [H, W, C] from `left` and `top` on."""
    assert 0 < height <= pixels.shape[0] - top and 0 < width <= pixels.shape[1] - left, (pixels.shape, width, height)
    return np.ascontiguousarray(pixels[top : top + height, left : left + width])


def psnr(a: Uint8, b: Uint8) -> float:
    """Return the peak signal-to-noise ratio of two images in dB; infinite for the same pixels."""
    return decibels(float(np.mean((a.astype(np.float64) - b) ** 2)))


def decibels(error: float) -> float:
    """Return the PSNR in dB for a mean square error on a scale of 0..255; infinite for 0."""
    return 10 * math.log10(255**2 / error) if error else math.inf


def blank_warning(pixels: Uint8) -> str | None:
    """Return a warning if [H, W, C] is one flat colour or nearly all clipped, else None. Alpha is ignored."""
    colour = pixels[..., :3]
    std = float(colour.std())
    if std < BLANK_STD:
        return f"the picture is blank: the standard deviation of its values is {std / 255:.5f} (full scale 1)"
    clipped = float(((colour == 0) | (colour == 255)).mean())
    if clipped >= BLANK_CLIPPED:
        return f"the picture is clipped: {clipped:.1%} of its values are exactly 0 or 255"
    return None
