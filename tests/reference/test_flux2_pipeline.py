"""Flux.2 klein from a prompt and a picture to pixels, on both backends, against diffusers on folders that it wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import oracle_flux2, peer
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.flux2 import references
from qwenimg.common.families.flux2.model import shift
from qwenimg.common.numbers import noise
from qwenimg.common.parts import known_configs
from qwenimg.common.sampling.flow_match import FlowLevels, FlowMatchConfig, flow_schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents; the reference's float32 sinusoid is worth most of it
PIXELS = 2  # of 255: a value on a rounding edge may go either way

RNG = np.random.default_rng(11)
PICTURES = {
    "none": None,
    "even": RNG.integers(0, 256, (64, 96, 3), np.uint8),
    "odd": RNG.integers(0, 256, (83, 70, 3), np.uint8),  # cropped to 80 x 64
}
CASES = [
    # folder, prompt, width, height, steps, guidance, reference
    ("flux2-klein", "a red circle", 80, 48, 4, 1.0, "none"),
    ("flux2-klein", "a star above a ring, 3 hearts; 背景", 48, 112, 2, 4.0, "even"),
    ("flux2-klein", "x " * 700, 64, 64, 2, 1.0, "odd"),  # more tokens than are read: no pads
    ("flux2-base", "一个红色的圆在左边", 112, 64, 5, 4.0, "none"),
    ("flux2-base", "a blue square", 64, 80, 3, 2.5, "odd"),
    ("flux2-base", "a blue square", 48, 48, 3, 1.0, "even"),  # without guidance
]


@pytest.fixture(scope="module")
def opened() -> dict[tuple[str, str], Pipeline]:
    return {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}x{case[3]}-{case[5]}-{case[6]}")
@pytest.mark.sample(0)
def test_equals_diffusers(tiny_flux2: dict[str, Path], opened: dict[tuple[str, str], Pipeline], case) -> None:
    name, prompt, width, height, steps, guidance, which = case
    picture = PICTURES[which]
    initial = noise.normal((1, 32, height // 16, width // 16), seed=7)
    latents, pixels = oracle_flux2.generate(
        tiny_flux2[name],
        prompt,
        initial,
        steps=steps,
        guidance=guidance,
        images=None if picture is None else [picture],
    )
    assert pixels.std() > 10, "a constant picture would prove nothing"
    more = {} if picture is None else {"image": picture}
    for backend in BACKENDS:
        if (name, backend) not in opened:
            opened[name, backend] = qwenimg.load(tiny_flux2[name], backend=backend, precision="fp32")
        ours = opened[name, backend](prompt, width=width, height=height, steps=steps, guidance=guidance, seed=7, **more)
        peer.check_picture(f"{backend} {width}x{height}", ours, (latents, pixels), LATENTS, PIXELS)


@pytest.mark.parametrize("names", [("even", "odd"), ("odd", "even")])
@pytest.mark.sample(0)
def test_several_references(tiny_flux2: dict[str, Path], names: tuple[str, str]) -> None:
    """In their order, each in its own size."""
    pictures = [PICTURES[name] for name in names]
    initial = noise.normal((1, 32, 3, 4), seed=7)
    latents, pixels = oracle_flux2.generate(
        tiny_flux2["flux2-base"], "a ring", initial, steps=2, guidance=2.5, images=pictures
    )
    for backend in BACKENDS:
        pipe = qwenimg.load(tiny_flux2["flux2-base"], backend=backend, precision="fp32")
        ours = pipe("a ring", width=64, height=48, steps=2, guidance=2.5, seed=7, image=pictures)
        peer.check_picture(f"{backend} {names}", ours, (latents, pixels), LATENTS, PIXELS)


def test_the_reference_is_seen(tiny_flux2: dict[str, Path]) -> None:
    """Another picture, or none, gives another result."""
    pipe = qwenimg.load(tiny_flux2["flux2-klein"], backend="cpu", precision="fp32")
    made = [
        pipe("a star", width=48, height=48, steps=2, seed=3, **({} if one is None else {"image": one})).latents
        for one in PICTURES.values()
    ]
    changes = [relative(made[i], made[j]) for i in range(3) for j in range(i)]
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > 10 * LATENTS


def test_levels() -> None:
    """Golden numbers of diffusers' schedule and shift, which jumps above 4300 tokens."""
    config = known_configs.scheduler("flux2-klein-4b")
    golden = {4096: 2.29118, 1024: 2.03069, 6144: 1.496662, 4300: 2.308, 4301: 1.185}
    for tokens, mu in golden.items():
        assert shift(config, tokens, 4) == pytest.approx(mu, abs=5e-4 if tokens in (4300, 4301) else 5e-6)
    levels = flow_schedule(config, 4, 4096, FlowLevels(mu=shift))
    assert levels == pytest.approx((1, 0.967384, 0.908144, 0.7672, 0), abs=5e-7)


