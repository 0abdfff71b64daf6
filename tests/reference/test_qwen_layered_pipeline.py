"""Qwen-Image-Layered against diffusers' pipeline, from a picture with soft alpha to its layers; and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import mutants_qwen_layered, oracle_layered
from support.mutant import Backend, Patch, Plant
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.families.qwen_image import layered
from qwenimg.common.families.qwen_image.layered import QwenImageLayered
from qwenimg.common.numbers import noise, rope
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.sampling import flow_match

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative; measured 1e-6: float32 in another order
PIXELS = 2  # of 255, at most: rounding of 8 bits, and the VAE
MOVES = 8  # of 255, that an input moves the layers by at least
RNG = np.random.default_rng(11)


def soft(height: int, width: int) -> np.ndarray:
    """A picture [H, W, 4] of squares of 4 pixels, whose alpha goes from 0 to 255 and back, and is 0 in some of them."""
    colours = RNG.integers(0, 256, (height // 4 + 1, width // 4 + 1, 4), np.uint8).repeat(4, 0).repeat(4, 1)
    picture = colours[:height, :width]
    ramp = np.abs(np.linspace(-255, 255, width)).astype(np.uint8)
    picture[..., 3] = np.where(picture[..., 3] < 100, 0, ramp)
    return picture


CASES = [  # prompt, negative, picture, width, height, layers, steps, guidance, normalized
    ("a red circle on a table", " ", soft(60, 96), 80, 48, 3, 3, 4.0, False),
    ("a ring", "a very long text that says what must not be there", soft(90, 70), 48, 80, 2, 2, 3.0, True),
    ("a ring", " ", soft(50, 50)[..., :3], 48, 48, 1, 2, 1.0, False),
]


@pytest.fixture(scope="module")
def opened(tiny_layered: Path) -> Callable[[str], Pipeline]:
    pipes: dict[str, Pipeline] = {}

    def one(backend: str) -> Pipeline:
        if backend not in pipes:
            pipes[backend] = qwenimg.load(tiny_layered, backend=backend, precision="fp32")
        return pipes[backend]

    return one


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[3]}x{case[4]}-{case[5]}-{case[7]}-{case[8]}")
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_layered: Path, opened: Callable[[str], Pipeline], case: Any) -> None:
    prompt, negative, picture, width, height, layers, steps, guidance, normalized = case
    initial = noise.normal((layers + 1, 16, height // 8, width // 8), seed=7)
    latents, theirs = oracle_layered.generate(
        tiny_layered, prompt, picture, initial, negative_prompt=negative, steps=steps, guidance=guidance,
        normalize=normalized,
    )  # fmt: skip
    assert theirs.std() > 10, "a constant picture would prove nothing"
    asked = {"width": width, "height": height, "steps": steps, "guidance": guidance, "negative_prompt": negative}
    for backend in BACKENDS:
        ours = opened(backend)(
            prompt, image=picture, seed=7, layers=layers, cfg_normalization=float(normalized), **asked
        )
        assert [one.shape for one in ours.layers] == [(height, width, 4)] * layers
        error = relative(ours.latents, latents)
        worst = np.abs(np.stack(ours.layers).astype(float) - theirs).max()
        print(f"{backend} {width}x{height}: latents {error:.1e} ({LATENTS}), pixels {worst:.0f} ({PIXELS})")
        assert error <= LATENTS and worst <= PIXELS


ASKED: dict[str, Any] = {"width": 80, "height": 48, "layers": 2, "steps": 2, "guidance": 4.0, "seed": 7}
PICTURE, OTHER = soft(60, 96), soft(60, 96)


def test_each_input_moves_the_layers(opened: Callable[[str], Pipeline]) -> None:
    pipe = opened("cpu")
    usual = np.stack(pipe("make it red", image=PICTURE, negative_prompt="a ring", **ASKED).layers).astype(int)
    opaque = np.dstack([PICTURE[..., :3], np.full((60, 96), 255, np.uint8)])
    asked = {"image": PICTURE, "negative_prompt": "a ring"} | ASKED
    others = {
        "prompt": pipe("make it blue", **asked),
        "negative": pipe("make it red", **(asked | {"negative_prompt": "a star"})),
        "picture": pipe("make it red", **(asked | {"image": OTHER})),
        "alpha": pipe("make it red", **(asked | {"image": opaque})),
        "norm": pipe("make it red", cfg_normalization=1, **asked),
    }
    moved = {name: np.abs(np.stack(result.layers) - usual).max() for name, result in others.items()}
    print(moved)
    assert min(moved.values()) > MOVES


def test_a_layer_more_is_not_the_same_layers(opened: Callable[[str], Pipeline]) -> None:
    """All frames see each other."""
    two, three = (opened("cpu")("a ring", image=PICTURE, **(ASKED | {"layers": count})) for count in (2, 3))
    assert len(two.layers) == 2 and len(three.layers) == 3 and not np.array_equal(two.layers[0], three.layers[0])


# Planted faults


FAULTS: dict[str, Plant] = {
    "layer order reversed": mutants_qwen_layered.layers_decoded_back_to_front,
    "additional t embedding dropped": mutants_qwen_layered.addition_ignored,
    "composite taken for a layer": mutants_qwen_layered.composite_decoded_as_a_layer,
    "condition behind the layers": mutants_qwen_layered.picture_numbered_behind_the_layers,
    "text from the sides": mutants_qwen_layered.text_counts_from_one_image,
    "shift by Qwen-Image's sizes": mutants_qwen_layered.shift_of_qwen_image,
    "alpha scaled by itself": mutants_qwen_layered.picture_resized_by_channel,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(0)
def test_planted_faults_are_caught(tiny_layered: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """With six layers in an image of 5 x 3 tokens, which the text counts from behind."""
    initial = noise.normal((7, 16, 6, 10), seed=7)
    latents, layers = oracle_layered.generate(tiny_layered, "a ring", PICTURE, initial, steps=3)
    FAULTS[fault](Patch(monkeypatch, Backend("cpu")))
    with qwenimg.load(tiny_layered, backend="cpu", precision="fp32") as pipe:
        ours = pipe("a ring", image=PICTURE, **(ASKED | {"layers": 6, "steps": 3}))
    error, worst = relative(ours.latents, latents), np.abs(np.stack(ours.layers) - layers).max()
    print(f"{fault}: latents {error:.1e} (limit {LATENTS}), pixels {worst:.0f} ({PIXELS})")
    assert error > 10 * LATENTS or worst > 4 * PIXELS


# Golden numbers


def test_noise_levels() -> None:
    """640 and 1024 pixels a side, without and with a terminal."""
    plain = flow_match.FlowMatchConfig(use_dynamic_shifting=True)
    ended = flow_match.FlowMatchConfig(use_dynamic_shifting=True, shift_terminal=0.02)
    golden = {
        (plain, 40 * 40): (1, 0.973367, 0.924142, 0.802404, 0),
        (plain, 64 * 64): (1, 0.993932, 0.982014, 0.947915, 0),
        (ended, 40 * 40): (1, 0.867911, 0.623773, 0.02, 0),
        (ended, 64 * 64): (1, 0.885825, 0.661582, 0.02, 0),
    }
    assert [layered.shift(plain, tokens, 4) for tokens in (1600, 4096)] == [2.5, 4.0]
    for (config, tokens), expected in golden.items():
        got = flow_match.flow_schedule(config, 4, tokens, QwenImageLayered.levels)
        assert np.abs(np.array(got) - expected).max() < 1e-6


def test_positions() -> None:
    """Frames from 0, the condition at -1, and text from past the most of them."""
    shapes = [(1, 2, 4)] * 5 + [(1, 2, 4)]
    positions = rope.image_positions(shapes, layered=True)
    assert positions[::8, 0].tolist() == [0, 1, 2, 3, 4, -1]
    assert rope.text_positions(shapes, 2, layered=True)[:, 0].tolist() == [5, 6]
    assert rope.text_positions([(1, 2, 40)] * 6, 1, layered=True)[0, 0] == 20


@pytest.mark.parametrize("size", [(1664, 928), (4, 3), (3, 1), (1, 3), (1000, 1001), (17, 300)])
def test_sizes_are_those_of_diffusers(opened: Callable[[str], Pipeline], size: tuple[int, int]) -> None:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_layered import calculate_dimensions

    width, height = size
    picture = np.zeros((height, width, 3), np.uint8)
    asked = opened("cpu").check("a ring", image=picture)
    assert (asked.width, asked.height) == calculate_dimensions(640**2, width / height)
    assert layered.trained_sizes(picture) == [calculate_dimensions(side**2, width / height) for side in (640, 1024)]
    assert opened("cpu").model.reference_shapes(asked) == [LatentShape(1, asked.height // 8, asked.width // 8)]


def test_the_vae_takes_the_pixels_of_diffusers(opened: Callable[[str], Pipeline]) -> None:
    from diffusers.image_processor import VaeImageProcessor

    asked = opened("cpu").check("a ring", image=PICTURE, width=80, height=48)
    processor = VaeImageProcessor(vae_scale_factor=16)
    theirs = processor.preprocess(processor.resize(Image.fromarray(PICTURE), 48, 80), 48, 80).numpy()
    [ours] = opened("cpu").model.inputs.seen(asked)
    assert np.array_equal(ours, theirs)
