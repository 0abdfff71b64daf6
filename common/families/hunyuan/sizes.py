"""The sizes of pictures that Hunyuan-DiT was trained with."""

from __future__ import annotations

TRAINED = (
    *((1024, 1024), (1280, 1280)),
    *((1024, 768), (1152, 864), (1280, 960), (1280, 768)),
    *((768, 1024), (864, 1152), (960, 1280), (768, 1280)),
)
"""Widths and heights in pixels."""


def nearest(width: int, height: int) -> tuple[int, int]:
    """Return the width and height in pixels of the nearest shape, and of those of this shape the nearest area."""
    ratio, area = height / width, height * width

    def distance(size: tuple[int, int]) -> tuple[float, int]:
        return abs(size[1] / size[0] - ratio), abs(size[0] * size[1] - area)

    return min(TRAINED, key=distance)