@pytest.mark.parametrize("tokens", [1, 15, 256, 4096, 4300, 4301, 16384])
@pytest.mark.parametrize("steps", [1, 4, 10, 50, 200])
def test_shift_is_that_of_diffusers(tokens: int, steps: int) -> None:
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    assert shift(FlowMatchConfig(), tokens, steps) == compute_empirical_mu(tokens, steps)


def test_defaults(tiny_flux2: dict[str, Path]) -> None:
    for name, steps, guidance in (("flux2-klein", 4, 1.0), ("flux2-base", 50, 4.0)):
        defaults = qwenimg.load(tiny_flux2[name], backend="cpu", precision="fp32").defaults
        assert (defaults.steps, defaults.guidance, defaults.negative_prompt) == (steps, guidance, "")
        assert (defaults.strength, defaults.mask_strength) == (1.0, 0.8)


def test_guidance_of_a_distilled_model_is_said_to_have_no_effect(tiny_flux2: dict[str, Path]) -> None:
    pipe = qwenimg.load(tiny_flux2["flux2-klein"], backend="cpu", precision="fp32")
    plain, guided = (pipe("a ring", width=32, height=32, steps=1, seed=1, guidance=scale) for scale in (1.0, 4.0))
    assert np.array_equal(plain.latents, guided.latents)
    assert guided.warnings == ["guidance has no effect: this model is distilled to draw without it"] != plain.warnings
    negated = pipe("a ring", width=32, height=32, steps=1, seed=1, negative_prompt="blue")
    expected = "the negative prompt has no effect in this model, which is distilled to draw without guidance"
    assert negated.warnings == [expected] and np.array_equal(plain.latents, negated.latents)


def test_a_strength_below_1_starts_from_the_picture(tiny_flux2: dict[str, Path]) -> None:
    """Which is a reference as well: at a strength of almost nothing the picture is left."""
    pipe = qwenimg.load(tiny_flux2["flux2-klein"], backend="cpu", precision="fp32")
    picture = PICTURES["even"]
    weak = pipe("a ring", steps=50, seed=1, image=picture, strength=0.04)
    strong = pipe("a ring", steps=4, seed=1, image=picture)
    mean, _ = pipe.model.vae.encode(pipe.model.inputs.seen(pipe.check("a ring", image=picture))[0])
    assert relative(weak.latents, mean) < 0.5 * relative(strong.latents, mean)


HOLES = {
    "whole latents": (slice(16, 48), slice(32, 96)),
    "halves and quarters of latents": (slice(8, 40), slice(24, 88)),
    "edges off the middle": (slice(11, 40), slice(5, 71)),
}


@pytest.mark.parametrize("hole", HOLES)
@pytest.mark.parametrize("strength", [0.8, 1.0])
@pytest.mark.sample(0)
def test_inpainting_equals_diffusers(tiny_flux2: dict[str, Path], strength: float, hole: str) -> None:
    picture, mask = PICTURES["even"], np.zeros((64, 96), np.uint8)
    mask[HOLES[hole]] = 255
    latents, pixels = oracle_flux2.inpainted(
        tiny_flux2["flux2-base"], "a ring", picture, mask,
        seed=7, num_inference_steps=5, strength=strength, guidance_scale=3.0,
    )  # fmt: skip
    asked = {"width": 96, "height": 64, "steps": 5, "strength": strength, "guidance": 3.0, "seed": 7}
    for backend in BACKENDS:
        with qwenimg.load(tiny_flux2["flux2-base"], backend=backend, precision="fp32") as pipe:
            ours = pipe("a ring", image=picture, mask=mask, **asked)
        peer.check_picture(f"{backend} {strength} {hole}", ours, (latents, pixels), LATENTS, PIXELS)


# Sizes of references


@pytest.mark.sample(0)
def test_reference_sizes_are_those_of_diffusers() -> None:
    from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
    from PIL import Image

    processor = Flux2ImageProcessor(vae_scale_factor=16)
    for width, height in ((64, 64), (70, 83), (1024, 1024), (1025, 1024), (2000, 900), (1500, 1501)):
        picture = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        image = processor._resize_if_exceeds_area(Image.fromarray(picture))
        columns, rows = (side // 16 * 16 for side in image.size)
        theirs = processor.preprocess(image, height=rows, width=columns, resize_mode="crop").numpy()
        assert references.size(width, height) == (columns, rows)
        assert np.array_equal(references.values(picture), theirs)


def test_narrow_references_are_refused(tiny_flux2: dict[str, Path]) -> None:
    pipe = qwenimg.load(tiny_flux2["flux2-klein"], backend="cpu", precision="fp32")
    with pytest.raises(UsageError, match="15x64 is too narrow: give 16 pixels or more a side"):
        pipe.check("a ring", image=np.zeros((64, 15, 3), np.uint8), width=64, height=64)
