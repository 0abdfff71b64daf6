"""Stable Diffusion 3 from a prompt to pixels, on both backends, against diffusers on folders that diffusers wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from support import oracle_sd3, peer
from support.relative import relative

import qwenimg
from qwenimg.common.base.errors import UsageError
from qwenimg.common.sampling.flow_match import SHIFTED_TWICE, FlowMatchConfig, flow_schedule

BACKENDS = ("cpu", "mlx")

LATENTS = 1e-4  # relative L2 of the final latents; the reference's float32 sinusoid is worth most of it
PIXELS = 2  # of 255: a value on a rounding edge may go either way
EFFECT = 1e-2  # relative L2 that an option changes at least

PROMPT = "a photo of a red circle on a horse, (big:1.3) 红色 dog"
PICTURE = np.random.default_rng(3).integers(0, 256, (48, 80, 3), np.uint8)
PICTURE[8:24, 12:40] = (200, 40, 90)
HOLE = np.zeros((48, 80), np.uint8)
HOLE[:, 40:] = 255
OURS = {
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "mask_image": "mask",
    "skip_layer_guidance_scale": "skip_layer_scale",
}
SKIPS = {"skip_guidance_layers": [1, 2], "skip_layer_guidance_scale": 1.9}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # kind, and what diffusers is asked for
    "sd3, one branch": ("sd3", {"width": 80, "height": 48, "num_inference_steps": 4, "guidance_scale": 1.0}),
    "medium": ("medium", {"width": 48, "height": 112, "num_inference_steps": 6, "guidance_scale": 5.0}),
    "large, negative": (
        "large",
        {
            "width": 64,
            "height": 32,
            "num_inference_steps": 3,
            "guidance_scale": 3.5,
            "negative_prompt": "cat, 👍 " * 40,
        },
    ),
    "one step": ("medium", {"width": 16, "height": 48, "num_inference_steps": 1, "guidance_scale": 0.0}),
    "skipped layers": (
        "medium",
        {"width": 48, "height": 80, "num_inference_steps": 12, "guidance_scale": 4.5, "negative_prompt": "dog"} | SKIPS,
    ),
    "image": (
        "medium",
        {
            "image": PICTURE,
            "strength": 0.6,
            "num_inference_steps": 7,
            "guidance_scale": 4.0,
            "width": 80,
            "height": 48,
        },
    ),
    "mask": (
        "sd3",
        {
            "image": PICTURE,
            "mask_image": HOLE,
            "strength": 0.7,
            "num_inference_steps": 6,
            "guidance_scale": 4.0,
            "width": 80,
            "height": 48,
        },
    ),
    "mask from noise": (
        "medium",
        {
            "image": PICTURE,
            "mask_image": HOLE,
            "strength": 1.0,
            "num_inference_steps": 4,
            "guidance_scale": 1.0,
            "width": 80,
            "height": 48,
        },
    ),
}


def ours(asked: dict[str, Any]) -> dict[str, Any]:
    """The same for a call of this package."""
    named = {OURS.get(name, name): value for name, value in asked.items()}
    if layers := named.pop("skip_guidance_layers", None):
        named["skip_layers"] = ",".join(map(str, layers))
    return named


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_sd3: dict[str, Path], name: str) -> None:
    kind, asked = CASES[name]
    folder = tiny_sd3[kind]
    latents, pixels = oracle_sd3.generate(folder, PROMPT, seed=7, **asked)
    assert pixels.std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        result = qwenimg.load(folder, backend=backend, precision="fp32")(PROMPT, seed=7, **ours(asked))
        peer.check_picture(f"{backend} {name}", result, (latents, pixels), LATENTS, PIXELS)


@pytest.mark.sample(0)
def test_skipped_layers_act_in_their_steps_only(tiny_sd3: dict[str, Path]) -> None:
    """Steps 1 and 2 of 12: of 4 steps none, since the second is .25 of all."""
    asked = {"width": 48, "height": 48, "guidance": 4.5, "seed": 7}
    pipe = qwenimg.load(tiny_sd3["medium"], backend="cpu", precision="fp32")
    for steps, acts in ((12, True), (4, False)):
        plain, skipped = (pipe(PROMPT, steps=steps, **asked, **more) for more in ({}, {"skip_layers": "1-2"}))
        effect = relative(skipped.latents, plain.latents)
        print(f"{steps} steps: {effect:.3f}")
        assert effect > EFFECT if acts else effect == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip_layers": "2-4"}, "this model has the layers 0 to 3"),
        ({"skip_layers": "0", "step_cache": 0.1}, "layer 0, by which a step cache decides"),
        ({"skip_layers": "3-1"}, "expected numbers of layers from 0"),
        ({"width": 320, "height": 16}, "is larger than this model's 19 a side"),
    ],
)
def test_what_the_model_cannot_do(tiny_sd3: dict[str, Path], options: dict[str, Any], message: str) -> None:
    pipe = qwenimg.load(tiny_sd3["medium"], backend="cpu", precision="fp32")
    asked = {"width": 32, "height": 32, "steps": 2, "guidance": 4.5} | options
    with pytest.raises(UsageError, match=message):
        pipe.check(PROMPT, **asked)


def test_defaults(tiny_sd3: dict[str, Path]) -> None:
    for kind, steps, guidance in (("sd3", 28, 7.0), ("medium", 40, 4.5)):
        defaults = qwenimg.load(tiny_sd3[kind], backend="cpu", precision="fp32").defaults
        assert (defaults.steps, defaults.guidance, defaults.negative_prompt) == (steps, guidance, "")


@pytest.mark.parametrize("shift", [3.0, 1.0, 1.15, 6.0])
def test_schedule_equals_diffusers_bit_for_bit(shift: float) -> None:
    for steps in (1, 2, 3, 4, 6, 28, 40, 50, 1000):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(steps)
        config = FlowMatchConfig(shift=shift)
        sigmas = flow_schedule(config, steps, 4096, SHIFTED_TWICE)
        assert sigmas == tuple(scheduler.sigmas.tolist())
        assert [config.timestep(sigma) for sigma in sigmas[:-1]] == scheduler.timesteps.tolist()


def test_golden_levels() -> None:
    config = FlowMatchConfig(shift=3.0)
    for golden in (
        (1, 0.857692, 0.602151, 0.008929, 0),
        (1, 0.923343, 0.818923, 0.668327, 0.432225, 0.008929, 0),
        (1, 0),
    ):
        sigmas = flow_schedule(config, len(golden) - 1, 4096, SHIFTED_TWICE)
        assert np.abs(np.array(sigmas) - golden).max() < 1e-6
