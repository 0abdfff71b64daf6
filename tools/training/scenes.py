"""Scenes of coloured shapes and their images, which the built-in model is trained on. `describe` has the prompts.

- A scene holds its geometry, so an image is a function of the scene alone.
- A prompt that names all there is to name has one image. Where several are equally likely, a small model draws each
  part of an edge after one of them, and the whole is a lump.
- Random choices are made of `Generator.random` alone, so that the data are the same on every machine.

H W pixels of an image; x runs right and y runs down in a scene.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from qwenimg.common.shapes.scenes import (
    BACKGROUNDS,
    HELD_OUT_PAIRS,
    HELD_OUT_RELATIONS,
    HIGH,
    LOW,
    MIDDLE,
    OPPOSITE,
    PALETTE,
    POSITIONS,
    RELATIONS,
    SHAPES,
    SIZES,
    Float32,
    contrasts,
    distance,
    trained_pairs,
)
from qwenimg.common.shapes.words import Parsed, Thing

T = TypeVar("T")

USUAL_SIDE = "left"
"""Where the first of two objects is when nothing says it."""


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


def requirements(scene: Scene) -> Parsed:
    """All that a prompt could ask for and `scene` has."""
    objects = scene.objects if scene.relation else scene.objects[:1]
    count = 1 if scene.relation else len(scene.objects)
    things = tuple(Thing(shape=o.shape, color=o.color, size=o.size, count=count) for o in objects)
    return Parsed(things=things, background=scene.background, position=scene.position, relation=scene.relation)
