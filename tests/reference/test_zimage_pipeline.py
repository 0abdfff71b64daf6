"""Z-Image from a prompt to pixels, on both backends, against diffusers on a folder that diffusers wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import oracle_zimage, peer

import qwenimg
from qwenimg.common.base.errors import UsageError
from qwenimg.common.numbers import noise

BACKENDS = ("cpu", "mlx")

LATENTS = 1e-4  # relative L2 of the final latents; the reference's float32 sinusoid is worth most of it
PIXELS = 2  # of 255: a value on a rounding edge may go either way

CASES = [
    # prompt, negative prompt, width, height, steps, guidance
    ("a red circle", "", 80, 48, 8, 0.0),
    ("a star above a ring, 3 hearts; 背景", "低质量, blurry", 48, 112, 4, 2.5),
    ("a blue square " * 40, "x", 64, 64, 3, 0.5),
    ("一个红色的圆在左边", "", 128, 64, 5, 4.0),  # as many tokens as need no pads
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[2]}x{case[3]}-{case[4]}-{case[5]}")
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_zimage: Path, case) -> None:
    prompt, negative, width, height, steps, guidance = case
    initial = noise.normal((1, 16, height // 8, width // 8), seed=7)
    latents, pixels = oracle_zimage.generate(
        tiny_zimage, prompt, initial, negative_prompt=negative, steps=steps, guidance=guidance
    )
    assert pixels.std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        ours = qwenimg.load(tiny_zimage, backend=backend, precision="fp32")(
            prompt, negative_prompt=negative, width=width, height=height, steps=steps, guidance=guidance, seed=7
        )
        peer.check_picture(f"{backend} {width}x{height}", ours, (latents, pixels), LATENTS, PIXELS)


PICTURE = np.random.default_rng(5).integers(0, 256, (48, 80, 3), np.uint8)
HOLE = np.zeros((48, 80), np.uint8)
HOLE[8:40, 28:] = 255
FROM_PICTURES = [
    # whether there is a mask, steps, strength, guidance
    (False, 5, 0.6, 0.0),
    (False, 4, 0.9, 2.5),
    (True, 5, 0.8, 2.5),
    (True, 3, 1.0, 0.0),
]


@pytest.mark.parametrize(("masked", "steps", "strength", "guidance"), FROM_PICTURES)
@pytest.mark.sample(1)
def test_from_a_picture_equals_diffusers(
    tiny_zimage: Path, masked: bool, steps: int, strength: float, guidance: float
) -> None:
    hole = HOLE if masked else None
    latents, pixels = oracle_zimage.from_picture(
        tiny_zimage, "a red circle", PICTURE, mask=hole, seed=7,
        num_inference_steps=steps, strength=strength, guidance_scale=guidance, negative_prompt="blurry",
    )  # fmt: skip
    assert pixels.std() > 10, "a constant picture would prove nothing"
    asked = {"steps": steps, "strength": strength, "guidance": guidance, "negative_prompt": "blurry", "seed": 7}
    for backend in BACKENDS:
        with qwenimg.load(tiny_zimage, backend=backend, precision="fp32") as pipe:
            ours = pipe("a red circle", image=PICTURE, mask=hole, width=80, height=48, **asked)
        peer.check_picture(f"{backend} {strength}", ours, (latents, pixels), LATENTS, PIXELS)


def test_defaults(tiny_zimage: Path) -> None:
    pipe = qwenimg.load(tiny_zimage, backend="cpu", precision="fp32")
    assert (pipe.defaults.steps, pipe.defaults.guidance, pipe.defaults.negative_prompt) == (8, 0.0, "")


def test_float16_is_refused_with_the_reason(tiny_zimage: Path) -> None:
    with pytest.raises(UsageError, match="activations exceed float16"):
        qwenimg.load(tiny_zimage, backend="cpu", precision="fp16")
