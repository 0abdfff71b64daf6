"""Stable Cascade from a prompt to pixels, on both backends, against diffusers on folders that it wrote."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from support import oracle_cascade, oracle_effnet, peer
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import ModelError, NumericsError, UsageError
from qwenimg.common.families.cascade import sizes
from qwenimg.common.parts import known_configs
from qwenimg.common.pictures import pixels
from qwenimg.common.sampling import wuerstchen
from qwenimg.common.training.session import training_of

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


PICTURES: list[dict[str, Any]] = [
    {"width": 128, "height": 256, "steps": 4, "guidance": 3.0, "strength": 0.6},
    {"width": 36, "height": 160, "steps": 5, "guidance": 1.0, "strength": 0.3, "decoder_steps": 2},
    {"width": 128, "height": 128, "steps": 2, "guidance": 2.0, "strength": 1.0, "decoder_steps": 2},
]


def picture(width: int, height: int) -> np.ndarray:
    """A picture with large parts, which survive its embedding."""
    rng = np.random.default_rng(width)
    large = Image.fromarray((rng.random((4, 5, 3)) * 255).astype(np.uint8))
    return np.asarray(large.resize((width, height), Image.Resampling.BICUBIC))


def embedding(pipe: Pipeline, steps: int, **case: Any) -> np.ndarray:
    """What the prior makes, of which the last latents of a random decoder show little."""
    drawn = list(pipe.stream("a red circle", seed=7, steps=steps, **case))
    latents = next(step for step in reversed(drawn[:-1]) if step.latents.shape[1] == 16).latents  # type: ignore[union-attr]
    return latents / np.hypot(1, pipe.model.checkpoint.scheduler.sigma(0.0))


@pytest.mark.parametrize("case", PICTURES, ids=lambda case: f"{case['width']}x{case['height']}-{case['strength']}")
@pytest.mark.sample(2)
def test_a_picture_equals_diffusers(tiny_cascade: Path, opened: dict[str, Pipeline], case: dict[str, Any]) -> None:
    """From the embedding of a picture with noise, which the prior draws on."""
    shown = picture(case["width"], case["height"])
    expected = oracle_cascade.generate(tiny_cascade, "a red circle", seed=7, image=shown, **case)
    others = embedding(opened["cpu"], image=255 - shown, **case)
    for backend in BACKENDS:
        title = f"{backend} {case['width']}x{case['height']}"
        made = opened[backend]("a red circle", seed=7, image=shown, **case)
        peer.check_picture(title, made, expected, LATENTS, PIXELS)
        drawn = embedding(opened[backend], image=shown, **case)
        error, change = relative(drawn, expected[2]), relative(others, drawn)
        print(f"{title}, embedding: {error:.1e} (limit {LATENTS}), of another picture {change:.1e}")
        assert error <= LATENTS and (change > 100 * error or case["strength"] == 1)


@pytest.mark.parametrize("strength", [0.75, 1.0])
def test_a_mask_equals_diffusers(tiny_cascade: Path, opened: dict[str, Pipeline], strength: float) -> None:
    """The embedding is blended outside the mask after each step; the picture there is put back as it is."""
    width, height, shown = 256, 128, picture(256, 128)
    mask = np.zeros((height, width), np.uint8)
    mask[50:90, 60:100] = 255
    inside = np.zeros((3, 6), bool)
    inside[1:3, 1:3] = True  # all values with a pixel of the mask: 42.67 pixels a side
    case: dict[str, Any] = {"width": width, "height": height, "steps": 4, "guidance": 2.0, "strength": strength}
    expected = oracle_cascade.generate(tiny_cascade, "a red circle", seed=7, image=shown, inside=inside, **case)
    for backend in BACKENDS:
        made = opened[backend]("a red circle", seed=7, image=shown, mask=mask, **case)
        error = relative(made.latents, expected[0])
        apart = np.abs(made.pixels - expected[1])[mask > 0].max()
        print(f"{backend}, mask, strength {strength}: {error:.1e} (limit {LATENTS}), pixels {apart:.0f}")
        assert error <= LATENTS and apart <= PIXELS
        assert np.array_equal(made.pixels[mask == 0], shown[mask == 0])
        assert np.abs(made.pixels - shown.astype(float))[mask > 0].mean() > 10


def test_masks_of_an_embedding() -> None:
    """Each value of which a pixel is in the mask, also behind the picture's edge; all others are kept."""
    rng = np.random.default_rng(0)
    for height, width in ((128, 256), (40, 168), (1024, 1000), (8, 8)):
        rows, columns = (sizes.embedding_side(side) for side in (height, width))
        whole = [sizes.SCALE * sizes.latent_side(count) for count in (rows, columns)]
        for _ in range(20):
            y, x = rng.integers(height), rng.integers(width)
            hole = np.zeros((height, width), bool)
            hole[y, x] = True
            made = sizes.in_embedding(hole)[0, 0]
            pairs = zip((y, x), (rows, columns), whole, strict=True)  # a pixel may lie in two values
            places = [slice(at * count // side, (at * count + count - 1) // side + 1) for at, count, side in pairs]
            assert made.shape == (rows, columns) and made[places[0], places[1]].any()
            assert made.sum() == 1 or y == height - 1 or x == width - 1
        assert sizes.in_embedding(np.ones((height, width), bool)).all()


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


def test_pictures_are_refused_without_the_encoder(tiny_cascade: Path, tmp_path: Path) -> None:
    """In one line that names the file, and how to get it."""
    shutil.copytree(tiny_cascade, tmp_path / "m", ignore=shutil.ignore_patterns("effnet*"))
    pipe, shown = qwenimg.load(tmp_path / "m", "cpu"), np.zeros((40, 40, 3), np.uint8)
    for more in ({"image": shown}, {"image": shown, "mask": shown[..., 0]}, {"hires": 1.5}):
        with pytest.raises(
            UsageError, match=r"text alone: effnet_encoder\.safetensors, .* pull stable-cascade, or"
        ) as e:
            pipe.check("a", **more)
        print(e.value)
        assert len(str(e.value)) <= 300
    with pytest.raises(UsageError, match=r"LoRA for Stable Cascade: effnet_encoder\.safetensors, .* by --effnet"):
        training_of(pipe)


def test_two_passes(opened: dict[str, Pipeline]) -> None:
    """The second is a run from the picture of the first, enlarged; its latents are no embedding to go on from."""
    asked: dict[str, Any] = {"seed": 3, "steps": 4, "guidance": 2.0, "decoder_steps": 2}
    for backend in BACKENDS:
        first = opened[backend]("a star", width=40, height=48, **asked)
        made = opened[backend]("a star", width=40, height=48, hires=2, hires_strength=0.5, **asked)
        larger = pixels.fit(first.pixels, 80, 96)
        again = opened[backend]("a star", width=80, height=96, image=larger, strength=0.5, **asked)
        assert np.array_equal(made.pixels, again.pixels) and made.pixels.shape == (96, 80, 3)
    with pytest.raises(UsageError, match="second pass of hires: its latents are no embedding"):
        opened["cpu"].check("a", hires=1.5, hires_with="latent")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), -0.5])
def test_statistics_that_are_none(tiny_cascade: Path, tmp_path: Path, backend: str, value: float) -> None:
    """A variance below 0, or that is no number: refused when it is read, or when its latents are not finite."""
    tensors = oracle_effnet.tiny_effnet()
    tensors["backbone.2.0.block.0.1.running_var"][3] = value
    save_file(tensors, tmp_path / "e.safetensors")
    pipe = qwenimg.load(tiny_cascade, backend, "fp32", effnet=tmp_path / "e.safetensors")
    with pytest.raises(ModelError if np.isnan(value) else NumericsError) as caught:
        pipe("a", width=40, height=40, image=picture(40, 40), steps=2)
    print(caught.value)
    assert len(str(caught.value)) <= 300


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
