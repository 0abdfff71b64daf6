"""The sizes of pictures that PixArt's models were trained with."""

from __future__ import annotations

_SHORT = (8, 8, 8, 8, 9, 9, 9, 10, 10, 11, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 16)
_LONG = (32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 21, 20, 19, 18, 18, 17, 17, 16, 16)
"""Sides of a picture in sixteenths of a square one's."""


def nearest(side: int, width: int, height: int) -> tuple[int, int]:
    """Return the width and height in pixels whose ratio is nearest to that of a picture, for a model of squares of
    `side` pixels."""
    tall = list(zip(_SHORT, _LONG, strict=True))
    shapes = [*tall, *((long, short) for short, long in reversed(tall))]
    wide, high = min(shapes, key=lambda shape: abs(shape[1] / shape[0] - height / width))
    return wide * side // 16, high * side // 16
