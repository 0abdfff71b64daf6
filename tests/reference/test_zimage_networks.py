"""Z-Image's transformer and text encoder on both backends against diffusers and transformers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_zimage import tiny_dit, tiny_text_encoder

from qwenimg import backends
from qwenimg.common.networks.denoisers import zimage_conditioning, zimage_dit
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.networks.network import Network
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.timesteps import timestep_features
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-5  # relative L2 of a forward; measured at most 9e-7
SHAPES = [((10, 6), 13), ((8, 16), 32), ((14, 22), 40)]  # latents, of which the second need no pads; tokens of text
IDS = [list(range(3, 20)), list(range(500, 400, -1))]


def opened(network: Network, model: Any, folder: Path, backend: str) -> tuple[Any, Any]:
    """The engine, and `model` as the component that it opens."""
    model.save_pretrained(folder)
    part = open_component(network, folder, read_config(network, folder), "it")
    engine = backends.load(backend)
    return engine, engine.open(part.network, part.config, part.stored(FP32), FP32)


def exact_sinusoid(t: torch.Tensor, dim: int) -> torch.Tensor:
    """The reference's own is in float32, whose angles of up to 1000 radians are worth 1e-5 of this model's result."""
    return torch.from_numpy(timestep_features(float(t), dim)).float()[None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer(tmp_path: Path, backend: str) -> None:
    model = tiny_dit()
    model.t_embedder.timestep_embedding = exact_sinusoid
    engine, ours = opened(zimage_dit.NETWORK, model, tmp_path, backend)
    rng = np.random.default_rng(0)
    for (h, w), length in SHAPES:
        latents = rng.standard_normal((1, 16, h, w)).astype(np.float32)
        text = rng.standard_normal((1, length, 60)).astype(np.float32)
        for sigma in (1.0, 0.625, 0.25):
            with torch.inference_mode():
                time = torch.tensor([1 - sigma])
                [theirs] = model([torch.from_numpy(latents[0, :, None])], time, [torch.from_numpy(text[0])])[0]
            condition = ours.condition(engine.array(text), (h // 2, w // 2))
            features = zimage_conditioning.time_row(1000 * sigma, "float32")
            tokens = ours.predict(engine.array(packing.pack(latents, channels_last=True)), features, condition)
            result = packing.unpack(np.asarray(engine.numpy(tokens)), h, w, channels_last=True)
            error = relative_float32(result[0], theirs[:, 0].numpy())
            print(f"{backend} {h}x{w}, {length} tokens, sigma {sigma}: {error:.1e} (limit {FLOAT32})")
            assert error <= FLOAT32 and result.std() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_text_encoder(tmp_path: Path, backend: str) -> None:
    model = tiny_text_encoder()
    engine, ours = opened(qwen.QWEN3, model, tmp_path, backend)
    for ids in IDS:
        with torch.inference_mode():
            theirs = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-2]
        error = relative_float32(np.asarray(engine.numpy(ours.encode(ids))), theirs.numpy())
        print(f"{backend} {len(ids)} tokens: {error:.1e} (limit {FLOAT32})")
        assert error <= FLOAT32


def test_manifests_are_those_of_the_reference(tmp_path: Path) -> None:
    for network, model in ((zimage_dit.NETWORK, tiny_dit()), (qwen.QWEN3, tiny_text_encoder())):
        model.save_pretrained(tmp_path / network.name)
        config = read_config(network, tmp_path / network.name)
        stored = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        rename = network.rename or (lambda key: key)
        assert {rename(key): shape for key, shape in stored.items()} == network.manifest(config)
        assert {rename(network.published(key)) for key in network.manifest(config)} == network.manifest(config).keys()
