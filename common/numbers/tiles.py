"""A picture in overlapping tiles, and how their seams fade into each other."""

from __future__ import annotations

import math
from typing import NamedTuple


class Tile(NamedTuple):
    """One tile along one axis, in indices of the whole: what it reads and what it keeps."""

    read_start: int
    read_stop: int
    keep_start: int
    keep_stop: int


def tiles(size: int, tile: int, halo: int) -> list[Tile]:
    """Tiles that keep each of 0 .. size - 1 once, at most `tile` each, and read `halo` more on both sides."""
    if size < 1 or tile < 1 or halo < 0:
        raise ValueError(f"no tiles of {tile} with a halo of {halo} for a size of {size}")
    spans = [(start, min(start + tile, size)) for start in range(0, size, tile)]
    return [Tile(max(0, start - halo), min(size, stop + halo), start, stop) for start, stop in spans]


class Fade(NamedTuple):
    """One tile along one axis that overlaps its neighbours: what it reads, and the weight of each pixel it makes."""

    read_start: int
    read_stop: int
    weights: list[float]


def fades(size: int, tile: int, overlap: int, scale: int) -> list[Fade]:
    """Tiles of equal length, at most `tile`, that read `overlap` more on both sides; `scale` pixels for each index.

    Across a seam one tile's weights fall linearly while the other's rise, over all that both read: at each pixel the
    weights add up to 1.
    """
    even = math.ceil(size / math.ceil(size / tile))
    overlap = min(overlap, even // 2)
    return [_fade(part, size, overlap * scale, scale) for part in tiles(size, even, overlap)]


def _fade(tile: Tile, size: int, reach: int, scale: int) -> Fade:
    """`reach`: pixels from a seam to where one tile has the whole weight."""
    begin, end = tile.keep_start * scale, tile.keep_stop * scale
    pixels = [p + 0.5 for p in range(tile.read_start * scale, tile.read_stop * scale)]
    rise = [1.0 if tile.keep_start == 0 else min(1.0, (p - begin) / (2 * reach) + 0.5) for p in pixels]
    fall = [1.0 if tile.keep_stop == size else min(1.0, (end - p) / (2 * reach) + 0.5) for p in pixels]
    return Fade(tile.read_start, tile.read_stop, [a * b for a, b in zip(rise, fall, strict=True)])
