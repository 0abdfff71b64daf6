"""Hunyuan-DiT from a prompt to pixels, on both backends, against diffusers on folders that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_hunyuan, peer
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.families.hunyuan import sizes
from qwenimg.common.parts import known_configs
from qwenimg.common.sampling import schedules, table

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents
PIXELS = 2  # of 255: a value on a rounding edge may go either way
PICTURE = np.random.default_rng(5).integers(0, 256, (48, 80, 3), np.uint8)
HOLE = np.zeros((48, 80), np.uint8)
HOLE[:, 32:] = 255
LONG = "a blue square with three yellow stars over a small red house, " * 40
CASES: list[tuple[Any, ...]] = [
    # kind, prompt, negative prompt, width, height, steps, guidance, its rescale
    ("hunyuan", "a red circle", "", 80, 48, 4, 5.0, 0.0),
    ("hunyuan", "A Red CIRCLE; 背景\n", "a blue square " * 9, 48, 112, 5, 1.5, 0.7),
    ("hunyuan", "a star above a ring, 3 hearts", "", 112, 64, 3, 1.0, 0.0),  # without guidance
    ("hunyuan", LONG, "x", 96, 96, 2, 3.0, 0.0),  # cut, in the size of the training
    ("hunyuan", "背景", LONG, 16, 80, 16, 2.5, 0.3),
    ("hunyuan-1.1", "a red circle", "", 80, 48, 4, 5.0, 0.0),
    ("hunyuan-1.1", "x", LONG, 48, 112, 3, 2.0, 0.5),
    ("hunyuan-1.1", LONG, "blurry", 64, 32, 2, 1.0, 0.0),
]


@pytest.fixture(scope="module")
def opened(tiny_hunyuan: dict[str, Path]) -> dict[tuple[str, str], Pipeline]:
    return {
        (kind, name): qwenimg.load(folder, backend=name, precision="fp32")
        for kind, folder in tiny_hunyuan.items()
        for name in BACKENDS
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}x{case[4]}-{case[6]}")
@pytest.mark.sample(2)
def test_equals_diffusers(
    tiny_hunyuan: dict[str, Path], opened: dict[tuple[str, str], Pipeline], case: tuple[Any, ...]
) -> None:
    kind, prompt, negative, width, height, steps, guidance, share = case
    asked = {"width": width, "height": height, "steps": steps, "guidance": guidance, "negative_prompt": negative}
    expected = oracle_hunyuan.generate(tiny_hunyuan[kind], prompt, seed=7, guidance_rescale=share, **asked)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        made = opened[kind, backend](prompt, seed=7, guidance_rescale=share, **asked)
        peer.check_picture(f"{kind} {backend} {width}x{height}", made, expected, LATENTS, PIXELS)


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m"])
def test_other_samplers(tiny_hunyuan: dict[str, Path], opened: dict[tuple[str, str], Pipeline], sampler: str) -> None:
    """Those that its authors' program offers."""
    from diffusers import DDIMScheduler, DPMSolverMultistepScheduler

    pipe = oracle_hunyuan.pipeline(tiny_hunyuan["hunyuan"])
    kinds = {"ddim": DDIMScheduler, "dpmpp_2m": DPMSolverMultistepScheduler}
    own, more = pipe.scheduler, {"ddim": {"set_alpha_to_one": False}, "dpmpp_2m": {"final_sigmas_type": "zero"}}
    pipe.scheduler = kinds[sampler].from_config(own.config, **more[sampler])
    asked = {"width": 64, "height": 48, "seed": 5, "steps": 4, "guidance": 3.0, "negative_prompt": "blurry"}
    try:
        expected = oracle_hunyuan.generate(tiny_hunyuan["hunyuan"], "a ring", **asked)
    finally:
        pipe.scheduler = own
    for backend in BACKENDS:
        made = opened["hunyuan", backend]("a ring", sampler=sampler, **asked)
        peer.check_picture(f"{backend} {sampler}", made, expected, LATENTS, PIXELS)


@pytest.mark.parametrize(("steps", "strength"), [(5, 0.6), (4, 0.75)])
@torch.inference_mode()
def test_from_a_picture(
    tiny_hunyuan: dict[str, Path], opened: dict[tuple[str, str], Pipeline], steps: int, strength: float
) -> None:
    """And a mask, outside of which the latents stay those of the picture, whatever the prompt."""
    asked = {"steps": steps, "strength": strength, "guidance": 3.0, "negative_prompt": "blurry", "seed": 7}
    from diffusers import DDIMScheduler

    pipe = oracle_hunyuan.pipeline(tiny_hunyuan["hunyuan-1.1"])
    own, pipe.scheduler = pipe.scheduler, DDIMScheduler.from_config(pipe.scheduler.config, set_alpha_to_one=False)
    try:  # without noise in the steps, which comes from the same generator
        expected = oracle_hunyuan.from_picture(tiny_hunyuan["hunyuan-1.1"], "a ring", PICTURE, **asked)
    finally:
        pipe.scheduler = own
    asked |= {"sampler": "ddim"}
    for backend in BACKENDS:
        made = opened["hunyuan-1.1", backend]("a ring", image=PICTURE, width=80, height=48, **asked)
        peer.check_picture(f"{backend} {strength}", made, expected, LATENTS, PIXELS)
    drawn = [
        opened["hunyuan-1.1", "cpu"](prompt, image=PICTURE, mask=HOLE, width=80, height=48, **asked).latents
        for prompt in ("a ring", "a star")
    ]
    assert np.array_equal(drawn[0][..., :4], drawn[1][..., :4])
    assert relative(drawn[0][..., 4:], drawn[1][..., 4:]) > 0.01


