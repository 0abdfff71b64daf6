"""Stable Cascade from a prompt to pixels, on both backends, against diffusers on folders that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_cascade, peer
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.cascade import sizes
from qwenimg.common.parts import known_configs
from qwenimg.common.sampling import wuerstchen

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents
PIXELS = 2  # of 255: a value on a rounding edge may go either way
LONG = "a blue circle with three red dogs on a big horse, " * 10
CASES: list[dict[str, Any]] = [
    {"prompt": "a red circle", "width": 128, "height": 40, "steps": 4, "guidance": 4.0},
    {"prompt": " A Red CIRCLE; 红色\n", "negative_prompt": "a blue square " * 6, "width": 168, "height": 128,
     "steps": 3, "guidance": 1.5, "decoder_steps": 3},
    {"prompt": "an astronaut riding a horse", "width": 128, "height": 256, "steps": 2, "guidance": 1.0},
    {"prompt": "x", "negative_prompt": "y", "width": 40, "height": 168, "steps": 5, "guidance": 2.0,
     "decoder_steps": 2, "decoder_guidance": 1.8},
    {"prompt": "", "negative_prompt": "a dog", "width": 40, "height": 40, "steps": 1, "guidance": 7.0,
     "decoder_steps": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def opened(tiny_cascade: Path) -> dict[str, Pipeline]:
    return {name: qwenimg.load(tiny_cascade, backend=name, precision="fp32") for name in BACKENDS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['width']}x{case['height']}-{case['guidance']}")
@pytest.mark.sample(2)
def test_equals_diffusers(tiny_cascade: Path, opened: dict[str, Pipeline], case: dict[str, Any]) -> None:
    prompt = case["prompt"] or " ."
    asked = {name: value for name, value in case.items() if name != "prompt"}
    expected = oracle_cascade.generate(tiny_cascade, prompt, seed=7, **asked)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        made = opened[backend](prompt, seed=7, **asked)
        peer.check_picture(f"{backend} {case['width']}x{case['height']}", made, expected, LATENTS, PIXELS)


def test_every_input_is_seen(opened: dict[str, Pipeline]) -> None:
    """Another prompt, negative prompt, guidance, sampler, or number of the decoder gives another result."""
    asked = {"width": 40, "height": 40, "steps": 3, "seed": 3, "decoder_steps": 3, "guidance": 3.0}
    calls: list[dict[str, Any]] = [
        {}, {"negative_prompt": "a blue square"}, {"guidance": 2.0}, {"guidance": 1.0}, {"sampler": "euler"},
        {"schedule": "karras"}, {"decoder_steps": 2}, {"decoder_guidance": 3.0}, {"clip_skip": 1},
    ]  # fmt: skip
    pipe = opened["cpu"]
    made = [pipe("a star", **(asked | more)).latents for more in calls] + [pipe("a ring", **asked).latents]
    changes = [relative(made[i], made[j]) for i in range(len(made)) for j in range(i)]
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > 10 * LATENTS


def test_levels() -> None:
    """Those of diffusers' scheduler in float32, in which 1 - 0.9999 has four digits."""
    from diffusers import DDPMWuerstchenScheduler

    theirs, config = DDPMWuerstchenScheduler(), known_configs.scheduler("stable-cascade")
    for steps in (1, 4, 20):
        theirs.set_timesteps(steps)
        share = theirs._alpha_cumprod(theirs.timesteps, torch.device("cpu")).double()
        made = wuerstchen.build(config, "ddpm", "", steps)
        assert made.timesteps == pytest.approx(theirs.timesteps[:-1].tolist(), abs=1e-6)
        assert made.sigmas == pytest.approx(((1 - share) / share).sqrt().tolist(), rel=1e-4)
        assert [config.timestep(sigma) for sigma in made.sigmas[1:]] == pytest.approx(
            [*made.timesteps[1:], 0.0], abs=3e-3
        )
    with pytest.raises(UsageError, match="has no form"):
        wuerstchen.build(config, "ddpm", "ays", 10)
    with pytest.raises(ValueError, match="scaler"):
        wuerstchen.parse_cosine({"scaler": 2.0}, "a file")


def test_tokens(tiny_cascade: Path, opened: dict[str, Pipeline]) -> None:
    """Ids are those of the pipeline, padded with the end token; a longer text has further chunks, as SDXL's."""
    prior, _ = oracle_cascade.pipelines(tiny_cascade)
    texts = opened["cpu"].model.texts
    for prompt in ("", "a Ring", " 红色 don't, É\n", " x  y"):
        theirs = prior.tokenizer(prompt, padding="max_length", max_length=77, truncation=True).input_ids
        [[chunk]] = texts.chunks(texts.keys([prompt], 0)[0])
        assert list(chunk.ids) == theirs
    assert len(texts.chunks(texts.keys([LONG], 0)[0])[0]) > 1


def test_sizes() -> None:
    """Those of diffusers, for multiples of 128 pixels; for others the decoder's tokens cover the picture."""
    from math import ceil

    for side in range(128, 4097, 128):
        assert sizes.embedding_side(side) == ceil(side / 42.67)
        assert sizes.latent_side(sizes.embedding_side(side)) == int(10.67 * ceil(side / 42.67)) == side // 4
    for side in range(1, 3000, 7):
        made = sizes.latent_side(sizes.embedding_side(side))
        assert made % 2 == 0 and side <= 4 * made
        assert sizes.embedding_side(side) == 1 or 4 * sizes.latent_side(sizes.embedding_side(side) - 1) < side


def test_pictures_are_refused(opened: dict[str, Pipeline]) -> None:
    picture = np.zeros((40, 40, 3), np.uint8)
    for more in ({"image": picture}, {"image": picture, "mask": picture[..., 0]}, {"hires": 1.5}):
        with pytest.raises(UsageError, match="text alone"):
            opened["cpu"].check("a", **more)


def test_previews(opened: dict[str, Pipeline]) -> None:
    """Of the decoder's steps; the prior's embedding has none."""
    pipe = opened["cpu"]
    pipe.fit_preview()
    *steps, _ = pipe.stream("a", width=40, height=80, steps=2, decoder_steps=2, seed=1)
    seen = [step.preview() for step in steps]  # type: ignore[union-attr]
    assert [one.shape for one in seen] == [(20, 10, 3)] * 4
    assert [bool(one.std() > 1) for one in seen] == [False, False, True, True]
    assert [step.latents.shape[1] for step in steps] == [16, 16, 4, 4]


def test_defaults(opened: dict[str, Pipeline]) -> None:
    defaults = opened["cpu"].defaults
    assert (defaults.steps, defaults.guidance, defaults.width, defaults.negative_prompt) == (20, 4.0, 1024, "")
