"""The similarity of an object to an ideal shape: the best overlap over place and size of the shape.

The overlap is the intersection over union of the object's pixels and the ideal shape's. The checker uses it to confirm
a shape, since a lump that is more like a circle than like any other shape is no circle."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qwenimg.common.shapes.scenes import Floats, distance

Mask = npt.NDArray[np.bool_]

STEPS = (0.04, 0.02, 0.01, 0.005)  # moves in units of the radius, the large ones first
MARGIN = 0.15  # of the sides: the space around the object, for an ideal shape that is larger


Place = tuple[float, float, float]
"""Centre x, y and radius in pixels."""


class ShapeFit(NamedTuple):
    """The ideal shape that fits best.

    `overlap` is 0 to 1. `rough`, in radii: the largest distance of the object's edge outside of it plus the largest
    inside, less the pixel of rounding."""

    overlap: float
    rough: float


def fit(mask: Mask, shape: str, area: float) -> ShapeFit:
    """Fit `shape`, whose area is `area` squared radii, to `mask` [H, W], an object's box.

    Place and radius are found by hill climbing: the best move is taken as long as one improves the overlap."""
    mask = np.pad(mask, 2 + round(MARGIN * max(mask.shape)))
    pixels = int(np.count_nonzero(mask))
    rows, columns = (np.arange(side, dtype=np.float32) + np.float32(0.5) for side in mask.shape)

    def distances(x: float, y: float, radius: float) -> Floats:
        return distance(shape, (columns - x)[None, :] / radius, (y - rows)[:, None] / radius)

    def overlap(*place: float) -> float:
        ideal: Mask = distances(*place) < 0
        both = int(np.count_nonzero(ideal & mask))
        return both / (pixels + int(np.count_nonzero(ideal)) - both)

    height, width = mask.shape
    place = (width / 2, height / 2, (pixels / area) ** 0.5)
    best = overlap(*place)
    for step in STEPS:
        best, place = _climbed(overlap, best, place, step)
    edge = distances(*place)
    rough = float(edge[mask].max(initial=0)) - float(edge[~mask].min(initial=0))
    return ShapeFit(best, max(0.0, rough - 1 / place[2]))


def _climbed(overlap: Callable[..., float], best: float, place: Place, step: float) -> tuple[float, Place]:
    """Climb from `place` by moves of `step` radii along one of the three values, until none is better."""
    tried = {place}
    while True:
        x, y, radius = place
        by = step * radius
        moves = [(x + by, y, radius), (x - by, y, radius), (x, y + by, radius), (x, y - by, radius)]
        moves += [(x, y, radius + by), (x, y, radius - by)]
        results = [(overlap(*move), move) for move in moves if move not in tried]
        tried.update(moves)
        top = max(results, default=(0.0, place))
        if top[0] <= best:
            return best, place
        best, place = top
