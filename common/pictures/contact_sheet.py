"""A sheet of pictures side by side, to look at layers with alpha."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qwenimg.common.pictures.pixels import Uint8, with_alpha

GAP = 8  # pixels between pictures
SQUARE = 16  # pixels a side of the grey squares that show through
LIGHT, DARK = 255, 205
PAPER = 128


def contact_sheet(pictures: Sequence[Uint8]) -> Uint8:
    """Return pictures [H, W, 3 or 4] of one size as one [H', W', 3], row by row over squares of grey."""
    from PIL import Image

    height, width = pictures[0].shape[:2]
    columns = math.ceil(math.sqrt(len(pictures) * height / width))  # about a square
    rows = math.ceil(len(pictures) / columns)
    sheet = np.full((rows * (height + GAP) + GAP, columns * (width + GAP) + GAP, 3), PAPER, np.uint8)
    down, right = np.indices((height, width)) // SQUARE
    squares = np.where((down + right) % 2, DARK, LIGHT).astype(np.uint8)[..., None].repeat(3, 2)
    for i, picture in enumerate(pictures):
        layer = Image.fromarray(np.ascontiguousarray(with_alpha(picture)))
        seen = Image.composite(layer.convert("RGB"), Image.fromarray(squares), layer.getchannel("A"))
        row, column = divmod(i, columns)
        top, left = row * (height + GAP) + GAP, column * (width + GAP) + GAP
        sheet[top : top + height, left : left + width] = np.asarray(seen)
    return sheet
