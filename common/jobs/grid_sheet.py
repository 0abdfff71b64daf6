"""The sheet of a grid: its pictures in rows and columns with their values, as a PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

MOST_SIDE = 1024  # pixels of a picture's width on the sheet
MAX_PIXELS = 30_000_000  # of all pictures on the sheet, so that with the texts it can be read back


def grid_png(paths: Sequence[Path], labels: Sequence[tuple[str, ...]], columns: int, texts: Mapping[str, str]) -> bytes:
    """Return the sheet of the pictures at `paths` as a PNG file with `texts`, marked as made by a model. Pictures are
    as wide as the widest of them, and no wider than the bounds allow. Raises ModelError."""
    import numpy as np
    from PIL import ImageFont

    from qwenimg.common.pictures.input import read_image, read_size
    from qwenimg.common.pictures.labelled_sheet import SheetTile, scaled, sheet
    from qwenimg.common.pictures.pixels import over_white
    from qwenimg.common.pictures.png import encode_png
    from qwenimg.common.request.recipe import XMP

    sizes = [read_size(path) for path in paths]
    tallest = max(height / width for width, height in sizes)
    most = math.isqrt(int(MAX_PIXELS / (tallest * len(paths))))
    side = min(max(width for width, _ in sizes), MOST_SIDE, max(1, most))
    tiles = []
    for path, lines in zip(paths, labels, strict=True):
        pixels = over_white(read_image(path)[0])
        tiles.append(SheetTile(pixels=np.asarray(scaled(pixels, side)), lines=lines))
    size = max(10, side // 18)
    font = ImageFont.load_default(size)
    page = sheet(tiles, columns, side, font, round(1.25 * size))  # type: ignore[arg-type]
    return encode_png(page, texts, XMP)
