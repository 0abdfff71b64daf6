"""The built-in model's data: shapes against Pillow's polygons, scenes against their rules, prompts read back."""

from __future__ import annotations

import math
import re
import time
from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageDraw
from training import scenes as shapes
from training.describe import LANGUAGES, describe
from training.scenes import Object, Scene, random_scene, render, requirements

from qwenimg.common.shapes.scenes import HELD_OUT_PAIRS, PALETTE, POSITIONS, SHAPES, SIZES, trained_pairs
from qwenimg.common.shapes.words import (
    COLOR_WORDS,
    SHAPE_WORDS,
    Parsed,
    Thing,
    parse,
    vocabulary,
)

COVERAGE_MEAN = 0.002  # measured 0.0014: corners are not Euclidean, and Pillow's outline is half a fine pixel wide
COVERAGE_AREA = 0.004  # relative; measured 0.003
FASTEST_128, FASTEST_256 = 400, 100  # pictures per CPU second: what training can use
RADIUS = 37.3


def turned(degrees: float, length: float = 1.0) -> tuple[float, float]:
    """A point at an angle from straight up, clockwise; y up."""
    return length * math.sin(math.radians(degrees)), length * math.cos(math.radians(degrees))


def by_pillow(shape: str, side: int, fine: int = 16) -> np.ndarray:
    """Coverage [side, side] of a shape of `RADIUS` pixels in the middle: drawn `fine` times larger, and averaged."""
    picture = Image.new("L", (side * fine, side * fine))
    draw = ImageDraw.Draw(picture)
    scale, middle = RADIUS * fine, side * fine / 2

    def polygon(*points: tuple[float, float]) -> None:
        draw.polygon([(middle + x * scale, middle - y * scale) for x, y in points], fill=255)

    def disc(x: float, y: float, radius: float, fill: int = 255) -> None:
        box = [middle + (x - radius) * scale, middle - (y + radius) * scale]
        draw.ellipse([*box, middle + (x + radius) * scale, middle - (y - radius) * scale], fill=fill)

    half = math.sqrt(3) / 2
    if shape in ("circle", "ring"):
        disc(0, 0, 1)
    if shape == "ring":
        disc(0, 0, 0.55, fill=0)
    if shape == "square":
        polygon((-0.88, -0.88), (-0.88, 0.88), (0.88, 0.88), (0.88, -0.88))
    if shape == "triangle":
        polygon((-1, -half), (0, half), (1, -half))
    if shape == "star":
        points = [turned(36 * i, 0.4 if i % 2 else 1) for i in range(10)]
        rise = (max(y for _, y in points) + min(y for _, y in points)) / 2
        polygon(*((x, y - rise) for x, y in points))
    if shape == "diamond":
        polygon((0, -1), (-0.72, 0), (0, 1), (0.72, 0))
    if shape == "cross":
        polygon((-1, -0.34), (-1, 0.34), (1, 0.34), (1, -0.34))
        polygon((-0.34, -1), (-0.34, 1), (0.34, 1), (0.34, -1))
    if shape == "heart":
        side_ = 2 * (math.sqrt(2) - 1)
        down = (1 - side_) / 2
        polygon((0, -side_ - down), (-side_, -down), (0, side_ - down), (side_, -down))
        for x in (-side_ / 2, side_ / 2):
            disc(x, side_ / 2 - down, side_ / math.sqrt(2))
    return np.asarray(picture, np.float64).reshape(side, fine, side, fine).mean((1, 3)) / 255


@pytest.mark.parametrize("shape", SHAPES)
def test_shape_is_what_pillow_draws(shape: str):
    side = 101
    scene = Scene(
        objects=(Object(shape=shape, color="red", size="", x=0.5, y=0.5, radius=RADIUS / side),), background="white"
    )
    red, white = PALETTE["red"][1] / 127.5 - 1, PALETTE["white"][1] / 127.5 - 1
    coverage = (render(scene, side, side)[1].astype(np.float64) - white) / (red - white)
    expected = by_pillow(shape, side)
    mean = abs(coverage - expected).mean()
    area = abs(coverage.sum() / expected.sum() - 1)
    rows, columns = np.nonzero(expected > 0.5)
    print(f"{shape}: mean difference {mean:.5f}, largest {abs(coverage - expected).max():.3f}, area off by {area:.5f}")
    assert mean < COVERAGE_MEAN
    assert area < COVERAGE_AREA
    assert abs(rows.min() + rows.max() - side + 1) <= 1  # centred on its box
    assert abs(columns.min() + columns.max() - side + 1) <= 1


