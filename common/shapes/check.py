"""Comparison of an image with its prompt by rules only, so that a gate made of them cannot drift.

Background: the median of the border. Objects: connected regions far from it. An object's colour is the palette's
nearest to its core's, its shape the template of eight with the best overlap, its size from its area, its place from its
box. A circle must also be round, since a lump is more like a circle than like any other shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import permutations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qwenimg.common.base.errors import UsageError
from qwenimg.common.shapes.fit import ShapeFit, fit
from qwenimg.common.shapes.scenes import PALETTE, POSITIONS, SHAPES, SIZES, Floats, distance
from qwenimg.common.shapes.words import Parsed, Thing

Mask = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.uint8]

FAR = 45.0  # RGB distance from the background at which a pixel belongs to an object; objects have at least `CONTRAST`
SPECK = 0.003  # of the shorter side squared: a quarter of the smallest star; a smaller region is dirt
GRID = 40  # cells along each side of a template
SPAN = 1.7  # half the side of the templates, in radii of a disc of the same area: the tips of a star are inside
ALIKE = 0.65  # a region with less overlap is none of the shapes
ROUGH = 0.2  # largest `ShapeFit.rough` of a circle, in radii; true circles, also blurred ones, reach 0.03, pears more
APART = 0.1  # of the side: objects nearer than this are neither left nor right of each other
MOST = 6  # the most objects of a prompt: all their orders are tried


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One object of an image. `x y` are the centre of its box in units of width and height; `overlap` is 0 to 1."""

    color: str
    shape: str | None
    size: str
    position: str
    x: float
    y: float
    overlap: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The correctness of each part of a prompt in the image, of all objects together; None for a part that the prompt
    leaves open."""

    color: bool | None
    shape: bool | None
    position: bool | None
    size: bool | None
    background: bool | None
    count: bool | None
    relation: bool | None

    @property
    def ok(self) -> bool:
        """True if the prompt asks for something and the image has all of it."""
        answers = {getattr(self, field.name) for field in fields(self)}
        return True in answers and False not in answers


def check(pixels: Pixels, asked: Parsed) -> Verdict:
    """Compare an image, uint8 [H, W, 3], with a prompt. Objects are matched to the prompt's so that the verdict is
    best. Raises UsageError above `MOST` objects."""
    things = [thing for thing in asked.things for _ in range(min(thing.count or 1, MOST + 1))]
    if len(things) > MOST:
        raise UsageError(f"the prompt asks for more than {MOST} shapes, which is what the checker can tell apart")
    background, seen = look(pixels)
    orders = permutations(seen[: len(things)]) if len(asked.things) > 1 else [tuple(seen[: len(things)])]
    return max((_compare(asked, things, order, background, len(seen)) for order in orders), key=_rights)


def _rights(verdict: Verdict) -> tuple[bool, int]:
    answers = [getattr(verdict, field.name) for field in fields(verdict)]
    both = verdict.color is not False and verdict.shape is not False
    return both, answers.count(True)


def _compare(asked: Parsed, things: list[Thing], seen: tuple[Seen, ...], background: str, count: int) -> Verdict:
    def all_right(name: str) -> bool | None:
        values = [getattr(thing, name) for thing in things]
        if not any(values):
            return None
        in_image = [getattr(one, name) for one in seen] + [None] * (len(things) - len(seen))
        return all(value in (None, actual) for value, actual in zip(values, in_image, strict=True))

    counted = bool(things) and all(thing.count for thing in asked.things)
    return Verdict(
        color=all_right("color"),
        shape=all_right("shape"),
        size=all_right("size"),
        position=None if asked.position is None else bool(seen) and seen[0].position == asked.position,
        background=None if asked.background is None else background == asked.background,
        count=count == len(things) if counted else None,
        relation=None if asked.relation is None else len(seen) == 2 and _related(seen[0], asked.relation, seen[1]),
    )


def _related(a: Seen, relation: str, b: Seen) -> bool:
    across, down = a.x - b.x, a.y - b.y
    if relation == "and":
        return True
    axis, other = (across, down) if relation in ("left of", "right of") else (down, across)
    before = axis < 0 if relation in ("left of", "above") else axis > 0
    return before and abs(axis) > max(abs(other), APART)


# Objects of an image


def look(pixels: Pixels) -> tuple[str, list[Seen]]:
    """Return the background and the objects of an image, uint8 [H, W, 3], the largest first."""
    offset, ground = _offset(pixels)
    seen = [_see(*region, offset, ground) for region in _regions(offset)]
    return _nearest_color(ground), [one for _, one in sorted(seen, key=lambda pair: -pair[0])]


def ideal_overlap(pixels: Pixels) -> float:
    """Return the intersection over union of the largest object, uint8 [H, W, 3], with the ideal shape that fits it
    best, over place and size; 0 without an object."""
    offset, _ = _offset(pixels)
    masks = [_solid(*region, offset)[0] for region in _regions(offset)]
    if not masks:
        return 0.0
    mask = max(masks, key=np.count_nonzero)
    mask = mask[_box(mask)]
    return _fit(mask, _best_shape(mask)[0]).overlap


def _fit(mask: Mask, shape: str) -> ShapeFit:
    return fit(mask, shape, _template(shape).area)


def _offset(pixels: Pixels) -> tuple[Floats, Floats]:
    """Return an image minus its background [H, W, 3], and the background [3]."""
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3, (pixels.dtype, pixels.shape)
    image = pixels.astype(np.float32)
    border = np.concatenate((image[0], image[-1], image[:, 0], image[:, -1]))
    ground: Floats = np.median(border, axis=0)
    image -= ground
    return image, ground


def _regions(offset: Floats) -> list[tuple[int, int, Mask]]:
    far: Mask = _products(offset, offset) > FAR**2
    return components(far, SPECK * min(far.shape) ** 2)


def _solid(row: int, column: int, mask: Mask, offset: Floats) -> tuple[Mask, Floats]:
    """Return `mask` without the outer half of a soft edge, nearer to the background, and the rest's colour [3]."""
    offset = offset[row : row + mask.shape[0], column : column + mask.shape[1]]
    color = _core(offset, mask)
    mask = mask & (_products(offset, color) > 0.5 * _products(color, color))
    return mask, _core(offset, mask)


