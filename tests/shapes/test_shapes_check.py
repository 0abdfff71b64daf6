"""The checker of shapes: right on what the renderer draws, wrong on everything else; and the prompts of the gate."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
from PIL import Image, ImageFilter
from support.truthful import jittered
from support.truthful import scene as asked_for
from training import scenes as shapes
from training.describe import dataset_hash
from training.scenes import Scene, random_scene, render, requirements

from qwenimg.common.base.errors import UsageError
from qwenimg.common.pictures.pixels import to_uint8
from qwenimg.common.shapes.check import ROUGH, check, components, ideal_overlap, look
from qwenimg.common.shapes.fit import fit
from qwenimg.common.shapes.gate import gate_prompts, selftest_prompts
from qwenimg.common.shapes.scenes import PALETTE, POSITIONS, SHAPES, SIZES
from qwenimg.common.shapes.words import Parsed, Thing, parse

# Changed data are another model: change this only together with a newly trained one.
DATASET = "4c82e0178578cb82186e25d29496fd4524f14742ca9c7f9b75dc3fb8b5f453da"

BLUR, NOISE, JPEG, SHIFT = 1.5 / 256, 10.0, 60, 12  # sigma in sides, sigma of 255, quality, of 255 for a whole picture


def picture(scene: Scene, width: int, height: int) -> np.ndarray:
    return to_uint8(render(scene, width, height))


def disturbed(pixels: np.ndarray, how: str, rng: np.random.Generator) -> np.ndarray:
    """What a small model and its VAE do to a picture, and rather more of it."""
    if how in ("blur", "all"):
        blur = ImageFilter.GaussianBlur(BLUR * min(pixels.shape[:2]))
        pixels = np.asarray(Image.fromarray(pixels).filter(blur))
    if how in ("noise", "all"):
        noisy = pixels + rng.normal(0, NOISE, pixels.shape) + rng.uniform(-SHIFT, SHIFT, 3)
        pixels = np.clip(noisy, 0, 255).round().astype(np.uint8)
    if how in ("jpeg", "all"):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=JPEG)
        pixels = np.asarray(Image.open(file))
    return pixels


@pytest.mark.parametrize("share", [0.2, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("width", "height", "how", "most"),
    [
        (128, 128, "none", 500),
        (128, 128, "noise", 100),
        (128, 128, "blur", 100),
        (128, 128, "jpeg", 100),
        (128, 128, "all", 150),
        (256, 256, "none", 500),
        (256, 256, "all", 150),
        (208, 144, "all", 60),
        (133, 251, "none", 60),
    ],
)
@pytest.mark.sample(3)
def test_true_pictures_pass(width: int, height: int, how: str, most: int, share: float):
    count = round(share * most)
    rng = np.random.default_rng(most + height)
    scenes = [jittered(rng, random_scene(rng, held_out=True)) for _ in range(count)]
    pictures = [disturbed(picture(scene, width, height), how, rng) for scene in scenes]
    failed = [(s, v) for s, p in zip(scenes, pictures, strict=True) if not (v := check(p, requirements(s))).ok]
    overlap = min(one.overlap for p in pictures for one in look(p)[1])
    print(f"{width}x{height} {how}: {count - len(failed)}/{count} right, least overlap {overlap:.3f}")
    assert failed == []


# How near to an ideal shape


@pytest.mark.parametrize("side", [64, 128, 256])
def test_ideal_shapes_fit_themselves(side: int):
    """At 64 the tips of a small star are thinner than a pixel."""
    rng = np.random.default_rng(side)
    scenes = [
        jittered(rng, shapes.one("red", shape, size, shapes.pick(rng, list(POSITIONS)), "white"))
        for shape in SHAPES
        for size in SIZES
    ]
    found = [ideal_overlap(picture(scene, side, side)) for scene in scenes]
    print(f"{side}: overlap {min(found):.3f} at least, {np.mean(found):.3f} on average")
    assert min(found) > {64: 0.9, 128: 0.95, 256: 0.97}[side]
    assert np.mean(found) > 0.97
    assert ideal_overlap(np.full((side, side, 3), 250, np.uint8)) == 0


Inside = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Of x and y in radii, y up, whether it is inside."""


