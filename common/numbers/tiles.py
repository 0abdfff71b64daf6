"""An image in tiles, or in bands of rows, that see what is beside them."""

from __future__ import annotations

from collections.abc import Sequence
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


def wide_upsamplers(blocks: Sequence[tuple[int, int, bool]]) -> list[bool]:
    """Return for each block of a decoder (channels in, channels out, whether an upsampler ends it) that has an
    upsampler whether that makes an image of more values than the last block does. Such an image is kept in no memory.
    """
    last = blocks[-1][1] * 4 ** (len(blocks) - 1)
    return [following[0] * 4**level > last for level, following in enumerate(blocks[1:], 1)]