def _see(row: int, column: int, mask: Mask, offset: Floats, ground: Floats) -> tuple[float, Seen]:
    """Return an object's area in pixels, and what it is. `offset` [H, W, 3] is the image minus `ground` [3]."""
    height, width, _ = offset.shape
    mask, color = _solid(row, column, mask, offset)
    rows, columns = _box(mask)
    x, y = (column + (columns.start + columns.stop) / 2) / width, (row + (rows.start + rows.stop) / 2) / height
    shape, overlap = _best_shape(mask[rows, columns])
    known = overlap >= ALIKE and (shape != "circle" or _fit(mask[rows, columns], shape).rough <= ROUGH)
    area = float(mask.sum())
    radius = (area / _template(shape).area) ** 0.5 / min(height, width)
    return area, Seen(
        color=_nearest_color(ground + color),
        shape=shape if known else None,
        size=min(SIZES, key=lambda size: abs(math.log(radius / SIZES[size]))),
        position=min(POSITIONS, key=lambda name: (POSITIONS[name][0] - x) ** 2 + (POSITIONS[name][1] - y) ** 2),
        x=x,
        y=y,
        overlap=overlap,
    )


def _core(offset: Floats, mask: Mask) -> Floats:
    """Return the colour [3] of an object: the median of the half of its pixels that is farthest from the background."""
    pixels = offset[mask]
    strength = _products(pixels, pixels)
    median: Floats = np.median(pixels[strength >= np.median(strength)], axis=0)
    return median


def _products(a: Floats, b: Floats) -> Floats:
    """Return inner products over the last axis, of 3; much faster than `sum`."""
    products: Floats = a[..., 0] * b[..., 0] + a[..., 1] * b[..., 1] + a[..., 2] * b[..., 2]
    return products


def _nearest_color(color: Floats) -> str:
    return min(PALETTE, key=lambda name: math.dist(PALETTE[name], color.tolist()))


class _Template(NamedTuple):
    by_area: Mask
    by_box: Mask
    aspect: float
    area: float  # in units of the radius squared


