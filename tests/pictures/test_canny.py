"""Canny's edges: against OpenCV's own, whose pixels were recorded once, and against the definition, one pixel at a time
in floats."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from qwenimg.common.pictures import canny

Picture = np.ndarray


def noise(height: int, width: int, levels: int = 256, seed: int = 0) -> Picture:
    return np.random.default_rng(seed).integers(0, levels, (height, width, 3), np.uint8)


def hills(height: int, width: int) -> Picture:
    """Smooth in each channel, with other slopes in each."""
    y, x = np.mgrid[:height, :width].astype(np.float64)
    waves = [
        np.floor(127.5 + 60 * (np.cos(x * a) + np.cos(y * b + 1))) for a, b in ((0.9, 0.5), (0.4, 0.8), (0.7, 0.65))
    ]
    return np.stack(waves, axis=2).astype(np.uint8)


def disc(side: int) -> Picture:
    y, x = np.mgrid[:side, :side] - side // 2
    return np.where((x**2 + y**2 < (side // 3) ** 2)[:, :, None], np.uint8(200), np.uint8(10)).repeat(3, axis=2)


# The white pixels of `cv2.Canny(picture, 100, 200)` of OpenCV 5.0.0, and its first 16 digits of SHA-256
RECORDED: dict[str, tuple[Callable[[], Picture], int, str]] = {
    "noise": (lambda: noise(50, 60), 1106, "1db167a8930a7697"),
    "three levels": (lambda: noise(64, 48, 3, 1) * 90, 805, "3d7232f53abacb1b"),
    "black and white": (lambda: noise(40, 72, 2, 2) * 255, 668, "ef5c58eea9cfdff2"),
    "hills": (lambda: hills(96, 130), 4285, "ac7188d90a06b370"),
    "disc": (lambda: disc(90), 200, "184c32bee9a7df06"),
    "a row": (lambda: noise(1, 40), 15, "a595b7bdeaf3b196"),
    "a column": (lambda: noise(40, 1), 15, "a595b7bdeaf3b196"),
    "a point": (lambda: noise(1, 1), 0, "6e340b9cffb37a98"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_pixels_are_those_of_opencv(name: str) -> None:
    make, white, digest = RECORDED[name]
    edges = canny.edges(make())
    assert edges.dtype == np.uint8 and np.array_equal(edges, edges[:, :, :1].repeat(3, axis=2))
    print(f"{name}: {int((edges[:, :, 0] == 255).sum())} white pixels (OpenCV {white})")
    assert hashlib.sha256(edges[:, :, 0].tobytes()).hexdigest()[:16] == digest


def defined(picture: Picture) -> Picture:
    """The edges by the definition: gradients, crests, and what leads to a strong one, by recursion."""
    height, width, _ = picture.shape
    values = picture.astype(np.float64)

    def at(y: int, x: int, c: int) -> float:
        return float(values[min(max(y, 0), height - 1), min(max(x, 0), width - 1), c])

    def gradient(y: int, x: int) -> tuple[float, float]:
        best = (0.0, 0.0)
        for c in range(3):
            dx = sum(w * (at(y + r, x + 1, c) - at(y + r, x - 1, c)) for r, w in ((-1, 1), (0, 2), (1, 1)))
            dy = sum(w * (at(y + 1, x + r, c) - at(y - 1, x + r, c)) for r, w in ((-1, 1), (0, 2), (1, 1)))
            if c == 0 or abs(dx) + abs(dy) > abs(best[0]) + abs(best[1]):
                best = dx, dy
        return best

    def length(y: int, x: int) -> float:
        inside = 0 <= y < height and 0 <= x < width
        return sum(map(abs, gradient(y, x))) if inside else 0.0

    def is_crest(y: int, x: int) -> bool:
        (dx, dy), here = gradient(y, x), length(y, x)
        angle = np.degrees(np.arctan2(abs(dy), abs(dx)))
        if angle < 22.5:
            return here > length(y, x - 1) and here >= length(y, x + 1)
        if angle > 67.5:
            return here > length(y - 1, x) and here >= length(y + 1, x)
        side = -1 if (dx < 0) != (dy < 0) else 1
        return here > length(y - 1, x - side) and here > length(y + 1, x + side)

    crests = {(y, x): length(y, x) for y in range(height) for x in range(width) if is_crest(y, x)}
    open_, edges = [place for place, long in crests.items() if long > 200], np.zeros((height, width), np.uint8)
    while open_:
        y, x = open_.pop()
        if crests.get((y, x), 0) <= 100 or edges[y, x]:
            continue
        edges[y, x] = 255
        open_ += [(y + down, x + right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    return edges


@pytest.mark.parametrize(
    "picture",
    [noise(17, 23), noise(12, 9, 3, seed=4) * 90, hills(24, 19), disc(21)],
    ids=["noise", "levels", "hills", "disc"],
)
def test_pixels_are_those_of_the_definition(picture: Picture) -> None:
    expected = defined(picture)
    assert 0.02 < (expected > 0).mean() < 0.6
    assert np.array_equal(canny.edges(picture)[:, :, 0], expected)


def test_an_edge_is_where_the_step_is() -> None:
    """A closed form: a step of 50 between two columns has gradients of 200, which is no strong one; one of 51 is."""
    picture = np.zeros((6, 10, 3), np.uint8)
    picture[:, 5:] = 50
    assert not canny.edges(picture).any()
    picture[:, 5:] = 51
    edges = canny.edges(picture)[:, :, 0]
    assert (edges[:, 4] == 255).all() and edges.sum() == 6 * 255


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1)])
def test_narrow_pictures(shape: tuple[int, int]) -> None:
    assert canny.edges(noise(*shape)).shape == (*shape, 3)


def test_a_fault_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part, left out or off by one, changes the edges of a dim picture."""
    picture = noise(50, 60, 60)
    right = canny.edges(picture)
    for name, wrong in {"LOW": 200, "HIGH": 400, "TAN_22": 0}.items():
        with monkeypatch.context() as patch:
            patch.setattr(canny, name, wrong)
            assert not np.array_equal(canny.edges(picture), right), name
