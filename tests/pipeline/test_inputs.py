"""What a model does with pictures, as one value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qwenimg import UsageError
from qwenimg.common.pipeline.models.inputs import BlendedMask, MaskInput, OtherModels, PictureInputs
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.request import Request

PICTURE = np.full((16, 24, 3), 90, np.uint8)
OTHERS = OtherModels(several="model-a and -b", describing="model-c")


@pytest.mark.parametrize(
    ("asked", "inputs", "encodes"),
    [
        ({}, PictureInputs(), False),
        ({"image": PICTURE}, PictureInputs(), True),
        ({"controls": (Control(network="edges", file="", picture=PICTURE),)}, PictureInputs(), True),
        ({}, PictureInputs(mask=MaskInput()), True),  # an empty picture
        ({}, PictureInputs(mask=BlendedMask(soft=True)), False),
    ],
)
def test_a_run_that_encoded_nothing_may_decode_again_alone(
    asked: dict[str, Any], inputs: PictureInputs, encodes: bool
) -> None:
    """A control's picture counts: its latents have the bits of the first policy."""
    assert inputs.encodes(Request(prompt="x", **asked)) == encodes


@pytest.mark.parametrize(
    ("inputs", "count", "told"),
    [
        (PictureInputs(), 2, r"2 pictures are given, M takes one; several are for model-a and -b$"),
        (PictureInputs(most=3), 4, r"4 pictures are given, M takes at most 3$"),
        (PictureInputs(fewest=1), 0, r"M needs a picture: give it, as in qwenimg PROMPT -i PICTURE -m M$"),
    ],
)
def test_a_number_of_pictures_that_is_refused(inputs: PictureInputs, count: int, told: str) -> None:
    request = Request(prompt="x", image=(PICTURE,) * count or None)
    with pytest.raises(UsageError, match=told):
        inputs.checked(request, "M", OTHERS)


def test_a_prompt_may_be_left_out_where_the_model_writes_it() -> None:
    request = Request(prompt=" ", image=PICTURE)
    assert PictureInputs(describe=lambda one: one).checked(request, "M", OTHERS) is request
    with pytest.raises(UsageError, match=r"say what to draw: only model-c describes a picture itself$"):
        PictureInputs().checked(request, "M", OTHERS)


def test_pictures_keep_their_alpha_where_it_is_seen() -> None:
    clear = np.dstack([PICTURE, np.zeros((16, 24), np.uint8)])
    request = Request(prompt="x", image=clear)
    assert PictureInputs(alpha=True).checked(request, "M", OTHERS) is request
    [white] = PictureInputs().checked(request, "M", OTHERS).images
    assert white.shape == (16, 24, 3) and white.min() == 255
    assert PictureInputs().warnings(request, [clear], [], str) and not PictureInputs(alpha=True).warnings(
        request, [clear], [], str
    )


@pytest.mark.parametrize("side", [1, 2, 4])
def test_a_mask_as_an_input_has_the_first_pixel_of_each_part(side: int) -> None:
    hole = np.random.default_rng(side).random((16, 24)) < 0.5
    made = MaskInput(side=side).in_latents(hole, 4)
    part = 4 // side
    expected = [
        [[hole[4 * y + a * part, 4 * x + b * part] for x in range(6)] for y in range(4)]
        for a in range(side)
        for b in range(side)
    ]
    assert made.dtype == np.float32 and np.array_equal(made[0], np.array(expected, np.float32))
