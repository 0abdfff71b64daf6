"""PixArt from a prompt to pixels, on both backends, against diffusers on folders that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_pixart, peer
from support.relative import relative
from support.tiny_pixart import QUIET

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.families.pixart import sizes
from qwenimg.common.parts import known_configs
from qwenimg.common.sampling import schedules, table

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents
PIXELS = 2  # of 255: a value on a rounding edge may go either way
PICTURE = np.random.default_rng(5).integers(0, 256, (48, 80, 3), np.uint8)
HOLE = np.zeros((48, 80), np.uint8)
HOLE[:, 32:] = 255
LONG = "A blue Square with three yellow stars over a small red house, " * 40
CASES: list[tuple[Any, ...]] = [
    # kind, prompt, negative prompt, width, height, steps, guidance
    ("pixart", "a red circle", "", 80, 48, 4, 4.5),
    ("pixart", " A Red CIRCLE; 背景\n", "a blue square " * 9, 48, 112, 5, 1.5),
    ("pixart", "a star above a ring, 3 hearts", "", 112, 64, 3, 1.0),  # without guidance
    ("pixart", LONG, "x", 96, 96, 2, 3.0),  # cut, in the size of the training
    ("pixart", "背景", LONG, 16, 80, 16, 2.5),
    ("pixart-alpha", "a red circle", "", 80, 48, 4, 4.5),
    ("pixart-alpha", "x", LONG, 48, 112, 3, 2.0),
    ("pixart-alpha", LONG, "blurry", 64, 32, 2, 3.0),
    ("pixart-lcm", "a red circle", "", 64, 80, 4, 1.0),
]


@pytest.fixture(scope="module")
def opened(tiny_pixart: dict[str, Path]) -> dict[tuple[str, str], Pipeline]:
    return {
        (kind, name): qwenimg.load(folder, backend=name, precision="fp32")
        for kind, folder in tiny_pixart.items()
        for name in BACKENDS
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}x{case[4]}-{case[6]}")
@pytest.mark.sample(2)
def test_equals_diffusers(
    tiny_pixart: dict[str, Path], opened: dict[tuple[str, str], Pipeline], case: tuple[Any, ...]
) -> None:
    kind, prompt, negative, width, height, steps, guidance = case
    asked = {"width": width, "height": height, "steps": steps, "guidance": guidance, "negative_prompt": negative}
    expected = oracle_pixart.generate(tiny_pixart[kind], prompt, seed=7, **asked)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        made = opened[kind, backend](prompt, seed=7, **asked)
        peer.check_picture(f"{kind} {backend} {width}x{height}", made, expected, LATENTS, PIXELS)


def test_one_step_of_dmd(tiny_pixart: dict[str, Path], opened: dict[tuple[str, str], Pipeline]) -> None:
    """As its authors call the pipeline: once, at time 400, for the denoised latents."""
    from diffusers import DDPMScheduler

    pipe = oracle_pixart.pipeline(tiny_pixart["pixart-alpha"])
    own, pipe.scheduler = pipe.scheduler, DDPMScheduler(**QUIET, clip_sample=False)
    try:
        asked = {"width": 64, "height": 48, "seed": 5}
        more = {"steps": 1, "guidance": 1.0, "timesteps": [400]}
        expected = oracle_pixart.generate(tiny_pixart["pixart-alpha"], "a ring", **asked, **more)
    finally:
        pipe.scheduler = own
    for backend in BACKENDS:
        made = opened["pixart-alpha", backend]("a ring", few_steps="dmd", **asked)
        peer.check_picture(f"{backend} dmd", made, expected, LATENTS, PIXELS)


@pytest.mark.parametrize(("steps", "strength"), [(5, 0.6), (4, 0.75)])
@torch.inference_mode()
def test_from_a_picture(
    tiny_pixart: dict[str, Path], opened: dict[tuple[str, str], Pipeline], steps: int, strength: float
) -> None:
    """And a mask, outside of which the latents stay those of the picture, whatever the prompt."""
    asked = {"steps": steps, "strength": strength, "guidance": 3.0, "negative_prompt": "blurry", "seed": 7}
    expected = oracle_pixart.from_picture(tiny_pixart["pixart-alpha"], "a ring", PICTURE, **asked)
    for backend in BACKENDS:
        made = opened["pixart-alpha", backend]("a ring", image=PICTURE, width=80, height=48, **asked)
        peer.check_picture(f"{backend} {strength}", made, expected, LATENTS, PIXELS)
    drawn = [
        opened["pixart-alpha", "cpu"](prompt, image=PICTURE, mask=HOLE, width=80, height=48, **asked).latents
        for prompt in ("a ring", "a star")
    ]
    assert np.array_equal(drawn[0][..., :4], drawn[1][..., :4])
    assert relative(drawn[0][..., 4:], drawn[1][..., 4:]) > 0.01


@pytest.mark.parametrize("kind", ["pixart", "pixart-alpha"])
def test_every_input_is_seen(opened: dict[tuple[str, str], Pipeline], kind: str) -> None:
    """Another prompt, negative prompt, guidance or sampler gives another result."""
    asked = {"width": 48, "height": 48, "steps": 3, "seed": 3}
    calls: list[dict[str, Any]] = [
        {}, {"negative_prompt": "a blue square"}, {"guidance": 2.0}, {"guidance": 1.0}, {"sampler": "euler"},
        {"schedule": "karras"},
    ]  # fmt: skip
    pipe = opened[kind, "cpu"]
    made = [pipe("a star", **asked, **more).latents for more in calls] + [pipe("a ring", **asked).latents]
    changes = [relative(made[i], made[j]) for i in range(len(made)) for j in range(i)]
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > 10 * LATENTS


def test_levels() -> None:
    """Those of diffusers' scheduler of its configuration."""
    from diffusers import DPMSolverMultistepScheduler

    config = known_configs.scheduler("pixart-sigma")
    theirs = DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear")
    for steps in (1, 4, 20):
        theirs.set_timesteps(steps)
        made = schedules.build(config, table.find("dpmpp_2m").rule, "", steps)
        assert made.timesteps == tuple(map(float, theirs.timesteps))
        assert made.sigmas == pytest.approx(theirs.sigmas.tolist(), rel=1e-5)
    assert schedules.sampler_of(config) == "dpmpp_2m"
    assert schedules.sampler_of(known_configs.scheduler("pixart-lcm")) == "lcm"


