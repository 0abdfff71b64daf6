"""The data of the built-in model: scenes of coloured shapes and their pictures. `words` has the prompts.

- A scene holds its geometry, so a picture is a function of the scene alone.
- A prompt that names all there is to name has one picture. Where several are equally likely, each part of an edge is
  drawn after one of them by a small model, and the whole is a lump.
- A shape is a signed distance in units of its radius, made of + - * / sqrt, min and max only, which round the same
  everywhere; random choices are made of `Generator.random` alone. So the data are the same on every machine.

H W pixels of a picture; x runs right and y runs down in a scene, y runs up in a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Floats = npt.NDArray[Any]  # of the caller's precision
T = TypeVar("T")

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
"""RGB in 0..255. No two are nearer than 92, and none touches 0 or 255, where clipping would hide an error."""

SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross", "ring", "heart")
BACKGROUNDS = ("white", "black", "gray", "blue", "green", "yellow", "pink")
SIZES = {"small": 0.115, "medium": 0.165, "large": 0.24}
"""Radius by word, in units of the shorter side of the picture."""
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
"""Where the first of two objects is, by what it is of the second; the fifth relation, "and", leaves it open."""
USUAL_SIDE = "left"
"""Where the first of two objects is when nothing says it."""
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


@dataclass(frozen=True, kw_only=True)
class Object:
    """One shape. `x y` are the centre of its bounding box in units of width and height, `radius` as in `SIZES`."""

    shape: str
    color: str
    size: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One object with a `position`, two with a `relation` (first to second), or two or three that are the same."""

    objects: tuple[Object, ...]
    background: str
    position: str | None = None
    relation: str | None = None


def held_out_pairs() -> list[tuple[str, str]]:
    """The 8 (color, shape) that training never shows."""
    return list(HELD_OUT_PAIRS)


def trained_pairs() -> list[tuple[str, str]]:
    """The other 80 (color, shape)."""
    return [(color, shape) for color in PALETTE for shape in SHAPES if (color, shape) not in HELD_OUT_PAIRS]


def is_held_out(scene: Scene) -> bool:
    """Whether training must not see this scene: it has a held-out pair or a held-out relation of colours."""
    if any((o.color, o.shape) in HELD_OUT_PAIRS for o in scene.objects):
        return True
    if scene.relation is None:
        return False
    a, b = scene.objects
    beside = abs(a.x - b.x) > abs(a.y - b.y)
    first, second = (a, b) if (a.x < b.x if beside else a.y < b.y) else (b, a)
    return (first.color, "left of" if beside else "above", second.color) in HELD_OUT_RELATIONS


def contrasts(color: str, background: str) -> bool:
    """Whether an object of this colour may lie on this background."""
    difference = [a - b for a, b in zip(PALETTE[color], PALETTE[background], strict=True)]
    return sum(d * d for d in difference) >= CONTRAST**2


def backgrounds(*colors: str) -> list[str]:
    """The backgrounds for objects of these colours. The first, white if possible, is used when none is named."""
    return [background for background in BACKGROUNDS if all(contrasts(color, background) for color in colors)]


def pick(rng: np.random.Generator, items: Sequence[T]) -> T:
    """One of `items`, each as likely as it occurs."""
    return items[int(rng.random() * len(items))]


def one(color: str, shape: str, size: str, position: str, background: str) -> Scene:
    """One object at `position`."""
    placed = _place(color, shape, size, POSITIONS[position])
    return Scene(objects=(placed,), background=background, position=position)


def two(
    first: tuple[str, str],
    relation: str,
    second: tuple[str, str],
    sizes: tuple[str, str],
    background: str,
) -> Scene:
    """Two different (color, shape), for "and" in the usual arrangement. Two large ones would touch.

    What a prompt leaves open has one meaning, here and below: of some that are equally likely a small model draws
    parts of each."""
    side = RELATIONS.get(relation, USUAL_SIDE)
    objects = (
        _place(*first, sizes[0], POSITIONS[side]),
        _place(*second, sizes[1], POSITIONS[OPPOSITE[side]]),
    )
    return Scene(objects=objects, background=background, relation=relation)


def several(color: str, shape: str, size: str, count: int, background: str) -> Scene:
    """Two of the same object, side by side, or three, one above and two below. Large ones would touch."""
    places = {2: ((LOW, MIDDLE), (HIGH, MIDDLE)), 3: ((MIDDLE, LOW), (LOW, HIGH), (HIGH, HIGH))}[count]
    return Scene(objects=tuple(_place(color, shape, size, xy) for xy in places), background=background)


def _place(color: str, shape: str, size: str, xy: tuple[float, float]) -> Object:
    return Object(shape=shape, color=color, size=size, x=xy[0], y=xy[1], radius=SIZES[size])


