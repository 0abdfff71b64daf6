"""The Stable Diffusion 3 and 3.5 models that are known by name."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.known_model import KnownModel

_sd3 = partial(KnownModel, family="sd3", license="Stability AI Community")
SD3_MEDIUM = _sd3(
    name="sd3-medium",
    repo="stabilityai/stable-diffusion-3-medium-diffusers",
    title="Stable Diffusion 3 medium, 2B",
    purpose="pictures that follow long prompts",
    gated=True,
    steps=28,
    guidance=7.0,
    bytes=15_500_000_000,
    memory=10_000_000_000,
    dtype="float16",
    aliases=("sd3",),
    files=("sd3_medium",),
)
MEDIUM = _sd3(
    name="sd3.5-medium",
    repo="stabilityai/stable-diffusion-3.5-medium",
    title="Stable Diffusion 3.5 medium, 2.5B",
    purpose="sd3-medium, improved; its makers add --skip-layers 7-9",
    gated=True,
    steps=40,
    guidance=4.5,
    bytes=16_300_000_000,
    memory=10_000_000_000,
    aliases=("sd35-medium",),
    files=("sd3.5_medium",),
)
LARGE = _sd3(
    name="sd3.5-large",
    repo="stabilityai/stable-diffusion-3.5-large",
    title="Stable Diffusion 3.5 large, 8B",
    purpose="the largest Stable Diffusion, for long prompts",
    gated=True,
    steps=28,
    guidance=3.5,
    bytes=27_600_000_000,
    memory=12_500_000_000,
    aliases=("sd35-large",),
    files=("sd3.5_large",),
)
LARGE_TURBO = _sd3(
    name="sd3.5-large-turbo",
    repo="stabilityai/stable-diffusion-3.5-large-turbo",
    title="Stable Diffusion 3.5 large turbo, 8B",
    purpose="sd3.5-large in 4 steps, without guidance",
    gated=True,
    steps=4,
    guidance=0.0,
    bytes=27_600_000_000,
    memory=12_500_000_000,
    aliases=("sd35-large-turbo",),
    files=("sd3.5_large_turbo",),
)
KNOWN = (SD3_MEDIUM, MEDIUM, LARGE, LARGE_TURBO)
