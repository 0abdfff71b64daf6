"""Chroma from a prompt to pixels, on both backends, against diffusers on a folder that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import oracle_chroma, peer

import qwenimg
from qwenimg.common.parts import known_configs
from qwenimg.common.sampling.flow_match import flow_schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-5  # relative L2 of the final latents
PIXELS = 2  # of 255: a value on a rounding edge may go either way
LONG = "a blue square with three yellow stars over a small red house, " * 40
CASES: list[dict[str, Any]] = [
    {"prompt": "a red circle", "width": 80, "height": 48, "steps": 4, "guidance": 3.0},
    {"prompt": "x", "negative_prompt": LONG, "width": 48, "height": 112, "steps": 3, "guidance": 5.0},
    {"prompt": LONG, "negative_prompt": "low, blurry", "width": 64, "height": 80, "steps": 2, "guidance": 1.5},
    {"prompt": "a star; 背景", "width": 48, "height": 48, "steps": 2, "guidance": 1.0},
]
PICTURE = np.random.default_rng(3).integers(0, 256, (48, 80, 3), np.uint8)
HOLE = np.zeros((48, 80), np.uint8)
HOLE[:, 32:] = 255
FROM_PICTURES: list[tuple[str, dict[str, Any]]] = [
    ("image", {"prompt": "a red circle", "steps": 5, "strength": 0.6, "guidance": 3.0}),
    ("mask", {"prompt": "a ring", "negative_prompt": "x", "steps": 4, "strength": 0.8, "guidance": 2.0}),
]


def compare(folder: Path, task: str, asked: dict[str, Any]) -> None:
    renamed = {"steps": "num_inference_steps", "guidance": "guidance_scale"}
    options = {renamed.get(name, name): value for name, value in {"negative_prompt": "", **asked}.items()}
    pictures: dict[str, Any] = {}
    if task != "text":
        options |= {"image": Image.fromarray(PICTURE), "width": 80, "height": 48}
        pictures["image"] = PICTURE
    if task == "mask":
        options["mask_image"], pictures["mask"] = Image.fromarray(HOLE), HOLE
    expected = oracle_chroma.generate(folder, task, seed=7, **options)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        ours = qwenimg.load(folder, backend=backend, precision="fp32")(**asked, **pictures, seed=7)
        peer.check_picture(f"{backend} {task} {asked['guidance']}", ours, expected, LATENTS, PIXELS)


@pytest.mark.parametrize("asked", CASES, ids=lambda asked: f"{asked['width']}x{asked['height']}-{asked['guidance']}")
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_chroma: Path, asked: dict[str, Any]) -> None:
    compare(tiny_chroma, "text", asked)


@pytest.mark.parametrize("case", FROM_PICTURES, ids=lambda case: case[0])
@pytest.mark.sample(0)
def test_from_a_picture_equals_diffusers(tiny_chroma: Path, case: tuple[str, dict[str, Any]]) -> None:
    compare(tiny_chroma, *case)


def test_a_cut_prompt_is_told(tiny_chroma: Path) -> None:
    pipe = qwenimg.load(tiny_chroma, backend="cpu")
    [line] = pipe.model.warnings(pipe.check(LONG))
    assert line.startswith("the prompt is cut: the model sees its first 511 tokens")
    assert (pipe.defaults.steps, pipe.defaults.guidance, pipe.defaults.negative_prompt) == (40, 3.0, "")


@pytest.mark.parametrize(("side", "levels"), [
    (1024, (1, 0.904531, 0.759511, 0.512844, 0)), (512, (1, 0.849235, 0.652489, 0.384945, 0)),
])  # fmt: skip
def test_golden_levels(side: int, levels: tuple[float, ...]) -> None:
    """Those of diffusers' schedule: the shift goes with the size."""
    sigmas = flow_schedule(known_configs.scheduler("chroma1-hd"), 4, (side // 16) ** 2)
    assert np.abs(np.subtract(sigmas, levels)).max() <= 1e-6
