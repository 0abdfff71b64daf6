"""Pictures as a vision tower takes them: in a size of whole blocks of patches, normalized, one row for each patch.

The arithmetic equals transformers' Qwen2VLImageProcessor on Pillow, to the last bit."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.pictures.pixels import Uint8

MAX_ASPECT = 200  # longer side by shorter side


class PictureForm(NamedTuple):
    """The form in which a vision tower takes pictures: the fewest and the most pixels, and the mean and the standard
    deviation of each channel in 0..1, which are removed."""

    least: int
    most: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


QWEN2_VL = PictureForm(
    least=56 * 56,
    most=12_845_056,
    mean=(0.48145466, 0.4578275, 0.40821073),  # of CLIP's training pictures
    std=(0.26862954, 0.26130258, 0.27577711),
)
QWEN3_VL = PictureForm(least=256 * 256, most=4096 * 4096, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def check_aspect(width: int, height: int) -> None:
    """Raise UsageError for a picture that is too narrow."""
    if not min(width, height) or max(width, height) > MAX_ASPECT * min(width, height):
        raise UsageError(f"a picture of {width}x{height} is too narrow: one side may be {MAX_ASPECT} times the other")


def whole_blocks(width: int, height: int, block: int, form: PictureForm) -> tuple[int, int]:
    """Return the size nearest to width x height in multiples of `block` pixels, with a number of pixels that `form`
    allows. Raises UsageError for too elongated a picture."""
    check_aspect(width, height)
    sides = [round(side / block) * block for side in (width, height)]
    if math.prod(sides) > form.most:
        scale = math.sqrt(width * height / form.most)
        sides = [max(block, math.floor(side / scale / block) * block) for side in (width, height)]
    elif math.prod(sides) < form.least:
        scale = math.sqrt(form.least / (width * height))
        sides = [math.ceil(side * scale / block) * block for side in (width, height)]
    return sides[0], sides[1]


def _normalized(picture: Uint8, form: PictureForm) -> NDArray[np.float32]:
    unit = (picture.astype(np.float64) * (1 / 255)).astype(np.float32)
    mean, std = np.array(form.mean, np.float32), np.array(form.std, np.float32)
    return np.asarray((unit - mean) / std, np.float32)


def centre_square(picture: Uint8, side: int) -> NDArray[np.float32]:
    """Return the middle of a picture [H, W, 3] as CLIP's image encoder takes it: its shorter side becomes `side`
    pixels, and a square [side, side, 3] is cut and normalized. The arithmetic equals transformers' CLIPImageProcessor
    on Pillow, to the last bit. Raises UsageError for too elongated a picture."""
    from PIL import Image

    height, width = picture.shape[:2]
    check_aspect(width, height)
    short = min(width, height)
    size = int(side * width / short), int(side * height / short)
    resized = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))
    top, left = (size[1] - side) // 2, (size[0] - side) // 2
    return _normalized(resized[top : top + side, left : left + side], QWEN2_VL)


def stretched_square(picture: Uint8, side: int) -> NDArray[np.float32]:
    """Return a picture [H, W, 3] as SigLIP's image encoder takes it: stretched to a square [side, side, 3], and
    normalized. The arithmetic equals transformers' SiglipImageProcessor on Pillow, to the last bit."""
    from PIL import Image

    resized = np.asarray(Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC))
    return _normalized(resized, QWEN3_VL)


def in_patches(square: NDArray[np.float32], patch: int) -> NDArray[np.float32]:
    """Return the whole patches [1, L, 3 * patch * patch] of a picture [side, side, 3], each by channel, row and
    column: rows and columns of pixels that fill none, at the end, are left out."""
    count = square.shape[0] // patch
    parts = square[: count * patch, : count * patch].reshape(count, patch, count, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(parts.reshape(1, count * count, -1))


def patches(
    picture: Uint8, patch: int, merge: int, taps: int, form: PictureForm
) -> tuple[NDArray[np.float32], int, int]:
    """Return the patches [L, 3 * taps * patch * patch] of a picture [H, W, 3], block by block of merge x merge patches,
    and the rows and columns of patches. Each of the `taps` in time sees the same picture. Raises UsageError."""
    from PIL import Image

    height, width = picture.shape[:2]
    size = whole_blocks(width, height, patch * merge, form)
    resized = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))
    normalized = _normalized(resized, form)
    rows, columns = size[1] // patch, size[0] // patch
    parts = normalized.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    parts = parts.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]  # [R C r c channel 1 y x]
    every = np.broadcast_to(parts, (*parts.shape[:5], taps, patch, patch))
    return np.ascontiguousarray(every.reshape(rows * columns, -1)), rows, columns