@pytest.mark.parametrize("kind", ["pixart", "pixart-alpha"])
def test_tokens(tiny_pixart: dict[str, Path], opened: dict[tuple[str, str], Pipeline], kind: str) -> None:
    """Ids are those of the pipeline that its mask keeps."""
    pipe, texts = oracle_pixart.pipeline(tiny_pixart[kind]), opened[kind, "cpu"].model.texts
    length = {"pixart": 300, "pixart-alpha": 120}[kind]
    for prompt in ("", "a Ring", " 背景 don't, É\n", " x  y", LONG):
        [text] = pipe._text_preprocessing(prompt)
        theirs = pipe.tokenizer(text, padding="max_length", max_length=length, truncation=True)
        kept = [id for id, seen in zip(theirs.input_ids, theirs.attention_mask, strict=True) if seen]
        tokens = texts.fill(prompt)
        assert list(tokens.ids) == kept and (tokens.lost > 0) == (prompt == LONG)


def test_defaults(opened: dict[tuple[str, str], Pipeline]) -> None:
    for kind, steps, guidance in (("pixart", 20, 4.5), ("pixart-alpha", 20, 4.5), ("pixart-lcm", 4, 1.0)):
        defaults = opened[kind, "cpu"].defaults
        assert (defaults.steps, defaults.guidance, defaults.negative_prompt) == (steps, guidance, "")


def test_sizes_are_those_of_the_training(opened: dict[tuple[str, str], Pipeline]) -> None:
    """And any other is drawn, with the nearest one in a message."""
    from diffusers.pipelines.pixart_alpha import pipeline_pixart_alpha, pipeline_pixart_sigma

    bins = {1024: pipeline_pixart_alpha.ASPECT_RATIO_1024_BIN, 2048: pipeline_pixart_sigma.ASPECT_RATIO_2048_BIN}
    for side, known in bins.items():
        for height, width in known.values():
            assert sizes.nearest(side, int(width), int(height)) == (width, height)
    pipe = opened["pixart-alpha", "cpu"]
    assert pipe.model.warnings(pipe.check("a", width=832, height=1216)) == []
    [line] = pipe.model.warnings(pipe.check("a", width=800, height=1216))
    assert "832x1216" in line
