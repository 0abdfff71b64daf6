"""Pictures as a vision tower takes them: in a size of whole blocks of patches, normalized, one row for each patch.

The arithmetic is that of transformers' Qwen2VLImageProcessor on Pillow, to the last bit.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.pictures.pixels import Uint8

LEAST, MOST = 56 * 56, 12_845_056  # pixels of a picture that a model of Qwen2.5-VL sees
MAX_ASPECT = 200  # longer side by shorter side
MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's training pictures, by channel
STD = (0.26862954, 0.26130258, 0.27577711)


def whole_blocks(width: int, height: int, block: int) -> tuple[int, int]:
    """Return the size nearest to width x height in blocks of `block` pixels a side, with `LEAST` to `MOST` pixels.
    Raises UsageError for a picture that is too long."""
    if not min(width, height) or max(width, height) > MAX_ASPECT * min(width, height):
        raise UsageError(f"a picture of {width}x{height} is too narrow: one side may be {MAX_ASPECT} times the other")
    sides = [round(side / block) * block for side in (width, height)]
    if math.prod(sides) > MOST:
        scale = math.sqrt(width * height / MOST)
        sides = [max(block, math.floor(side / scale / block) * block) for side in (width, height)]
    elif math.prod(sides) < LEAST:
        scale = math.sqrt(LEAST / (width * height))
        sides = [math.ceil(side * scale / block) * block for side in (width, height)]
    return sides[0], sides[1]


def patches(picture: Uint8, patch: int, merge: int, taps: int) -> tuple[NDArray[np.float32], int, int]:
    """Return the patches [L, 3 * taps * patch * patch] of a picture [H, W, 3], block by block of merge x merge patches,
    and the rows and columns of patches. Each of the `taps` in time sees the same picture. Raises UsageError."""
    from PIL import Image

    height, width = picture.shape[:2]
    size = whole_blocks(width, height, patch * merge)
    resized = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))
    unit = (resized.astype(np.float64) * (1 / 255)).astype(np.float32)
    normalized = (unit - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    rows, columns = size[1] // patch, size[0] // patch
    parts = normalized.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    parts = parts.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]  # [R C r c channel 1 y x]
    every = np.broadcast_to(parts, (*parts.shape[:5], taps, patch, patch))
    return np.ascontiguousarray(every.reshape(rows * columns, -1)), rows, columns