def painted(inside: Inside, side: int) -> np.ndarray:
    """A medium green object on white, each pixel covered by what of 4 x 4 points is inside."""
    points = (np.arange(4 * side) + 0.5) / 4 - side / 2
    x, y = points[None, :] / (SIZES["medium"] * side), -points[:, None] / (SIZES["medium"] * side)
    cover = inside(x, y).reshape(side, 4, side, 4).mean(axis=(1, 3))[..., None]
    white, green = (np.array(PALETTE[name], np.float64) for name in ("white", "green"))
    return np.rint(white + cover * (green - white)).astype(np.uint8)


def pear(tip: float, end: float) -> Inside:
    """A disc, and on it ever smaller ones up to `tip` above its centre, the last one of radius `end`."""

    def inside(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        steps = np.linspace(0, 1, 40)
        return np.any([x * x + (y - t * (tip - end)) ** 2 < (1 - t * (1 - end)) ** 2 for t in steps], axis=0)

    return inside


def lump(*waves: tuple[int, float]) -> Inside:
    """A disc whose radius has waves: so many around, so high."""

    def inside(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        angle = np.arctan2(y, x)
        return np.hypot(x, y) < 1 + sum(height * np.cos(count * angle + count) for count, height in waves)

    return inside


NO_CIRCLES = {
    "pear": pear(1.35, 0.05),
    "blunt pear": pear(1.4, 0.4),
    "long pear": pear(1.6, 0.3),
    "egg": lambda x, y: (1.15 * x) ** 2 + (y / 1.15) ** 2 < 1,
    "three bumps": lump((3, 0.14)),
    "two waves": lump((2, 0.1), (3, 0.1)),
    "five bumps": lump((5, 0.14)),
    "bitten": lambda x, y: (x * x + y * y < 1) & ((x - 0.9) ** 2 + (y - 0.6) ** 2 > 0.16),
}


@pytest.mark.parametrize("side", [128, 256])
@pytest.mark.parametrize("name", NO_CIRCLES)
@pytest.mark.sample(4)
def test_what_is_most_like_a_circle_and_is_none(name: str, side: int):
    pixels = painted(NO_CIRCLES[name], side)
    seen = look(pixels)[1]
    print(f"{name}: {seen}, overlap with the ideal {ideal_overlap(pixels):.3f}")
    assert len(seen) == 1 and seen[0].shape != "circle"
    verdict = check(pixels, parse("a medium green circle"))
    assert verdict.color and not verdict.shape and not verdict.ok


@pytest.mark.parametrize("how", ["none", "all"])
@pytest.mark.parametrize("side", [48, 64, 128, 256])
def test_true_circles_are_far_from_the_bound(side: int, how: str):
    rng = np.random.default_rng(side)
    rough = []
    for size in [*SIZES] * 4:
        scene = jittered(rng, shapes.one("blue", "circle", size, "center", "white"))
        mask = disturbed(picture(scene, side, side), how, rng)[..., 0] < 140  # half covered
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        rough.append(fit(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1], "circle", np.pi).rough)
    print(f"{side}, {how}: rough {max(rough):.3f} at most, the bound is {ROUGH}")
    assert max(rough) < ROUGH / 2


# Swaps: for each, what must then be wrong


def single(rng: np.random.Generator) -> Scene:
    while (scene := random_scene(rng)).position is None:
        pass
    return scene


def recolored(scene: Scene, rng: np.random.Generator) -> Parsed:
    """The requirements of `scene` but for one object's colour."""
    asked = requirements(scene)
    index = int(rng.random() * len(asked.things))
    others = [color for color in PALETTE if color not in {thing.color for thing in asked.things}]
    things = list(asked.things)
    things[index] = replace(things[index], color=shapes.pick(rng, others))
    return replace(asked, things=tuple(things))


def reshaped(scene: Scene, rng: np.random.Generator) -> Parsed:
    asked = requirements(scene)
    index = int(rng.random() * len(asked.things))
    others = [shape for shape in SHAPES if shape not in {thing.shape for thing in asked.things}]
    things = list(asked.things)
    things[index] = replace(things[index], shape=shapes.pick(rng, others))
    return replace(asked, things=tuple(things))


def swaps(scene: Scene, rng: np.random.Generator) -> Iterator[tuple[str, Parsed]]:
    """(the answer that must be no, requirements that differ from the scene in that alone)."""
    asked = requirements(scene)

    def other(items: object, than: str | None) -> str:
        return shapes.pick(rng, [item for item in items if item != than])

    yield "color", recolored(scene, rng)
    yield "shape", reshaped(scene, rng)
    yield "background", replace(asked, background=other(PALETTE, asked.background))
    first, *rest = asked.things
    yield "size", replace(asked, things=(replace(first, size=other(SIZES, first.size)), *rest))
    yield "count", replace(asked, things=(replace(first, count=first.count % 3 + 1), *rest))
    if asked.position:
        yield "position", replace(asked, position=other(POSITIONS, asked.position))
    if asked.relation in shapes.RELATIONS:
        yield "relation", replace(asked, relation=other(shapes.RELATIONS, asked.relation))
        yield "relation", replace(asked, things=asked.things[::-1])


@pytest.mark.parametrize("how", ["none", "all"])
@pytest.mark.sample(0)
def test_swaps_fail(how: str):
    rng = np.random.default_rng(8)
    passed: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    blind: Counter[str] = Counter()
    for _ in range(60):
        scene = random_scene(rng, held_out=True)
        pixels = disturbed(picture(scene, 128, 128), how, rng)
        for name, wrong in swaps(scene, rng):
            verdict = check(pixels, wrong)
            tried[name] += 1
            passed[name] += verdict.ok
            blind[name] += getattr(verdict, name) is not False
    print(f"swapped, {how}: " + ", ".join(f"{name} {passed[name]}/{tried[name]} pass" for name in tried))
    assert set(tried) == {"color", "shape", "background", "size", "count", "position", "relation"}
    assert min(tried.values()) > 10
    assert sum(passed.values()) == 0
    assert sum(blind.values()) == 0  # it is the swapped thing that is called wrong


def test_only_the_swapped_thing_is_wrong():
    rng = np.random.default_rng(9)
    for _ in range(60):
        scene = single(rng)
        pixels = picture(scene, 128, 128)
        for name, wrong in swaps(scene, rng):
            verdict = check(pixels, wrong)
            answers = {field.name: getattr(verdict, field.name) for field in fields(verdict)}
            no = {key for key, answer in answers.items() if answer is False}
            assert no == ({name, "color", "shape", "size"} if name == "count" else {name}), (name, answers)


def test_what_is_not_asked_is_none():
    scene = shapes.one("red", "circle", "small", "left", "white")
    pixels = picture(scene, 128, 128)
    verdict = check(pixels, parse("a circle"))
    assert verdict.ok
    assert (verdict.shape, verdict.count) == (True, True)
    assert (verdict.color, verdict.position, verdict.size, verdict.background, verdict.relation) == (None,) * 5
    assert check(pixels, parse("circles")).count is None
    assert check(pixels, parse("a small red circle on the left on a white background")).ok
    assert not check(pixels, parse("a cat")).ok  # nothing was asked for


@pytest.mark.parametrize("kind", ["flat", "noise", "specks", "half"])
def test_what_is_no_object(kind: str):
    rng = np.random.default_rng(0)
    pixels = np.full((128, 160, 3), 250, np.uint8)
    if kind == "noise":
        pixels = rng.integers(0, 256, pixels.shape, np.uint8)
    if kind == "specks":
        pixels[::7, ::5] = 0
    if kind == "half":
        pixels[:, 70:] = (220, 30, 35)
    verdict = check(pixels, parse("a red circle"))
    print(kind, look(pixels)[1][:2])
    assert not verdict.ok
    assert not (verdict.color and verdict.shape)


def test_one_too_many():
    pixels = picture(shapes.several("red", "star", "small", 3, "white"), 128, 128)
    two = check(pixels, parse("two red stars"))
    assert (two.color, two.shape, two.count) == (True, True, False)
    assert check(pixels, parse("three red stars")).ok
    assert check(pixels, parse("red stars")).ok


def test_many_things():
    rng = np.random.default_rng(2)
    pixels = picture(random_scene(rng), 64, 64)
    assert not check(pixels, Parsed(things=(Thing(shape="star", count=3), Thing(shape="ring", count=3)))).ok
    with pytest.raises(UsageError, match="more than 6"):
        check(pixels, Parsed(things=(Thing(shape="star", count=7),)))
    with pytest.raises(UsageError, match="more than 6"):
        check(pixels, Parsed(things=(Thing(shape="star"),) * 7))


def flooded(mask: np.ndarray) -> set[frozenset[tuple[int, int]]]:
    """Regions by flood fill."""
    left = {(int(y), int(x)) for y, x in np.argwhere(mask)}
    regions = set()
    while left:
        region, border = set(), [left.pop()]
        while border:
            y, x = border.pop()
            region.add((y, x))
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            border += near
        regions.add(frozenset(region))
    return regions


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.6, 0.8, 1.0])
def test_components_are_what_a_flood_fills(share: float):
    rng = np.random.default_rng(6)
    for height, width in ((1, 1), (1, 9), (9, 1), (23, 31), (40, 17)):
        mask = rng.random((height, width)) < share
        found = [
            frozenset((int(y) + row, int(x) + column) for y, x in np.argwhere(region))
            for row, column, region in components(mask)
        ]
        assert len(found) == len(set(found))
        assert set(found) == flooded(mask)
        large = [region for *_, region in components(mask, 4)]
        assert sorted(int(r.sum()) for r in large) == sorted(len(r) for r in flooded(mask) if len(r) >= 4)