def random_scene(rng: np.random.Generator, held_out: bool = False) -> Scene:
    """A scene to train on: one object in 40 % of cases, two in 35 %, two or three of the same in 25 %.

    With `held_out`, a scene from all that there are, those that training never sees among them."""
    while True:
        scene = _any_scene(rng)
        if held_out or not is_held_out(scene):
            return scene


def simple_scene(rng: np.random.Generator) -> Scene:
    """One object, for the first lessons: what a colour, a shape, a size and a place are."""
    pair = pick(rng, trained_pairs())
    return one(*pair, pick(rng, list(SIZES)), pick(rng, list(POSITIONS)), _background(rng, pair[0]))


def _any_scene(rng: np.random.Generator) -> Scene:
    colors = list(PALETTE)
    pair = (pick(rng, colors), pick(rng, SHAPES))
    kind = rng.random()
    if kind < 0.4:
        return one(*pair, pick(rng, list(SIZES)), pick(rng, list(POSITIONS)), _background(rng, pair[0]))
    sizes = (pick(rng, ("small", "medium")), pick(rng, ("small", "medium")))
    if kind < 0.65:
        return several(*pair, sizes[0], pick(rng, (2, 3)), _background(rng, pair[0]))
    other = (pick(rng, colors), pick(rng, SHAPES))
    if other == pair:
        return _any_scene(rng)
    return two(pair, pick(rng, ("and", *RELATIONS)), other, sizes, _background(rng, pair[0], other[0]))


def _background(rng: np.random.Generator, *colors: str) -> str:
    allowed = backgrounds(*colors)
    return allowed[0] if rng.random() < 0.5 else pick(rng, allowed)


# Pictures


def render(scene: Scene, width: int, height: int) -> Float32:
    """The picture of `scene`, float32 [3, H, W] in -1..1, as a VAE is trained on.

    Anti-aliased by signed distance: a pixel is covered from half a pixel outside an edge to half a pixel inside."""
    image = np.empty((3, height, width), np.float32)
    image[:] = _level(scene.background)
    for o in scene.objects:
        radius = o.radius * min(width, height)
        columns, rows = _window(o.x * width, radius, width), _window(o.y * height, radius, height)
        x = (np.arange(columns.start, columns.stop, dtype=np.float32) + (0.5 - o.x * width)) / radius
        y = (np.arange(rows.start, rows.stop, dtype=np.float32) + (0.5 - o.y * height)) / -radius
        coverage = np.clip(0.5 - distance(o.shape, x[None, :], y[:, None]) * radius, 0, 1)
        window = image[:, rows, columns]
        window += coverage * (_level(o.color) - window)
    return image


def _window(center: float, radius: float, side: int) -> slice:
    return slice(min(max(int(center - radius - 1), 0), side), max(min(int(center + radius + 2), side), 0))


@cache
def _level(color: str) -> Float32:
    """A colour as [3, 1, 1] in -1..1."""
    return np.array(PALETTE[color], np.float32)[:, None, None] / np.float32(127.5) - np.float32(1)


def distance(shape: str, x: Floats, y: Floats) -> Floats:
    """Signed distance in units of the radius, negative inside, exact along edges; `x` and `y` broadcast.

    The bounding box is centred on 0 and its larger side is 2 at most."""
    return _DISTANCE[shape](np.abs(x), y)


def _length(x: Floats, y: Floats) -> Floats:
    """Not `np.hypot`, which rounds as each platform's library does."""
    squares: Floats = x * x + y * y
    return np.sqrt(squares)


def _circle(x: Floats, y: Floats) -> Floats:
    return _length(x, y) - 1


def _square(x: Floats, y: Floats) -> Floats:
    return np.maximum(x, np.abs(y)) - 0.88


def _triangle(x: Floats, y: Floats) -> Floats:
    """Equilateral with side 2, point up."""
    return np.maximum(0.8660254 * x + 0.5 * y - 0.4330127, -0.8660254 - y)


def _star(x: Floats, y: Floats) -> Floats:
    """Five points, the inner radius 0.4 of the outer. Mirrored into one tenth of the turn, it is a half-plane."""
    y = y + 0.0954915  # the centre of its box is below the centre of its circle
    for cos, sin in ((-0.3090170, 0.9510565), (0.8090170, 0.5877853)):
        outside = np.maximum(x * cos - y * sin, 0)
        x, y = x - 2 * cos * outside, y + 2 * sin * outside
    # the edge runs from (0, 1) to 0.4 (sin 36, cos 36)
    edge: Floats = np.abs(x) * 0.9445631 + y * 0.3283299 - 0.3283299
    return edge


def _diamond(x: Floats, y: Floats) -> Floats:
    """A rhombus 0.72 as wide as it is high."""
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
    """A square on its corner, and a disc on each of its upper sides."""
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
