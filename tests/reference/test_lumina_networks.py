"""Lumina-Image 2.0's transformer and text encoder on both backends against diffusers and transformers, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_lumina import tiny_dit, tiny_text_encoder

from qwenimg import backends
from qwenimg.common.families.lumina.checkpoint import NETWORKS
from qwenimg.common.networks.denoisers import lumina_conditioning, lumina_dit
from qwenimg.common.networks.network import Network
from qwenimg.common.numbers.timesteps import sinusoids
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-5  # relative L2 of a forward
SHAPES = [((10, 6), 13), ((8, 16), 1), ((14, 22), 40)]  # latents; tokens of text
IDS = [[2], list(range(3, 20)), [2, *range(500, 400, -1)]]


def opened(network: Network, model: Any, folder: Path, backend: str) -> tuple[Any, Any]:
    """The engine, and `model` as the component that it opens."""
    model.save_pretrained(folder)
    part = open_component(network, folder, read_config(network, folder), "it")
    engine = backends.load(backend)
    return engine, engine.open(part.network, part.config, part.stored(FP32), FP32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer(tmp_path: Path, backend: str) -> None:
    """Texts that are padded in the reference, as its pipeline does, and not here."""
    model = tiny_dit()
    engine, ours = opened(lumina_dit.NETWORK, model, tmp_path, backend)
    rng = np.random.default_rng(0)
    for (h, w), length in SHAPES:
        latents = rng.standard_normal((1, 16, h, w)).astype(np.float32)
        text = rng.standard_normal((1, length + 5, 60)).astype(np.float32)
        mask = torch.tensor([[1] * length + [0] * 5])
        for sigma in (1.0, 0.625, 0.25):
            with torch.inference_mode():
                time = torch.tensor([1 - sigma])
                theirs = model(torch.from_numpy(latents), time, torch.from_numpy(text), mask, return_dict=False)[0]
            condition = ours.condition(engine.array(text[:, :length]), (h // 2, w // 2))
            made = ours.predict(engine.array(latents), lumina_conditioning.time_row(1000 * sigma), condition)
            error = relative_float32(np.asarray(engine.numpy(made)), theirs.numpy())
            print(f"{backend} {h}x{w}, {length} tokens, sigma {sigma}: {error:.1e} (limit {FLOAT32})")
            assert error <= FLOAT32 and theirs.std() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_text_encoder(tmp_path: Path, backend: str) -> None:
    """States in front of the last layer, of Gemma 2 with its soft caps and windows."""
    model = tiny_text_encoder()
    engine, ours = opened(NETWORKS["text_encoder"], model, tmp_path, backend)
    for ids in IDS:
        with torch.inference_mode():
            theirs = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-2]
        error = relative_float32(np.asarray(engine.numpy(ours.encode(ids))), theirs.numpy())
        print(f"{backend} {len(ids)} tokens: {error:.1e} (limit {FLOAT32})")
        assert error <= FLOAT32


def test_manifests_are_those_of_the_reference(tmp_path: Path) -> None:
    for network, model in ((lumina_dit.NETWORK, tiny_dit()), (NETWORKS["text_encoder"], tiny_text_encoder())):
        model.save_pretrained(tmp_path / network.name)
        config = read_config(network, tmp_path / network.name)
        stored = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        rename = network.rename_for(config)
        assert {rename(key): shape for key, shape in stored.items()} == network.manifest(config)
        assert {rename(network.published(key)) for key in network.manifest(config)} == network.manifest(config).keys()
    transformer = lumina_dit.NETWORK
    config = read_config(transformer, tmp_path / transformer.name)
    assert {transformer.published(key) for key in transformer.manifest(config)} == tiny_dit().state_dict().keys()


def test_times() -> None:
    """The model's time runs from noise, 0, to the image, 1: angles of at most one."""
    from diffusers.models.embeddings import get_timestep_embedding

    for timestep in (1000.0, 857.142857, 3.5):
        theirs = get_timestep_embedding(torch.tensor([1 - timestep / 1000]), 256, True, 0.0)
        assert np.abs(lumina_conditioning.time_row(timestep) - theirs.numpy()).max() < 1e-6
    assert np.array_equal(lumina_conditioning.time_row(1000.0)[0], sinusoids(0.0, 256))


@pytest.mark.parametrize("change", [{"n_kv_heads": 5}, {"axes_dims": (6, 8, 6)}, {"patch_size": 1}])
def test_configurations_that_are_refused(change: dict[str, Any]) -> None:
    config = lumina_dit.LuminaConfig()
    assert (config.hidden, config.head_dim, config.kv_dim, config.time_dim) == (9216, 96, 768, 1024)
    with pytest.raises(ValueError, match=r"num_kv_heads|axes_dim_rope|patch_size"):
        replace(config, **change)
