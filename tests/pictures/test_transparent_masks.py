"""Masks with transparency: each form in which people have them is read as they mean it, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.pictures.input import read_mask
from qwenimg.common.request import coerce

PART = np.zeros((40, 60), bool)
PART[5:15, 20:45] = True  # what is to be drawn anew, in each of these masks
PHOTO = np.random.default_rng(3).integers(0, 256, (40, 60, 3), np.uint8)


def _layer(colours: np.ndarray | tuple[int, int, int], alpha: np.ndarray, under: int = 0) -> np.ndarray:
    """RGBA of `colours` with this alpha, as editors write it: what is not seen has the value `under`."""
    layer = np.full((*PART.shape, 4), under, np.uint8)
    layer[alpha > 0, :3] = np.broadcast_to(np.asarray(colours, np.uint8), (*PART.shape, 3))[alpha > 0]
    layer[..., 3] = alpha
    return layer


ON, OFF = np.where(PART, 255, 0).astype(np.uint8), np.where(PART, 0, 255).astype(np.uint8)
SOFT = np.asarray(Image.fromarray(ON).filter(ImageFilter.GaussianBlur(1)))
FORMS = {
    "white paint": _layer((255, 255, 255), ON),
    "white paint, white under the ground": _layer((255, 255, 255), ON, under=255),
    "white paint with soft edges": _layer((255, 255, 255), SOFT),
    "the same, multiplied by its alpha": np.dstack([SOFT, SOFT, SOFT, SOFT]),
    "red paint": _layer((230, 20, 30), ON),
    "grey paint": _layer((128, 128, 128), ON),
    "a hole in a picture": _layer(PHOTO, OFF),
    "a hole in a picture, whose pixels are kept under it": np.dstack([PHOTO, OFF]),
    "a hole in a grey picture": _layer(PHOTO[..., :1], OFF),
    "a hole in black": _layer((0, 0, 0), OFF),
    "a hole with soft edges": np.dstack([PHOTO, 255 - SOFT]),
    "no transparency": np.dstack([ON, ON, ON, np.full_like(ON, 255)]),
}
UNCLEAR = {
    "black paint": (_layer((0, 0, 0), ON), "is black paint, on a transparent ground"),
    "red paint over most": (_layer((230, 20, 30), OFF), "paint of one colour over most of it"),
    "black and white with transparent parts": (
        np.dstack([np.dstack([ON] * 3), np.where(np.arange(60) < 10, 0, 255) * np.ones((40, 1), int)]).astype(np.uint8),
        "has black, white and transparent parts",
    ),
    "nothing": (np.zeros((40, 60, 4), np.uint8), "is transparent all over"),
    "a faint wash": (_layer((255, 255, 255), ON // 3), "no opaque part"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_transparent_mask_is_read_as_it_is_meant(tmp_path: Path, form: str) -> None:
    """Of each form in which editors and other programs write a mask the part that is drawn anew, from a file, as a PIL
    image, and where Pillow has it as grey or a palette with transparency."""
    picture = Image.fromarray(FORMS[form])
    soft = "soft" in form or "multiplied" in form
    written = [picture]
    if len({*map(tuple, FORMS[form].reshape(-1, 4))}) == 2:
        written.append(picture.quantize(4))
    if (FORMS[form][..., :1] == FORMS[form][..., :3]).all():
        written.append(picture.convert("LA"))
    for number, one in enumerate(written):
        one.save(tmp_path / f"{number}.png")
        mask, told = read_mask(tmp_path / f"{number}.png", PHOTO)
        again, lines = coerce._mask(one, PHOTO)
        assert np.array_equal(mask, again), one.mode
        wrong = int(((mask >= 128) != PART).sum())
        print(f"{form}, {one.mode}: {wrong} of {mask.size} pixels differ; {told}")
        assert wrong <= (8 if soft else 0) and len(lines) == len(told)
        assert form == "no transparency" or told[0].endswith("drawn anew")
    if soft:
        assert np.array_equal(mask, SOFT)


@pytest.mark.parametrize("form", UNCLEAR)
def test_a_transparent_mask_that_is_not_clear_is_refused(tmp_path: Path, form: str) -> None:
    layer, what = UNCLEAR[form]
    Image.fromarray(layer).save(tmp_path / "m.png")
    with pytest.raises(ModelError, match=what) as caught:
        read_mask(tmp_path / "m.png", PHOTO)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / 'm.png'}: ") and line.endswith("paint white what is drawn anew, on black")
    with pytest.raises(UsageError, match=f"^mask .*{what}"):
        coerce._mask(Image.fromarray(layer), PHOTO)