@cache
def _template(shape: str) -> _Template:
    step = np.float32(1 / 128)
    axis = (np.arange(-140, 140, dtype=np.float32) + np.float32(0.5)) * step
    full: Mask = distance(shape, axis[None, :], -axis[:, None]) < 0
    rows, columns = _box(full)
    mask = full[rows, columns]
    return _Template(_by_area(mask), _by_box(mask), _aspect(mask), float(mask.sum()) * float(step) ** 2)


def _best_shape(mask: Mask) -> tuple[str, float]:
    """Return the shape with the best intersection over union, in the better of two alignments.

    By centroid and area, which a blur changes little: it removes the tips of a star, and so changes its box. By box,
    less the ratio of the aspects: this tells a square with blurred corners from a disc."""
    by_area, by_box, aspect = _by_area(mask), _by_box(mask), _aspect(mask)

    def overlap(shape: str) -> float:
        template = _template(shape)
        ratio = min(aspect / template.aspect, template.aspect / aspect)
        return max(_overlap(by_area, template.by_area), ratio * _overlap(by_box, template.by_box))

    overlaps = {shape: overlap(shape) for shape in SHAPES}
    best = max(SHAPES, key=lambda shape: overlaps[shape])
    return best, overlaps[best]


def _overlap(a: Mask, b: Mask) -> float:
    return float(np.count_nonzero(a & b)) / float(np.count_nonzero(a | b))


def _aspect(mask: Mask) -> float:
    height, width = mask.shape
    return float(width / height)


def _by_box(mask: Mask) -> Mask:
    """Stretch `mask` to [GRID, GRID]."""
    down, across = (((np.arange(GRID) + 0.5) / GRID * side).astype(np.intp) for side in mask.shape)
    return mask[np.ix_(down, across)]


def _by_area(mask: Mask) -> Mask:
    """Scale `mask` to [GRID, GRID]: centroid in the middle, area of a disc of diameter GRID / SPAN."""
    reach = SPAN * (np.count_nonzero(mask) / math.pi) ** 0.5
    steps = ((np.arange(GRID) + 0.5) / GRID * 2 - 1) * reach
    down, across = (np.rint(pixels.mean() + steps).astype(np.intp) for pixels in np.nonzero(mask))
    margin = int(reach) + 2
    return np.pad(mask, margin)[np.ix_(down + margin, across + margin)]


def _box(mask: Mask) -> tuple[slice, slice]:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1)


# Regions

Run = tuple[int, int, int]
"""(row, start, stop) of neighbouring pixels."""


def components(mask: Mask, smallest: float = 1) -> list[tuple[int, int, Mask]]:
    """Return the regions of `mask` [H, W] of at least `smallest` pixels that touch by their sides: for each the first
    row, the first column and the pixels of its box. Runs of each row are joined by union-find."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(edges == 1)
    _, stops = np.nonzero(edges == -1)
    runs = list(zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True))
    parent = list(range(len(runs)))

    def root(run: int) -> int:
        while parent[run] != run:
            parent[run] = run = parent[parent[run]]
        return run

    for upper, lower in _touching(runs):
        parent[root(lower)] = root(upper)
    regions: dict[int, list[Run]] = {}
    for index, run in enumerate(runs):
        regions.setdefault(root(index), []).append(run)
    large = [region for region in regions.values() if sum(stop - start for _, start, stop in region) >= smallest]
    return [_filled(region) for region in large]


def _touching(runs: list[Run]) -> Iterator[tuple[int, int]]:
    """Yield pairs of runs in neighbouring rows that share a column; `runs` is in reading order."""
    upper = 0
    for lower, (row, start, stop) in enumerate(runs):
        while runs[upper][0] < row - 1 or (runs[upper][0] == row - 1 and runs[upper][2] <= start):
            upper += 1
        index = upper
        while runs[index][0] == row - 1 and runs[index][1] < stop:
            yield index, lower
            index += 1


def _filled(region: list[Run]) -> tuple[int, int, Mask]:
    top, left = region[0][0], min(start for _, start, _ in region)
    mask = np.zeros((region[-1][0] - top + 1, max(stop for _, _, stop in region) - left), np.bool_)
    for row, start, stop in region:
        mask[row - top, start - left : stop - left] = True
    return top, left, mask
