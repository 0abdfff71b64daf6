"""Qwen-Image-2.1's VAE on both backends against diffusers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.policies import FP32
from support.refusals import refused
from support.relative import relative_float32
from support.tiny_qwen21 import VAE, tiny_vae

from qwenimg import backends
from qwenimg.common.networks.vaes import qwen21_vae
from qwenimg.common.networks.vaes.qwen21_vae import Qwen21VAEConfig, ResidualLevel
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 3e-6  # relative L2 of a half; measured at most 1e-6
SIZES = [(3, 2), (1, 4), (5, 7)]  # rows and columns of latents
OTHERS: dict[str, dict[str, Any]] = {
    "as published": {},
    "two blocks, shallow": {
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 2,
        "temperal_downsample": [True, False],
        "decoder_base_dim": None,
    },
    "wider in steps of four": {"dim_mult": [1, 4, 4], "temperal_downsample": [True, True]},
}
NETWORK = qwen21_vae.NETWORK


@pytest.fixture(scope="module", params=OTHERS)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_vae(**OTHERS[request.param])


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vae")
    model.save_pretrained(folder)
    return folder


def opened(folder: Path, backend: str) -> Any:
    part = open_component(NETWORK, folder, read_config(NETWORK, folder), "it")
    return backends.load(backend).open(part.network, part.config, part.stored(FP32), FP32)


def scale(model: Any) -> int:
    return int(2 ** len(model.config.temperal_downsample))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_decode_and_encode(model: Any, folder: Path, backend: str) -> None:
    """Whole, and in bands with the same result."""
    ours, rng = opened(folder, backend), np.random.default_rng(1)
    for height, width in SIZES:
        latents = rng.standard_normal((1, 12, height, width)).astype(np.float32)
        pixels = rng.uniform(-1, 1, (1, 4, scale(model) * height, scale(model) * width)).astype(np.float32)
        with torch.inference_mode():
            drawn = model.decode(torch.from_numpy(latents)[:, :, None]).sample[:, :, 0].numpy()
            moments = model.encode(torch.from_numpy(pixels)[:, :, None]).latent_dist.parameters[:, :, 0].numpy()
        for rows in (None, 16, 8):
            result = ours.decode(latents, rows)
            back = ours.encode(pixels, rows)
            errors = relative_float32(np.clip(result, -1, 1), drawn), relative_float32(back, moments)
            print(f"{backend} {height}x{width}, bands of {rows}: {errors[0]:.1e}, {errors[1]:.1e} (limit {FLOAT32})")
            assert max(errors) <= FLOAT32 and result.std() > 0.1 and back.std() > 0.1


def test_planted_faults_are_caught(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = np.random.default_rng(1).standard_normal((1, 12, 3, 2)).astype(np.float32)
    with torch.inference_mode():
        drawn = model.decode(torch.from_numpy(latents)[:, :, None]).sample[:, :, 0].numpy()

    def first_frame(level: ResidualLevel) -> tuple[int, ...]:
        repeats = level.neighbours * level.outputs // level.inputs
        return tuple((output * level.frames * 4 + p) // repeats for output in range(level.outputs) for p in range(4))

    monkeypatch.setattr(ResidualLevel, "spread", property(first_frame))
    error = relative_float32(np.clip(opened(folder, "cpu").decode(latents), -1, 1), drawn)
    same = all(first_frame(level) == level.spread for level in read_config(NETWORK, folder).up_levels)
    print(f"the first of two frames: {error:.1e} (limit {FLOAT32})")
    assert same or error > 100 * FLOAT32


def test_manifest_is_that_of_the_reference(model: Any, folder: Path) -> None:
    stored = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert NETWORK.manifest(read_config(NETWORK, folder)) == stored


def test_published() -> None:
    """Counts and statistics, and the values of the class."""
    import inspect

    from diffusers import AutoencoderKLQwenImage21

    config = Qwen21VAEConfig()
    manifest = NETWORK.manifest(config)
    assert (len(manifest), sum(int(np.prod(shape)) for shape in manifest.values()) // 10_000) == (238, 33_774)
    assert (config.scale, config.encoder_dims) == (16, (96, 96, 192, 384, 768, 768))
    assert config.decoder_dims == (1152, 1152, 1152, 576, 288, 144)
    theirs = inspect.signature(AutoencoderKLQwenImage21.__init__).parameters
    assert list(config.latents_mean) == theirs["latents_mean"].default
    assert list(config.latents_std) == theirs["latents_std"].default


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim_mult": [1, 2, 4, 8, 7]}, "no shortcut leads"),
        ({"dim_mult": [1, 3, 8, 8, 8], "base_dim": 7}, "no shortcut leads"),
        ({"is_residual": False}, "is_residual is False: not supported"),
        ({"in_channels": 3}, "in_channels is 3: not supported"),
        ({"patch_size": 2}, "patch_size is 2: not supported"),
        ({"latents_std": [0.0] * 12}, "latents_std must be positive"),
        ({"z_dim": 13}, "must have z_dim = 13 entries"),
        ({"temperal_downsample": [True]}, "expected one fewer"),
    ],
)
def test_wrong_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in (VAE | changes).items()}
    assert message in refused(Qwen21VAEConfig, **given)
