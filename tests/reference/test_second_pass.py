"""Two passes against diffusers: text to image, PIL's or torch's resampling, and image to image with the same seed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from support import oracle_sd, oracle_zimage
from support.relative import relative

import qwenimg
from qwenimg.common.numbers import noise, resampling
from qwenimg.common.pipeline.result import Result

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents; measured at most 3e-6
PIXELS = 2  # of 255
RESAMPLED = 4e-6  # of values up to 4: float32, and torch sums in another order; measured at most 2.8e-6
SEED, STRENGTH = 9, 0.6
PROMPT = "a photo of a red circle"
# By --hires-with, torch's interpolation of latents.
LATENT: dict[str, dict[str, Any]] = {
    "latent": {"mode": "bilinear", "align_corners": False},
    "latent-bicubic": {"mode": "bicubic", "align_corners": False},
    "latent-nearest": {"mode": "nearest"},
    "latent-nearest-exact": {"mode": "nearest-exact"},
}


@pytest.mark.parametrize("kind", LATENT)
@pytest.mark.parametrize("sides", [(18, 22), (9, 11), (13, 17), (72, 88)])
def test_latents_are_resampled_as_by_torch(kind: str, sides: tuple[int, int]) -> None:
    latents = noise.normal((1, 4, 9, 11), 3)
    factors = sides[0] / 9, sides[1] / 11
    made = resampling.resampled(latents, *sides, factors, kind)
    expected = F.interpolate(torch.from_numpy(latents), size=sides, **LATENT[kind]).numpy()
    worst = float(np.abs(made - expected).max())
    print(f"{kind} to {sides}: {worst:.1e} (limit {RESAMPLED})")
    assert made.dtype == np.float32 and made.shape == (1, 4, *sides) and worst <= RESAMPLED


def test_what_nearest_takes_has_the_same_bits() -> None:
    latents = noise.normal((1, 4, 5, 7), 3)
    made = resampling.resampled(latents, 10, 14, (2, 2), "latent-nearest")
    assert np.array_equal(made, latents.repeat(2, 2).repeat(2, 3))


def compare(made: Result, expected: tuple[np.ndarray, np.ndarray]) -> None:
    latents, pixels = expected
    error, worst = relative(made.latents, latents), float(np.abs(made.pixels - pixels).max())
    print(f"{made.recipe['backend']}: latents {error:.1e} (limit {LATENTS}), pixels {worst:.0f} (limit {PIXELS})")
    assert pixels.std() > 10, "a constant picture would prove nothing"
    assert made.pixels.shape == pixels.shape
    assert error <= LATENTS and worst <= PIXELS


@pytest.fixture(scope="module")
def sd15(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion 1.5 with DDIM: diffusers' PNDM begins otherwise from a picture."""
    folder = tmp_path_factory.mktemp("second") / "sd15"
    shutil.copytree(folders["sd15"], folder)
    config = json.loads((folders["sd21"] / "scheduler" / "scheduler_config.json").read_text())
    config["prediction_type"] = "epsilon"
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"scheduler": ["diffusers", "DDIMScheduler"]}))
    return folder


def larger(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    return np.asarray(Image.fromarray(pixels.astype(np.uint8)).resize((width, height), Image.Resampling.LANCZOS))


@pytest.mark.parametrize(("kind", "name"), [("sd15", "lanczos"), ("sd15", "latent"), ("sdxl", "latent-bicubic")])
@pytest.mark.sample(1)
def test_stable_diffusion(folders: dict[str, Path], sd15: Path, kind: str, name: str) -> None:
    folder = {"sd15": sd15}.get(kind, folders[kind])
    asked = {"prompt": PROMPT, "num_inference_steps": 4, "guidance_scale": 4.0, "negative_prompt": "blurry"}
    family = "StableDiffusionXL" if kind == "sdxl" else "StableDiffusion"
    latents, pixels = oracle_sd.generate(folder, f"{family}Pipeline", seed=SEED, width=64, height=48, **asked)
    begun: Any = larger(pixels, 96, 72)
    if name != "lanczos":
        begun = F.interpolate(torch.from_numpy(latents), size=(9, 12), **LATENT[name])
    asked |= {"num_inference_steps": 6, "strength": STRENGTH}
    expected = oracle_sd.generate(folder, f"{family}Img2ImgPipeline", seed=SEED, image=begun, **asked)
    for backend in BACKENDS:
        with qwenimg.load(folder, backend=backend, precision="fp32") as pipe:
            compare(pipe(
                PROMPT, negative_prompt="blurry", width=64, height=48, steps=4, guidance=4.0, seed=SEED,
                hires=1.5, hires_strength=STRENGTH, hires_steps=6, hires_with=name,
            ), expected)  # fmt: skip


@pytest.mark.sample(0)
def test_z_image(tiny_zimage: Path) -> None:
    _, pixels = oracle_zimage.generate(tiny_zimage, PROMPT, noise.normal((1, 16, 6, 8), SEED), steps=4)
    expected = oracle_zimage.from_picture(
        tiny_zimage, PROMPT, larger(pixels, 128, 96), mask=None, seed=SEED, num_inference_steps=4, strength=STRENGTH,
        guidance_scale=0.0,
    )  # fmt: skip
    for backend in BACKENDS:
        with qwenimg.load(tiny_zimage, backend=backend, precision="fp32") as pipe:
            asked = {"width": 64, "height": 48, "steps": 4, "guidance": 0.0, "seed": SEED}
            compare(pipe(PROMPT, **asked, hires=2, hires_strength=STRENGTH), expected)