@pytest.mark.parametrize(("width", "height"), [(128, 128), (256, 256), (208, 144), (97, 201), (7, 5), (1, 1)])
def test_picture(width: int, height: int):
    rng = np.random.default_rng(width)
    for _ in range(20):
        scene = random_scene(rng)
        image = render(scene, width, height)
        assert image.shape == (3, height, width)
        assert image.dtype == np.float32
        assert np.isfinite(image).all()
        assert abs(image).max() < 0.97  # not at the ends of the range
        if min(width, height) > 90:
            assert np.allclose(image[:, 0, 0] * 127.5 + 127.5, PALETTE[scene.background], atol=1e-4)
            for o in scene.objects:
                inside = (0, 0.775 * o.radius) if o.shape == "ring" else (0, 0)
                y = int(o.y * height - inside[1] * min(width, height))
                assert np.allclose(image[:, y, int(o.x * width)] * 127.5 + 127.5, PALETTE[o.color], atol=1e-4)


def test_speed():
    rng = np.random.default_rng(5)
    for side, fastest in ((128, FASTEST_128), (256, FASTEST_256)):
        start = time.process_time()
        for _ in range(200):
            render(random_scene(rng), side, side)
        rate = 200 / (time.process_time() - start)
        print(f"{side} px: {rate:.0f} pictures per CPU second, scenes included")
        assert rate > fastest


# Scenes


def many_scenes(count: int, held_out: bool = True) -> list[Scene]:
    rng = np.random.default_rng(11)
    return [random_scene(rng, held_out) for _ in range(count)]


def test_seed_decides():
    first, again = (random_scene(np.random.default_rng(4)) for _ in range(2))
    assert first == again != random_scene(np.random.default_rng(5))
    assert render(first, 64, 64).tobytes() == render(again, 64, 64).tobytes()


def test_scenes_keep_their_rules():
    nearest = 9.0
    for scene in many_scenes(4000):
        for o in scene.objects:
            assert shapes.contrasts(o.color, scene.background)
            assert o.radius <= min(o.x, 1 - o.x, o.y, 1 - o.y)  # inside a square, and so inside any other size
            assert o.radius == SIZES[o.size]
            assert {o.x, o.y} <= {shapes.LOW, shapes.MIDDLE, shapes.HIGH}
        for i, a in enumerate(scene.objects):
            for b in scene.objects[:i]:
                gap = max(abs(a.x - b.x), abs(a.y - b.y)) - a.radius - b.radius
                nearest = min(nearest, gap)
                assert (
                    (a.color, a.shape) != (b.color, b.shape)
                    if scene.relation
                    else (a.color, a.shape) == (b.color, b.shape)
                )
    print(f"nearest boxes {nearest:.3f} of the side apart")
    assert nearest > 0.02


def test_everything_occurs():
    scenes = many_scenes(4000)
    seen = Counter(word for s in scenes for o in s.objects for word in (o.shape, o.color, o.size))
    seen += Counter(word for s in scenes for word in (s.position, s.relation, f"on {s.background}"))
    seen += Counter(f"{len(s.objects)} of the same" for s in scenes if not s.relation)
    expected = {*SHAPES, *PALETTE, *SIZES, *POSITIONS, "and", *shapes.RELATIONS, "2 of the same", "3 of the same"}
    expected |= {f"on {background}" for background in shapes.BACKGROUNDS}
    assert expected <= set(seen)
    assert min(seen[word] for word in expected) > 100


def test_what_no_prompt_says_has_one_meaning():
    """Two alike, and "A and B", lie side by side, the first on the left; three alike lie in one way too."""
    found = Counter()
    for scene in (s for s in many_scenes(4000) if len(s.objects) > 1 and s.relation in (None, "and")):
        found[scene.relation, len(scene.objects)] += 1
        if len(scene.objects) == 2:
            left, right = scene.objects
            assert abs(left.y - right.y) < 0.05
        else:
            top, left, right = scene.objects
            assert left.x < top.x - 0.15 and right.x > top.x + 0.15
            assert min(left.y, right.y) > top.y + 0.4
        assert left.x < right.x - 0.3
    print(dict(found))
    assert len(found) == 3 and min(found.values()) > 200