@pytest.mark.parametrize("kind", ["hunyuan", "hunyuan-1.1"])
def test_every_input_is_seen(opened: dict[tuple[str, str], Pipeline], kind: str) -> None:
    """Another prompt, negative prompt, guidance or sampler gives another result."""
    asked = {"width": 48, "height": 48, "steps": 3, "seed": 3}
    calls: list[dict[str, Any]] = [
        {}, {"negative_prompt": "a blue square"}, {"guidance": 2.0}, {"guidance": 1.0}, {"sampler": "euler"},
        {"schedule": "karras"}, {"guidance_rescale": 0.7},
    ]  # fmt: skip
    pipe = opened[kind, "cpu"]
    made = [pipe("a star", **asked, **more).latents for more in calls] + [pipe("a ring", **asked).latents]
    changes = [relative(made[i], made[j]) for i in range(len(made)) for j in range(i)]
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > 10 * LATENTS


@pytest.mark.parametrize(("name", "last"), [("hunyuan-dit", 0.018), ("hunyuan-dit-1.1", 0.03)])
def test_levels(name: str, last: float) -> None:
    """Those of diffusers' scheduler of its configuration."""
    from diffusers import DDPMScheduler

    config = known_configs.scheduler(name)
    theirs = DDPMScheduler(
        beta_start=0.00085, beta_end=last, beta_schedule="scaled_linear", steps_offset=1, timestep_spacing="leading"
    )
    for steps in (1, 4, 50):
        theirs.set_timesteps(steps)
        made = schedules.build(config, table.find("ddpm").rule, "", steps)
        assert made.timesteps == tuple(map(float, theirs.timesteps))
        products = theirs.alphas_cumprod[theirs.timesteps]
        assert made.sigmas[:-1] == pytest.approx(
            (((1 - products) / products) ** 0.5).tolist(), rel=1e-4
        )  # 1 - a, of float32
    assert schedules.sampler_of(config) == "ddpm" and config.prediction_type == "v_prediction"


def test_tokens(tiny_hunyuan: dict[str, Path], opened: dict[tuple[str, str], Pipeline]) -> None:
    """Ids are those of the pipeline: of BERT those that its mask keeps, of T5 all."""
    pipe, texts = oracle_hunyuan.pipeline(tiny_hunyuan["hunyuan"]), opened["hunyuan", "cpu"].model.texts
    for prompt in ("", "a Ring", " 背景 don't, É\n", " x  y [SEP]", "stars reded 红色", LONG):
        rows = ((pipe.tokenizer, texts.bert, 77), (pipe.tokenizer_2, texts.t5, 256))
        theirs = [one(prompt, padding="max_length", max_length=n, truncation=True) for one, _, n in rows]
        kept = [id for id, seen in zip(theirs[0].input_ids, theirs[0].attention_mask, strict=True) if seen]
        assert list(texts.bert.fill(prompt).ids) == kept
        assert list(texts.t5.fill(prompt).ids) == theirs[1].input_ids
        assert texts.t5.words(prompt) == sum(theirs[1].attention_mask)
        assert bool(texts.cut(prompt)) == (prompt == LONG)


def test_defaults(opened: dict[tuple[str, str], Pipeline]) -> None:
    for kind in ("hunyuan", "hunyuan-1.1"):
        defaults = opened[kind, "cpu"].defaults
        assert (defaults.steps, defaults.guidance, defaults.negative_prompt) == (50, 5.0, "")


def test_sizes_are_those_of_the_training(opened: dict[tuple[str, str], Pipeline]) -> None:
    """And any other is drawn, with the nearest one in a message."""
    from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import SUPPORTED_SHAPE

    assert set(sizes.TRAINED) == {*SUPPORTED_SHAPE, *((height, width) for width, height in SUPPORTED_SHAPE)}
    assert all(sizes.nearest(*size) == size for size in sizes.TRAINED)
    pipe = opened["hunyuan", "cpu"]
    assert pipe.model.warnings(pipe.check("a", width=1280, height=768)) == []
    [line] = pipe.model.warnings(pipe.check("a", width=800, height=1216))
    assert "864x1152" in line or "768x1280" in line
