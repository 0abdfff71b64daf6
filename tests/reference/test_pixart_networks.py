"""PixArt's transformer on both backends against diffusers, in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_pixart
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_pixart import ALPHA, tiny_dit

from qwenimg import backends
from qwenimg.common.families import catalog, registry
from qwenimg.common.networks.denoisers import pixart_conditioning, pixart_dit
from qwenimg.common.networks.denoisers.pixart_dit import PixArtConfig
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-5  # relative L2 of a forward
SHAPES = [((10, 6), 13), ((12, 12), 1), ((14, 22), 40)]  # latents; tokens of text
KINDS: dict[str, dict[str, Any]] = {
    "sigma": {},
    "alpha": ALPHA,
    "scaled": {"sample_size": 32, "interpolation_scale": 0.5, "norm_eps": 1e-5},
    "noise alone": {"out_channels": None},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_transformer(tmp_path: Path, kind: str, backend: str) -> None:
    """Texts that are padded and masked in the reference, as its pipeline does, and not here."""
    model = tiny_dit(**KINDS[kind])
    model.save_pretrained(tmp_path)
    oracle_pixart.exact(model)
    config = read_config(pixart_dit.NETWORK, tmp_path)
    part = open_component(pixart_dit.NETWORK, tmp_path, config, "it")
    engine = backends.load(backend)
    ours, rng = engine.open(part.network, part.config, part.stored(FP32), FP32), np.random.default_rng(0)
    for (h, w), length in SHAPES:
        latents = rng.standard_normal((1, 4, h, w)).astype(np.float32)
        text = rng.standard_normal((1, length + 5, 52)).astype(np.float32)
        pixels = {"resolution": torch.tensor([[8.0 * h, 8.0 * w]]), "aspect_ratio": torch.tensor([[h / w]])}
        more = {"added_cond_kwargs": pixels} if config.sees_size else {}
        sizes = pixart_conditioning.size_rows(8 * h, 8 * w) if config.sees_size else None
        condition = ours.condition(engine.array(text[:, :length]), (h // 2, w // 2), sizes)
        for time in (999, 500, 3):
            with torch.inference_mode():
                theirs = model(
                    torch.from_numpy(latents),
                    encoder_hidden_states=torch.from_numpy(text),
                    timestep=torch.tensor([time]),
                    encoder_attention_mask=torch.tensor([[1] * length + [0] * 5]),
                    return_dict=False,
                    **more,
                )[0][:, :4]
            made = ours.predict(engine.array(latents), pixart_conditioning.time_row(time), condition)
            error = relative_float32(np.asarray(engine.numpy(made)), theirs.numpy())
            print(f"{backend} {kind} {h}x{w}, {length} tokens, time {time}: {error:.1e} (limit {FLOAT32})")
            assert error <= FLOAT32 and theirs.std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_those_of_the_reference(tmp_path: Path, kind: str) -> None:
    model = tiny_dit(**KINDS[kind])
    model.save_pretrained(tmp_path)
    config, network = read_config(pixart_dit.NETWORK, tmp_path), pixart_dit.NETWORK
    stored = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert {network.rename(key): shape for key, shape in stored.items()} == network.manifest(config)
    assert {network.published(key) for key in network.manifest(config)} == stored.keys()


def test_an_older_class_is_read(tmp_path: Path) -> None:
    """As the published files have it, with keys of other models of that class; and another model of it is refused."""
    tiny_dit(**ALPHA).save_pretrained(tmp_path)
    config = read_config(pixart_dit.NETWORK, tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    older = {
        "_class_name": "Transformer2DModel", "double_self_attention": False, "only_cross_attention": False,
        "num_vector_embeds": None, "use_linear_projection": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(data | older))
    assert read_config(pixart_dit.NETWORK, tmp_path) == config and config.sees_size
    (tmp_path / "config.json").write_text(json.dumps(data | older | {"norm_type": "ada_norm_zero"}))
    with pytest.raises(ValueError, match="norm_type"):
        read_config(pixart_dit.NETWORK, tmp_path)


@pytest.mark.parametrize("name", ["pixart-sigma", "pixart-alpha", "pixart-lcm"])
def test_parameters_of_the_published_models(name: str) -> None:
    from diffusers import PixArtTransformer2DModel

    model = registry.published(catalog.KNOWN[name])
    assert model is not None
    with torch.device("meta"):
        theirs = PixArtTransformer2DModel(caption_channels=4096, use_additional_conditions=name != "pixart-sigma")
    shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    plan = model.checkpoint["transformer"].plan
    assert {pixart_dit.rename(key): shape for key, shape in shapes.items()} == dict(plan.shapes)
    assert plan.parameters == sum(int(np.prod(shape)) for shape in shapes.values())


def test_positions() -> None:
    """Those of the reference in float64, for images of any shape; the same range in all of them."""
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    config = PixArtConfig()
    for grid in ((64, 64), (38, 26), (1, 90)):
        theirs = get_2d_sincos_pos_embed(config.dim, grid, base_size=64, interpolation_scale=2)
        made = pixart_conditioning.positions(config, grid)[0]
        assert np.abs(made - theirs.numpy()).max() < 1e-5  # its places are float32


@pytest.mark.parametrize(
    "change",
    [{"cross_attention_dim": 60}, {"out_channels": 5}, {"attention_head_dim": 70, "cross_attention_dim": 1120,
     "use_additional_conditions": True}, {"patch_size": 4}, {"norm_eps": 0.0}, {"attention_type": "gated"}],
)  # fmt: skip
def test_configurations_that_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change)).split("_")[0] + "|width|cross"):
        replace(PixArtConfig(), **change)
