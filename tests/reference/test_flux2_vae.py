"""Flux.2's VAE on both backends against diffusers, in float32: latents in patches with statistics of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.policies import FP32
from support.relative import relative
from support.tiny_flux2 import SMALL_DECODER, tiny_vae

from qwenimg import backends
from qwenimg.common.base.errors import ModelError
from qwenimg.common.networks.vaes import flux2_vae
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.parts.vae import halves
from qwenimg.common.runtime.checkpoint import Component

BACKENDS = ("cpu", "mlx")
FLOAT32 = 5e-6  # relative L2; measured at most 3e-6, of MLX's sums in convolutions
FAULT = 1e-2  # the least that a fault changes, relative L2
SHAPES = [(3, 5), (4, 1), (6, 7)]  # of latents in patches


def opened(folder: Path) -> Component:
    return open_component(flux2_vae.NETWORK, folder, read_config(flux2_vae.NETWORK, folder), "vae")


class Compared:
    def __init__(self, folder: Path, backend: str, **changes: object):
        self.model: Any = tiny_vae(**changes)
        self.model.save_pretrained(folder)
        part = opened(folder)
        plans = halves(part.stored(FP32))
        self.ours = {
            name: backends.load(backend).open(part.network, part.config, plan, FP32) for name, plan in plans.items()
        }

    def errors(self, rows: int | None = None) -> list[float]:
        return [error for shape in SHAPES for error in self._errors(*shape, rows)]

    def _errors(self, height: int, width: int, rows: int | None) -> tuple[float, float]:
        from diffusers import Flux2KleinPipeline as Pipeline

        rng, bn = np.random.default_rng(height), self.model.bn
        pixels = rng.standard_normal((1, 3, 16 * height, 16 * width)).astype(np.float32)
        latents = rng.standard_normal((1, 32, height, width)).astype(np.float32)
        mean, std = bn.running_mean[:, None, None], torch.sqrt(bn.running_var[:, None, None] + bn.eps)
        with torch.inference_mode():
            mode = Pipeline._patchify_latents(self.model.encode(torch.from_numpy(pixels)).latent_dist.mode())
            encoded = ((mode - mean) / std).numpy()
            z = Pipeline._unpatchify_latents(torch.from_numpy(latents) * std + mean)
            decoded = self.model.decode(z, return_dict=False)[0].numpy()
        moments = self.ours["encoder"].encode(pixels, rows)
        return relative(moments[:, :32], encoded), relative(self.ours["decoder"].decode(latents, rows), decoded)


@pytest.mark.parametrize("changes", [{}, SMALL_DECODER], ids=["", "small decoder"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_vae(tmp_path: Path, backend: str, changes: dict[str, object]) -> None:
    compared = Compared(tmp_path, backend, **changes)
    for rows in (None, 16):
        worst = max(compared.errors(rows))
        print(f"{backend} {changes}, bands of {rows} rows: {worst:.1e} (limit {FLOAT32})")
        assert worst <= FLOAT32


@pytest.mark.parametrize("backend", BACKENDS)
def test_deviation(tmp_path: Path, backend: str) -> None:
    """That of the latents, divided like their mean."""
    compared = Compared(tmp_path, backend)
    pixels = np.random.default_rng(5).standard_normal((1, 3, 48, 32)).astype(np.float32)
    with torch.inference_mode():
        std = compared.model.encode(torch.from_numpy(pixels)).latent_dist.std
    expected = (
        torch.nn.functional.pixel_unshuffle(std, 2) / torch.sqrt(compared.model.bn.running_var + 1e-4)[:, None, None]
    )
    deviation = np.exp(0.5 * compared.ours["encoder"].encode(pixels)[:, 32:])
    assert relative(deviation, expected.numpy()) <= FLOAT32


def test_manifest_is_that_of_the_reference(tmp_path: Path) -> None:
    model = tiny_vae(use_quant_conv=False)
    model.save_pretrained(tmp_path)
    config = read_config(flux2_vae.NETWORK, tmp_path)
    stored = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert stored.pop("bn.num_batches_tracked") == ()
    assert stored == flux2_vae.manifest(config)


def test_published_size() -> None:
    manifest = flux2_vae.manifest(flux2_vae.Flux2VAEConfig())
    values = sum(int(np.prod(shape)) for name, shape in manifest.items() if not name.startswith("bn."))
    assert (round(values / 1e6, 2), len(manifest)) == (84.05, 248 + 2)


@pytest.mark.parametrize("change", ["mean", "variance", "epsilon"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_wrong_statistics_are_seen(tmp_path: Path, backend: str, change: str) -> None:
    compared = Compared(tmp_path, backend)
    bn = compared.model.bn
    if change == "epsilon":
        bn.eps = 0.3
    else:
        values = bn.running_mean if change == "mean" else bn.running_var
        values.copy_(values.roll(1))
    worst = max(compared.errors())
    print(f"{backend} {change}: {worst:.1e} (at least {FAULT})")
    assert worst > FAULT


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"patch_size": [1, 1]}, "patch_size is"),
        ({"decoder_block_out_channels": [6, 6, 6]}, "has not the 4 levels"),
        ({"decoder_block_out_channels": [6, 6, 6, 7]}, "norm_num_groups 3 does not divide 7"),
        ({"batch_norm_eps": 0.0}, "batch_norm_eps 0.0 must be positive"),
        ({"batch_norm_eps": float("nan")}, "NaN is not allowed"),
        ({"_class_name": "AutoencoderKL"}, "is of class"),
        ({"latent_channels": 0}, "latent_channels"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    tiny_vae().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ModelError, match=said):
        opened(tmp_path)


@pytest.mark.parametrize("key", ["bn.running_mean", "bn.running_var"])
def test_files_without_statistics_are_refused(tmp_path: Path, key: str) -> None:
    tiny_vae().save_pretrained(tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(file)
    del tensors[key]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=key):
        opened(tmp_path)
