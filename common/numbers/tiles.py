"""Spans of tiles, or of bands of rows, that read a halo around the part that they keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """One tile along one axis, in indices of the whole image: the span that it reads and the span that it keeps."""

    read_start: int
    read_stop: int
    keep_start: int
    keep_stop: int


def tiles(size: int, tile: int, halo: int) -> list[Tile]:
    """Return tiles that together keep each of 0 .. size - 1 once, at most `tile` each, and read `halo` more on both
    sides. Raises ValueError for a size or tile below 1."""
    if size < 1 or tile < 1 or halo < 0:
        raise ValueError(f"no tiles of {tile} with a halo of {halo} for a size of {size}")
    spans = [(start, min(start + tile, size)) for start in range(0, size, tile)]
    return [Tile(max(0, start - halo), min(size, stop + halo), start, stop) for start, stop in spans]


def wide_upsamplers(blocks: Sequence[tuple[int, int, bool]]) -> list[bool]:
    """Return, for each upsampler of a decoder, whether its image has more values than the last block's. Such an image
    is never kept in memory. `blocks`: channels in, channels out, and whether an upsampler ends it, as it does all but
    the last."""
    last = blocks[-1][1] * 4 ** (len(blocks) - 1)
    return [following[0] * 4**level > last for level, following in enumerate(blocks[1:], 1)]
