"""SANA's transformer and VAE on both backends against diffusers, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.policies import FP32
from support.relative import relative, relative_float32
from support.tiny_sana import KINDS, tiny_dit, tiny_vae

from qwenimg import backends
from qwenimg.common.networks.denoisers import sana_conditioning, sana_dit
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import dc_vae
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-5  # relative L2 of a forward
SHAPES = [((5, 3), 13), ((4, 8), 1), ((7, 11), 40)]  # latents; tokens of text
IMAGES = [(96, 160), (32, 64), (224, 96)]


def opened(network: Network, model: Any, folder: Path, backend: str) -> tuple[Any, Any]:
    """The engine, and `model` as the component that it opens."""
    model.save_pretrained(folder)
    part = open_component(network, folder, read_config(network, folder), "it")
    engine = backends.load(backend)
    return engine, engine.open(part.network, part.config, part.stored(FP32), FP32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer(tmp_path: Path, backend: str, kind: str) -> None:
    """Texts that are padded in the reference, as its pipeline does, and not here."""
    model = tiny_dit(**KINDS[kind])
    engine, ours = opened(sana_dit.NETWORK, model, tmp_path, backend)
    rng = np.random.default_rng(0)
    for (h, w), length in SHAPES:
        latents = rng.standard_normal((1, 8, h, w)).astype(np.float32)
        text = rng.standard_normal((1, length + 5, 60)).astype(np.float32)
        mask = torch.tensor([[1] * length + [0] * 5])
        for time in (999.0, 625.0, 3.0):
            own = time / 1000 if ours.config.guidance_embeds else time
            guidance = torch.tensor([0.45]) if ours.config.guidance_embeds else None
            with torch.inference_mode():
                theirs = model(
                    torch.from_numpy(latents), torch.from_numpy(text), torch.tensor([own]), guidance, mask,
                    return_dict=False,
                )[0]  # fmt: skip
            condition = ours.condition(engine.array(text[:, :length]), (h, w))
            rows = sana_conditioning.time_rows(ours.config, own, 4.5)
            made = ours.predict(engine.array(latents), rows, condition)
            error = relative_float32(np.asarray(engine.numpy(made)), theirs.numpy())
            print(f"{backend} {h}x{w}, {length} tokens, time {time}: {error:.1e} (limit {FLOAT32})")
            assert error <= FLOAT32 and theirs.std() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_vae(tmp_path: Path, backend: str) -> None:
    """Whole, and in bands, which give the same as the whole: the diffusers class has tiles instead, which do not."""
    model = tiny_vae()
    _, ours = opened(dc_vae.NETWORK, model, tmp_path, backend)
    rng = np.random.default_rng(0)
    for height, width in IMAGES:
        pixels = rng.uniform(-1, 1, (1, 3, height, width)).astype(np.float32)
        with torch.inference_mode():
            latents = model.encode(torch.from_numpy(pixels), return_dict=False)[0]
            decoded = model.decode(latents, return_dict=False)[0]
        for rows in (None, 64, 32, 8):
            made = ours.encode(pixels, rows), ours.decode(latents.numpy(), rows)
            errors = [relative(one, other.numpy()) for one, other in zip(made, (latents, decoded), strict=True)]
            print(f"{backend} {height}x{width}, rows {rows}: {errors[0]:.1e}, {errors[1]:.1e} (limit {FLOAT32})")
            assert max(errors) <= FLOAT32 and decoded.std() > 0.1 and made[1].shape == pixels.shape


def test_manifests_are_those_of_the_reference(tmp_path: Path) -> None:
    models = [(sana_dit.NETWORK, tiny_dit(**KINDS[kind]), kind) for kind in KINDS]
    for network, model, name in [*models, (dc_vae.NETWORK, tiny_vae(), "vae")]:
        model.save_pretrained(tmp_path / name)
        config = read_config(network, tmp_path / name)
        stored = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        assert {network.rename(key): shape for key, shape in stored.items()} == network.manifest(config)
        assert {network.published(key) for key in network.manifest(config)} == stored.keys()


def test_positions() -> None:
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    config = sana_dit.SanaConfig(interpolation_scale=2.0, sample_size=128)
    theirs = get_2d_sincos_pos_embed(config.dim, (6, 10), base_size=128, interpolation_scale=2.0).numpy()
    made = sana_conditioning.positions(config, 6, 10)
    assert made is not None and np.abs(made[0] - theirs).max() < 1e-4  # theirs rounds places to float32
    assert sana_conditioning.positions(sana_dit.SanaConfig(), 6, 10) is None


def test_times() -> None:
    from diffusers.models.embeddings import get_timestep_embedding

    plain, guided = sana_dit.SanaConfig(), sana_dit.SanaConfig(guidance_embeds=True)
    for time in (999.0, 857.0, 3.0):
        theirs = get_timestep_embedding(torch.tensor([time]), 256, True, 0.0)
        assert np.abs(sana_conditioning.time_rows(plain, time, 4.5) - theirs.numpy()).max() < 1e-4
    both = get_timestep_embedding(torch.tensor([0.7, 0.45]), 256, True, 0.0)
    assert np.abs(sana_conditioning.time_rows(guided, 0.7, 4.5) - both.numpy()).max() < 1e-6


@pytest.mark.parametrize(
    "change",
    [{"patch_size": 2}, {"qk_norm": "rms_norm"}, {"out_channels": 64}, {"cross_attention_dim": 64}, {"norm_eps": 1e-5}],
)
def test_configurations_that_are_refused(change: dict[str, Any]) -> None:
    config = sana_dit.SanaConfig()
    assert (config.dim, config.cross_dim, config.hidden) == (2240, 2240, 5600)
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(config, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"downsample_block_type": "pixel_unshuffle"}, {"decoder_norm_types": ["batch_norm", "rms_norm"]},
        {"encoder_qkv_multiscales": [[5]] * 6}, {"decoder_conv_act_fn": "silu"},
    ],
)  # fmt: skip
def test_vaes_that_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        dc_vae.vae_fields(change)
