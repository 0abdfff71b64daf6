"""Tiny VAEs on both backends, in float32: TAESD against diffusers' AutoencoderTiny, those of FLUX.2 and Qwen-Image, for
which diffusers has no class, against a second writing in float64; whole, in bands, and from every layout of files."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support import tiny_autoencoder as tiny
from support.policies import FP32, parse
from support.relative import relative

from qwenimg import backends
from qwenimg.common.networks.vaes import tiny_vae, tiny_video_vae
from qwenimg.common.networks.vaes.tiny_vae import TinyVAEConfig
from qwenimg.common.networks.vaes.tiny_video_vae import TinyVideoVAEConfig
from qwenimg.common.parts import tiny_vae as files
from qwenimg.common.parts.vae import halves
from qwenimg.common.runtime.checkpoint import Component

BACKENDS = ("cpu", "mlx")
FLOAT32 = 3e-6  # relative L2; measured at most 1.2e-6 on MLX, whose sums in convolutions are longer; 5e-7 on torch
# Bands against the whole: the same sums in other blocks. Measured at most 4e-7
BANDS = 2e-6
SHAPES = [(3, 5), (4, 1), (7, 6)]  # of latents


class Halves:
    """Both halves of a tiny VAE on a backend, as numpy sees them."""

    def __init__(self, component: Component, backend: str, policy=FP32) -> None:
        plans = halves(component.stored(policy))
        load = backends.load(backend)
        self.ours = {n: load.open(component.network, component.config, plan, policy) for n, plan in plans.items()}

    def decode(self, z: np.ndarray, rows: int | None = None) -> np.ndarray:
        return self.ours["decoder"].decode(z, rows)

    def encode(self, pixels: np.ndarray, rows: int | None = None) -> np.ndarray:
        return self.ours["encoder"].encode(pixels, rows)


def inputs(channels: int, height: int, width: int, scale: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(height)
    z = 2 * rng.standard_normal((1, channels, height, width)).astype(np.float32)
    return z, rng.uniform(-1, 1, (1, 3, scale * height, scale * width)).astype(np.float32)


# Manifests


def test_published_manifest_is_that_of_diffusers() -> None:
    from diffusers import AutoencoderTiny

    with torch.device("meta"):
        model = AutoencoderTiny()
    made = tiny_vae.manifest(TinyVAEConfig())
    assert made == {name: tuple(value.shape) for name, value in model.state_dict().items()}
    decoder = sum(prod(shape) for name, shape in made.items() if name.startswith("decoder."))
    assert (sum(map(prod, made.values())), decoder) == (2_445_063, 1_222_531)  # as their authors' table has them


def test_published_sizes_of_the_others() -> None:
    of_flux2 = tiny_vae.manifest(TinyVAEConfig(latent_channels=32, pooled=True))
    of_qwen = tiny_video_vae.manifest(TinyVideoVAEConfig())
    # Their authors' taef2_decoder.pth and taef2_encoder.pth have 2,704,756 and 2,704,692 bytes in 16 bits
    assert sum(map(prod, of_flux2.values())) == 2_677_027
    assert (len(of_qwen), sum(map(prod, of_qwen.values()))) == (128, 11_315_539)


# Forwards


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [4, 16])
def test_taesd_is_that_of_diffusers(backend: str, channels: int, tmp_path: Path) -> None:
    made = tiny.config(channels)
    named = tiny.weights(made, channels)
    model = tiny.diffusers_model(made, named)
    model.save_pretrained(tmp_path)
    ours = Halves(files.open_tiny(tmp_path), backend)
    errors = []
    for shape in SHAPES:
        z, pixels = inputs(channels, *shape, made.scale)
        with torch.inference_mode():
            decoded = model.decode(torch.from_numpy(z)).sample.numpy()
            encoded = model.encode(torch.from_numpy(pixels)).latents.numpy()
        errors += [relative(ours.decode(z), decoded), relative(ours.encode(pixels), encoded)]
        assert np.abs(decoded).max() > 1 and np.std(decoded) > 0.1  # beyond a picture's range, which is not clamped
    print(f"{backend}, {channels} channels: relative L2 to AutoencoderTiny at most {max(errors):.1e}")
    assert max(errors) < FLOAT32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["taesd", "taef2", "taew2_1"])
@pytest.mark.sample(1)
def test_each_is_the_published_formula_in_float64(backend: str, kind: str, tmp_path: Path) -> None:
    patch = 2 if kind == "taef2" else 1
    made = tiny.video_config(16) if kind == "taew2_1" else tiny.config(32, pooled=kind == "taef2", patch=patch)
    named = tiny.weights(made, 1)
    if isinstance(made, TinyVideoVAEConfig):
        save_file(named, path := tmp_path / "taew2_1.safetensors")
    else:
        path = tiny.write_authors(tmp_path, kind, named)
    ours = Halves(files.open_tiny(path, patch), backend)
    errors, banded = [], []
    for height, width in SHAPES:
        z, pixels = inputs(patch**2 * made.latent_channels, height, width, patch * made.scale)
        if isinstance(made, TinyVideoVAEConfig):
            decoded, encoded = tiny.taehv_decoded(made, named, z), tiny.taehv_encoded(made, named, pixels)
        else:
            unpatched = torch.pixel_shuffle(torch.from_numpy(z), patch).numpy()
            decoded, encoded = tiny.taesd_decoded(made, named, unpatched), tiny.taesd_encoded(made, named, pixels)
            encoded = torch.pixel_unshuffle(torch.from_numpy(encoded), patch).numpy()
        whole, latents = ours.decode(z), ours.encode(pixels)
        assert whole.shape == pixels.shape and latents.shape == z.shape and whole.dtype == latents.dtype == np.float32
        errors += [relative(whole, decoded), relative(latents, encoded)]
        for rows in (8, 16):
            banded += [relative(ours.decode(z, rows), whole), relative(ours.encode(pixels, rows), latents)]
        assert np.std(decoded) > 0.05 and np.std(encoded) > 0.05
    print(f"{backend}, {kind}: relative L2 to float64 {max(errors):.1e}, of bands to the whole {max(banded):.1e}")
    assert max(errors) < FLOAT32 and max(banded) < BANDS


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_bfloat16_it_is_within_its_rounding(backend: str, tmp_path: Path) -> None:
    made = tiny.config(4)
    named = tiny.weights(made)
    path = tiny.write_authors(tmp_path, "taesd", named)
    z, pixels = inputs(4, 5, 7, made.scale)
    ours = Halves(files.open_tiny(path), backend, parse("bf16,vae=bf16", on_gpu=False))
    errors = [
        relative(ours.decode(z), tiny.taesd_decoded(made, named, z)),
        relative(ours.encode(pixels), tiny.taesd_encoded(made, named, pixels)),
    ]
    print(f"{backend}: {max(errors):.1e} in bfloat16")
    assert max(errors) < 8 * 2**-8


# Layouts of files


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_every_layout_has_the_same_weights(backend: str, tmp_path: Path) -> None:
    made = tiny.config(4)
    named = tiny.weights(made)
    z, pixels = inputs(4, 3, 2, made.scale)
    tiny.diffusers_model(made, named).save_pretrained(tmp_path / "folder")
    torch.save({k: torch.from_numpy(v) for k, v in tiny.authors(named, "encoder").items()}, tmp_path / "t_encoder.pth")
    torch.save({k: torch.from_numpy(v) for k, v in tiny.authors(named, "decoder").items()}, tmp_path / "t_decoder.pth")
    save_file(named, tmp_path / "diffusers.safetensors")
    scale = {"vae_scale": np.float32([0.18215]), "vae_shift": np.float32([0.0])}
    places = [
        tmp_path / "folder",
        tmp_path / "diffusers.safetensors",
        tmp_path / "t_decoder.pth",
        tmp_path / "t_encoder.pth",
        tiny.write_authors(tmp_path / "two", "taesd", named),
        tmp_path / "two",
        tiny.write_whole(tmp_path / "one.safetensors", named, {"encoder": "encoder.", "decoder": "decoder."}),
        tiny.write_whole(
            tmp_path / "comfy.safetensors", named, {"encoder": "taesd_encoder.", "decoder": "taesd_decoder."}, **scale
        ),
    ]
    found = []
    for place in places:
        component = files.open_tiny(place)
        assert component.config == made and files.has_encoder(component)
        ours = Halves(component, backend)
        found.append((ours.decode(z), ours.encode(pixels)))
        component.plan.close()
    for decoded, encoded in found[1:]:
        assert np.array_equal(decoded, found[0][0]) and np.array_equal(encoded, found[0][1])
