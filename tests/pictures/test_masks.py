"""The masked area against diffusers' functions for `padding_mask_crop`, and blur and fill against their formulas."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import Image, ImageFilter, ImageOps

from qwenimg.common.pictures import masks
from qwenimg.common.pictures.masks import Box
from qwenimg.common.pictures.pixels import Uint8

BLENDED = 1  # of 255: they blend in 8-bit premultiplied colours, here it is rounded once
CASES = 2_000
rng = np.random.default_rng(8)


def random_mask(most: int) -> Uint8:
    """Zeros with a rectangle of some value, with a pixel, with noise, or white all over; some at a border."""
    rows, columns = (int(side) for side in rng.integers(2, most, 2))
    mask, kind = np.zeros((rows, columns), np.uint8), rng.integers(8)
    (top, bottom), (left, right) = (sorted(rng.integers(0, side + 1, 2)) for side in (rows, columns))
    if kind == 0:
        mask[:] = 255
    elif kind == 1:
        mask[rng.integers(rows), rng.integers(columns)] = rng.integers(1, 256)
    elif kind == 2:
        mask[top:bottom, left:right] = rng.integers(0, 256, (bottom - top, right - left))
    else:
        mask[top:bottom, left:right] = rng.choice((255, 255, 127, 128, 1))
    return mask


def cases(count: int, most: int) -> Iterator[tuple[Uint8, Box, int, int, int]]:
    """Masks with their areas, their padding, and a size."""
    found = 0
    while found < count:
        mask, padding = random_mask(most), int(rng.choice((0, 1, 8, 32, 500)))
        width, height = (int(side) * int(rng.choice((1, 8, 16))) for side in rng.integers(1, 80, 2))
        box = masks.area(mask, padding, width, height)
        assert (box is None) == (not mask.any())
        if box is not None:
            found += 1
            yield mask, box, padding, width, height


def test_the_area_is_that_of_diffusers() -> None:
    for mask, box, padding, width, height in cases(CASES, 140):
        expected = VaeImageProcessor.get_crop_region(Image.fromarray(mask), width, height, padding)
        assert tuple(box) == tuple(expected), (mask.shape, padding, width, height)
        rows, columns = mask.shape
        assert 0 <= box.left < box.right <= columns and 0 <= box.top < box.bottom <= rows
        outside = mask.copy()
        outside[box.top : box.bottom, box.left : box.right] = 0
        assert not outside.any()
    print(f"{CASES:,} masks: the same area")


@pytest.mark.sample(0)
def test_cut_and_put_back_as_diffusers_does() -> None:
    processor, worst = VaeImageProcessor(), 0
    for i, (mask, *_) in enumerate(cases(250, 140)):
        width, height = (16 * int(side) for side in rng.integers(9, 15, 2))  # in odd ones theirs leaves a black row
        box = masks.area(mask, 8, width, height)
        assert box is not None
        if i % 2:
            mask = np.asarray(Image.fromarray(mask).filter(ImageFilter.GaussianBlur(2)))
        picture, drawn = (rng.integers(0, 256, (*size, 3), np.uint8) for size in (mask.shape, (height, width)))
        for whole in (picture, mask):
            part = processor.resize(Image.fromarray(whole).crop(box), height, width, "fill")
            expected = np.asarray(part if whole is picture else part.convert("L"))
            assert np.array_equal(masks.cut(whole, box, width, height), expected)
        pieces = (Image.fromarray(one) for one in (mask, picture, drawn))
        expected = np.asarray(processor.apply_overlay(*pieces, tuple(box)))
        made = masks.put_back(picture, drawn, box, mask)
        assert np.array_equal(made[mask == 0], picture[mask == 0])
        assert np.array_equal(made[mask == 255], expected[mask == 255])
        worst = max(worst, int(np.abs(made.astype(int) - expected).max()))
    print(f"put back: at most {worst} of 255")
    assert worst <= BLENDED


def test_a_strip_takes_no_more_memory_than_it_has() -> None:
    picture = np.zeros((2, 30_000, 3), np.uint8)
    mask = np.full((2, 30_000), 255, np.uint8)
    box = masks.area(mask, 0, 64, 64)
    assert box == (0, 0, 30_000, 2)
    tracemalloc.start()
    part = masks.cut(picture, box, 64, 64)
    made = masks.put_back(picture, part + 9, box, mask)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{peak / 1e6:.1f} MB")
    assert (made == 9).all() and peak < 30e6


def test_transparency_is_kept_outside_and_weighs_colours_at_the_edge() -> None:
    picture = np.zeros((4, 4, 4), np.uint8)
    picture[..., 1], picture[2:, :, 3] = 200, 255  # green, transparent above
    mask = np.array([[0, 0, 128, 255]] * 4, np.uint8)
    red = np.full((4, 4, 3), (255, 0, 0), np.uint8)
    made = masks.put_back(picture, red, Box(0, 0, 4, 4), mask)
    assert np.array_equal(made[:, :2], picture[:, :2]) and np.array_equal(made[:, 3, :3], red[:, 3])
    assert made[0, 2].tolist() == [255, 0, 0, 128] and made[3, 2].tolist() == [128, 100, 0, 255]
    assert (made[:, 3, 3] == 255).all()
    opaque = masks.put_back(picture[..., :3], np.dstack((red, mask)), Box(0, 0, 4, 4), mask)
    assert opaque.shape == (4, 4, 4) and (opaque[:, :2, 3] == 255).all()


@pytest.mark.parametrize("sigma", [0.1, 0.4, 1, 4, 12.5, 64])
def test_blur_is_a_gaussian_that_is_cut_off_and_mirrored(sigma: float) -> None:
    """The sum over both axes, written out in float64; it is rounded twice here, once for each axis."""
    mask = np.zeros((30, 41), np.uint8)
    mask[10:20, 15:41], mask[:3, :3], mask[-1] = 255, 200, 90
    reach = int(2.5 * sigma + 0.5)
    mirrored = np.pad(mask.astype(np.float64), reach, mode="reflect")
    weights = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * sigma**2))
    kernel = np.outer(weights, weights) / weights.sum() ** 2
    shifts = np.lib.stride_tricks.sliding_window_view(mirrored, kernel.shape)
    expected = np.einsum("ijkl,kl->ij", shifts, kernel)
    worst = np.abs(masks.blurred(mask, sigma) - expected).max()
    print(f"sigma {sigma}: {worst:.2f} of 255")
    assert worst <= 1
    white = np.full((5, 1), 255, np.uint8)
    assert (masks.blurred(white, sigma) == 255).all() and not masks.blurred(white * 0, sigma).any()


def test_fill_has_the_colours_around() -> None:
    """Blurs of the picture without its masked part, from coarse to fine, one over the other, in Pillow's words."""
    picture = rng.integers(0, 256, (40, 60, 3), np.uint8)
    picture[:, 40:] = (10, 200, 30)
    hole = np.zeros((40, 60), np.uint8)
    hole[10:30, 45:60] = 255
    around = Image.new("RGBa", (60, 40))
    kept = ImageOps.invert(Image.fromarray(hole))
    around.paste(Image.fromarray(picture).convert("RGBA").convert("RGBa"), mask=kept)
    expected = Image.new("RGBA", (60, 40))
    for radius in (256, 64, 16, 16, 4, 4, 4, 4, 2, 2, 0):
        expected = Image.alpha_composite(expected, around.filter(ImageFilter.GaussianBlur(radius)).convert("RGBA"))
    made = masks.filled(picture, hole)
    assert np.array_equal(made, np.asarray(expected.convert("RGB")))
    assert np.array_equal(made[hole == 0], picture[hole == 0])
    assert np.abs(made[15:25, 48:57].astype(int) - (10, 200, 30)).max() < 40
    clear = np.dstack((picture, np.zeros((40, 60), np.uint8)))
    assert np.array_equal(masks.filled(clear, hole)[..., 3], hole), "what is filled is seen"
    assert not masks.filled(picture, hole * 0 + 255).any(), "nothing around: black"
