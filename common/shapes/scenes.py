"""The coloured shapes that the built-in model draws: their colours, sizes and places, and each shape as a distance.

- A shape is a signed distance in units of its radius, made of + - * / sqrt, min and max only, which round the same
  everywhere. x runs right and y runs up in a shape.
- Scenes that are held out from training are constants here, since the quality gate asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Floats = npt.NDArray[Any]  # of the caller's precision

PALETTE = {
    "red": (220, 30, 35),
    "green": (30, 160, 60),
    "blue": (30, 70, 220),
    "yellow": (250, 220, 40),
    "orange": (250, 130, 20),
    "purple": (130, 40, 170),
    "pink": (245, 120, 180),
    "brown": (115, 65, 25),
    "black": (10, 10, 10),
    "white": (250, 250, 250),
    "gray": (135, 135, 135),
}
"""RGB in 0..255. The distance of two is at least 92, and none touches 0 or 255, where clipping would hide an error."""

SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross", "ring", "heart")
BACKGROUNDS = ("white", "black", "gray", "blue", "green", "yellow", "pink")
SIZES = {"small": 0.115, "medium": 0.165, "large": 0.24}
"""Radius by word, in units of the shorter side of the image."""
LOW, MIDDLE, HIGH = 0.25, 0.5, 0.75
POSITIONS = {
    "center": (MIDDLE, MIDDLE),
    "left": (LOW, MIDDLE),
    "right": (HIGH, MIDDLE),
    "top": (MIDDLE, LOW),
    "bottom": (MIDDLE, HIGH),
}
"""Centre by word, in units of width and height. With sides of 64 pixels and multiples of it, each is a corner of the
transformer's tokens, so that a shape has the same latents wherever it is."""
RELATIONS = {"left of": "left", "right of": "right", "above": "top", "below": "bottom"}
"""The place of the first of two objects, by its relation to the second; the fifth relation, "and", leaves it open."""
OPPOSITE = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}

CONTRAST = 125.0  # an object is at least this far in RGB from its background

HELD_OUT_PAIRS = (
    ("red", "diamond"),
    ("green", "heart"),
    ("blue", "star"),
    ("yellow", "triangle"),
    ("orange", "cross"),
    ("purple", "square"),
    ("pink", "circle"),
    ("brown", "ring"),
)
HELD_OUT_RELATIONS = (("red", "left of", "green"), ("blue", "above", "yellow"))
"""No training scene has any object of the first colour left of, or above, one of the second, whatever its words."""


# Scenes


def trained_pairs() -> list[tuple[str, str]]:
    """Return the 80 (color, shape) that are not held out."""
    return [(color, shape) for color in PALETTE for shape in SHAPES if (color, shape) not in HELD_OUT_PAIRS]


def contrasts(color: str, background: str) -> bool:
    """Return whether an object of this colour may lie on this background."""
    difference = [a - b for a, b in zip(PALETTE[color], PALETTE[background], strict=True)]
    return sum(d * d for d in difference) >= CONTRAST**2


# Distances


def distance(shape: str, x: Floats, y: Floats) -> Floats:
    """Return the signed distance in units of the radius, negative inside, exact along edges; `x` and `y` broadcast.

    The bounding box is centred on 0 and its larger side is 2 at most."""
    return _DISTANCE[shape](np.abs(x), y)


def _length(x: Floats, y: Floats) -> Floats:
    """Return the root of x * x + y * y. `np.hypot` rounds in each platform's own way."""
    squares: Floats = x * x + y * y
    return np.sqrt(squares)


def _circle(x: Floats, y: Floats) -> Floats:
    return _length(x, y) - 1


def _square(x: Floats, y: Floats) -> Floats:
    return np.maximum(x, np.abs(y)) - 0.88


def _triangle(x: Floats, y: Floats) -> Floats:
    """Return the distance of an equilateral triangle with side 2, point up."""
    return np.maximum(0.8660254 * x + 0.5 * y - 0.4330127, -0.8660254 - y)


def _star(x: Floats, y: Floats) -> Floats:
    """Return the distance of a five-pointed star, inner radius 0.4: mirrored into a tenth of the turn, a half-plane."""
    y = y + 0.0954915  # the centre of its box is below the centre of its circle
    for cos, sin in ((-0.3090170, 0.9510565), (0.8090170, 0.5877853)):
        outside = np.maximum(x * cos - y * sin, 0)
        x, y = x - 2 * cos * outside, y + 2 * sin * outside
    # the edge runs from (0, 1) to 0.4 (sin 36, cos 36)
    edge: Floats = np.abs(x) * 0.9445631 + y * 0.3283299 - 0.3283299
    return edge


def _diamond(x: Floats, y: Floats) -> Floats:
    """Return the distance of a rhombus 0.72 as wide as it is high."""
    return (x / 0.72 + np.abs(y) - 1) * 0.5843047


def _cross(x: Floats, y: Floats) -> Floats:
    y = np.abs(y)
    bars: Floats = np.minimum(np.maximum(x - 1, y - 0.34), np.maximum(x - 0.34, y - 1))
    return bars


def _ring(x: Floats, y: Floats) -> Floats:
    radius = _length(x, y)
    ring: Floats = np.maximum(radius - 1, 0.55 - radius)
    return ring


def _heart(x: Floats, y: Floats) -> Floats:
    """Return the distance of a heart: a square on its corner, and a disc on each of its upper sides."""
    y = y + 0.0857864
    corner = (x + np.abs(y) - 0.8284271) * 0.7071068
    dx, dy = x - 0.4142136, y - 0.4142136
    heart: Floats = np.minimum(corner, _length(dx, dy) - 0.5857864)
    return heart


_DISTANCE: dict[str, Callable[[Floats, Floats], Floats]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "diamond": _diamond,
    "cross": _cross,
    "ring": _ring,
    "heart": _heart,
}