# The gate


def test_gate_prompts():
    prompts = gate_prompts()
    groups = Counter(prompt.group for prompt in prompts)
    print(f"{len(prompts)} prompts: {dict(groups)}")
    assert prompts == gate_prompts()
    assert groups["trained"] + groups["held-out"] == 352
    assert groups["held-out"] == 32
    assert set(groups) == {
        *("trained", "held-out", "chinese", "position", "size", "background", "count", "relation"),
        "held-out-relation",
    }
    for prompt in prompts:
        assert parse(prompt.prompt) == prompt.wanted, prompt
        held_out = shapes.is_held_out(asked_for(prompt.wanted, prompt.seed))
        assert held_out == prompt.group.startswith("held-out") or prompt.group == "chinese"
    assert len({(prompt.prompt, prompt.seed) for prompt in prompts}) == len(prompts)
    chinese = {(p.wanted, p.seed) for p in prompts if p.group == "chinese"}
    assert chinese < {(p.wanted, p.seed) for p in prompts if p.group in ("trained", "held-out")}  # a fair comparison


def test_gate_on_true_pictures():
    prompts = [prompt for i, prompt in enumerate(gate_prompts()) if i % 8 == 0 or prompt.group == "background"]
    passed = sum(check(picture(asked_for(p.wanted, p.seed), 128, 128), p.wanted).ok for p in prompts)
    print(f"true pictures of the gate's prompts: {passed}/{len(prompts)} pass")
    assert passed == len(prompts)


def test_selftest_prompts():
    prompts = selftest_prompts()
    assert len(prompts) == 40
    assert prompts == selftest_prompts()
    assert len({(prompt.prompt, prompt.seed) for prompt in prompts}) == 40
    assert {prompt.group for prompt in prompts} == {prompt.group for prompt in gate_prompts()}
    assert {p.wanted.position for p in prompts} >= set(POSITIONS)
    assert {p.wanted.relation for p in prompts} >= {"and", *shapes.RELATIONS}
    assert {t.size for p in prompts for t in p.wanted.things} >= set(SIZES)


def test_dataset_hash():
    assert dataset_hash() == DATASET