def test_held_out_pairs():
    held_out, trained = list(HELD_OUT_PAIRS), trained_pairs()
    assert len(held_out) == 8
    assert len(set(held_out) | set(trained)) == 88 == len(SHAPES) * len(PALETTE)
    assert {shape for _, shape in held_out} == set(SHAPES)
    assert len({color for color, _ in held_out}) == 8
    shown = {(o.color, o.shape) for s in many_scenes(6000, held_out=False) for o in s.objects}
    assert shown == set(trained)
    assert set(held_out) < {(o.color, o.shape) for s in many_scenes(6000) for o in s.objects}


def test_held_out_relations():
    red, green = ("red", "circle"), ("green", "star")
    sizes = ("small", "medium")
    assert shapes.is_held_out(shapes.two(red, "left of", green, sizes, "white"))
    assert shapes.is_held_out(shapes.two(green, "right of", red, sizes, "white"))
    assert not shapes.is_held_out(shapes.two(green, "left of", red, sizes, "white"))
    assert not shapes.is_held_out(shapes.two(red, "above", green, sizes, "white"))
    assert shapes.is_held_out(shapes.two(red, "and", green, sizes, "white"))  # the first is on the left
    assert not shapes.is_held_out(shapes.two(green, "and", red, sizes, "white"))
    for scene in many_scenes(6000, held_out=False):
        for a in scene.objects:
            for b in scene.objects:
                if a.y - b.y < -0.2:
                    assert (a.color, b.color) != ("blue", "yellow")
                if a.x - b.x < -0.2:
                    assert (a.color, b.color) != ("red", "green")


# Prompts


def disagreements(parsed: Parsed, scene: Scene) -> list[str]:
    """What `parsed` says and `scene` is not."""
    true = requirements(scene)
    wrong = [f"unknown: {parsed.unknown}"] if parsed.unknown else []
    names = ("background", "position", "relation")
    wrong += [n for n in names if getattr(parsed, n) not in (None, getattr(true, n))]
    if len(parsed.things) != len(true.things):
        return [*wrong, "number of things"]
    for said, is_ in zip(parsed.things, true.things, strict=True):
        wrong += [n for n in ("color", "size") if getattr(said, n) not in (None, getattr(is_, n))]
        wrong += [n for n in ("shape", "count") if getattr(said, n) != getattr(is_, n)]
    return wrong


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.sample(0)
def test_parse_reads_what_describe_writes(language):
    rng = np.random.default_rng(2)
    said: Counter[str] = Counter()
    different = set()
    for scene in many_scenes(6000):
        prompt = describe(scene, rng, language)
        parsed = parse(prompt)
        assert disagreements(parsed, scene) == [], (prompt, parsed, scene)
        said["relation"] += parsed.relation == scene.relation
        said["background"] += parsed.background is not None
        said["position"] += parsed.position is not None
        said["color"] += parsed.things[0].color is not None
        said["size"] += parsed.things[0].size is not None
        different.add(prompt)
    print(f"{language}: 6000 prompts, {len(different)} different, all agree; said {dict(said)}")
    assert said["relation"] == 6000  # never left out
    assert all(500 < said[name] < 5990 for name in ("background", "position", "color", "size"))
    assert len(different) > 4500


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.sample(1)
def test_every_synonym_is_written_and_in_the_vocabulary(language):
    rng = np.random.default_rng(3)
    text = " ".join(describe(scene, rng, language).lower() for scene in many_scenes(6000))
    words = set(re.findall(r"[a-z0-9][a-z0-9-]*", text))
    assert words <= vocabulary()
    for table in (SHAPE_WORDS, COLOR_WORDS):
        assert all(word in text for synonyms in table.values() for word in synonyms[LANGUAGES.index(language)])
    articles = re.findall(r"\b(an?) ([a-z])", text)
    assert all((article == "an") == (letter in "aeiou") for article, letter in articles)


