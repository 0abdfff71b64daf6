"""Z-Image under control, from a prompt and pictures to pixels, on both backends, against diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file
from support import oracle_zimage
from support.relative import relative
from support.tiny_zimage import CONTROLS, control_file, tiny_control

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.numbers import noise

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents; the reference's float32 sinusoid is worth most of it
PIXELS = 2  # of 255: a value on a rounding edge may go either way
MOVES = 8  # levels of 255 by which each input must move some pixel: a fault in it would show

RNG = np.random.default_rng(5)
PICTURE, SECOND = (RNG.integers(0, 256, (48, 80, 3), np.uint8) for _ in range(2))
ALL = np.full((48, 80), 255, np.uint8)
CASES: dict[str, dict[str, Any]] = {
    "1": {"version": "1", "scale": 0.8},
    "2.0": {"version": "2.0", "guidance": 2.5},
    "2.1": {"version": "2.1", "scale": 0.7},
    "2.1-guided": {"version": "2.1", "guidance": 3.0},
    "2.1-high": {"version": "2.1", "size": (48, 112)},
    "2.1-fills": {"version": "2.1", "filled": (SECOND, ALL), "guidance": 2.0},
}


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The file of each version, as its authors publish it for a transformer of more blocks."""
    folder = tmp_path_factory.mktemp("nets")
    for version in CONTROLS:
        tiny_control(version).save_pretrained(folder / version)
        save_file(control_file(version), folder / f"{version}.safetensors")
    return {version: folder / version for version in CONTROLS}


@pytest.fixture(scope="module")
def opened(tiny_zimage: Path) -> dict[str, Pipeline]:
    return {name: qwenimg.load(tiny_zimage, backend=name, precision="fp32") for name in BACKENDS}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_zimage: Path, nets: dict[str, Path], opened: dict[str, Pipeline], name: str) -> None:
    case = {"scale": 1.0, "guidance": 0.0, "filled": None, "size": (80, 48)} | CASES[name]
    (width, height), filled = case["size"], case["filled"]
    generator, shape = noise.TorchCPUGenerator(7), (1, 16, height // 8, width // 8)
    initial = [generator.normal(shape) for _ in range(2)][filled is not None]  # the first is of the picture's sample
    latents, pixels = oracle_zimage.controlled(
        tiny_zimage, tiny_control(case["version"]), "a red circle", PICTURE, initial, filled=filled,
        negative_prompt="blurry things, everywhere", num_inference_steps=3, guidance_scale=case["guidance"],
        controlnet_conditioning_scale=case["scale"],
    )  # fmt: skip
    assert pixels.std() > 10, "a constant picture would prove nothing"
    asked: dict[str, Any] = {"width": width, "height": height, "steps": 3, "seed": 7, "guidance": case["guidance"]}
    asked["negative_prompt"] = "blurry things, everywhere"
    if filled is not None:
        asked |= {"image": filled[0], "mask": filled[1], "strength": 1.0}
    for backend in BACKENDS:
        ours = opened[backend]("a red circle", control=(nets[case["version"]], PICTURE, case["scale"]), **asked)
        plain = opened[backend]("a red circle", **asked)
        error, worst = relative(ours.latents, latents), np.abs(ours.pixels - pixels).max()
        moved = np.abs(ours.pixels.astype(int) - plain.pixels).max()
        print(f"{backend}: latents {error:.2e} (limit {LATENTS}), pixels {worst:.0f} (limit {PIXELS}), moved {moved}")
        assert moved >= MOVES
        assert error <= LATENTS and worst <= PIXELS