def said(*things: Thing, **rest: object) -> Parsed:
    return Parsed(things=things, **rest)


RED_CIRCLE = Thing(shape="circle", color="red")
BLUE_SQUARE = Thing(shape="square", color="blue")
BLUE_BOXES = Thing(shape="square", color="blue", count=2)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a red circle", said(RED_CIRCLE)),
        ("RED   disc!", said(RED_CIRCLE)),
        ("Draw a circle that is red.", said(RED_CIRCLE)),
        ("a circle in red on a blue background", said(RED_CIRCLE, background="blue")),
        ("a circle in red, blue backdrop", said(RED_CIRCLE, background="blue")),
        ("on a grey background, a red circle at the top", said(RED_CIRCLE, background="gray", position="top")),
        ("a red circle, the background is white", said(RED_CIRCLE, background="white")),
        ("a red circle on the left side of the picture", said(RED_CIRCLE, position="left")),
        ("a red circle to the left of the image", said(RED_CIRCLE, position="left")),
        ("a red circle at the top of the picture", said(RED_CIRCLE, position="top")),
        ("a red circle left of a blue square", said(RED_CIRCLE, BLUE_SQUARE, relation="left of")),
        ("a red circle on top of the blue box", said(RED_CIRCLE, BLUE_SQUARE, relation="above")),
        ("a red circle, and a blue square", said(RED_CIRCLE, BLUE_SQUARE, relation="and")),
        ("a red circle on the right and a blue square on the left", said(RED_CIRCLE, BLUE_SQUARE, relation="right of")),
        ("two blue boxes", said(BLUE_BOXES)),
        ("2 blue squares", said(BLUE_BOXES)),
        ("blue squares", said(Thing(shape="square", color="blue", count=None))),
        ("a huge violet plus", said(Thing(shape="cross", color="purple", size="large"))),
        ("一个红色的圆在左边", said(RED_CIRCLE, position="left")),
        ("左边有一个红色的圆", said(RED_CIRCLE, position="left")),
        ("蓝色背景上的两个绿色三角形", said(Thing(shape="triangle", color="green", count=2), background="blue")),
        ("红色的圆，背景是白色", said(RED_CIRCLE, background="white")),
        ("红圆在蓝色方块的上面", said(RED_CIRCLE, BLUE_SQUARE, relation="above")),
        ("蓝色方块的左边有一个红圆", said(RED_CIRCLE, BLUE_SQUARE, relation="left of")),
        ("画一个红色的圆和一个蓝色的正方形", said(RED_CIRCLE, BLUE_SQUARE, relation="and")),
        ("一个大红圆", said(Thing(shape="circle", color="red", size="large"))),
        ("２个粉红色心形", said(Thing(shape="heart", color="pink", count=2))),
        ("a red 圆", said(RED_CIRCLE)),
    ],
)
def test_reading(prompt: str, expected: Parsed):
    assert parse(prompt) == expected
    assert parse(prompt.upper()) == expected


@pytest.mark.parametrize(
    ("prompt", "unknown", "noun"),
    [
        ("a cat in a hat", ("cat", "hat"), False),
        ("一只猫", ("猫",), False),
        ("a red cat and a red circle, a CAT", ("cat",), True),
        ("a café near the star", ("café", "near"), True),
        ("un círculo rojo", ("un", "círculo", "rojo"), False),
        ("four squares", ("four",), True),
        ("starry night", ("starry", "night"), False),
        ("一只小狗在红色的圆上面", ("狗",), True),
        ("🐱🐱 star", ("🐱🐱",), True),
        ("a red background", (), False),
        ("it’s a star that's red, isn't it", ("isn't",), True),
        ("", (), False),
        ("\x00 \ud800 ,,, __", (), False),
    ],
)
def test_unknown_words(prompt: str, unknown: tuple[str, ...], noun: bool):
    parsed = parse(prompt)
    assert parsed.unknown == unknown
    assert parsed.has_noun is noun


def test_a_word_has_one_meaning():
    words = [w for table in (SHAPE_WORDS, COLOR_WORDS) for both in table.values() for words in both for w in words]
    assert len(words) == len(set(words))
    assert all(word == word.lower() and " " not in word for word in vocabulary())
    print(f"{len(vocabulary())} words")
