"""AuraFlow's transformer and text encoder on both backends against diffusers and transformers, in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_auraflow
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_auraflow import DIT, tiny_dit, tiny_text_encoder

from qwenimg import backends
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families.auraflow.checkpoint import NETWORKS
from qwenimg.common.networks.denoisers import aura_conditioning, aura_dit
from qwenimg.common.networks.denoisers.aura_dit import AuraConfig
from qwenimg.common.networks.encoders import t5
from qwenimg.common.networks.network import Network
from qwenimg.common.numbers.timesteps import sinusoids
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-5  # relative L2 of a forward
SHAPES = [((10, 6), 13), ((8, 16), 1), ((28, 22), 40)]  # latents; tokens of text
IDS = [[2], list(range(3, 20)), [*range(500, 300, -1), 2]]


def opened(network: Network, model: Any, folder: Path, backend: str) -> tuple[Any, Any]:
    """The engine, and `model` as the component that it opens."""
    model.save_pretrained(folder)
    part = open_component(network, folder, read_config(network, folder), "it")
    engine = backends.load(backend)
    return engine, engine.open(part.network, part.config, part.stored(FP32), FP32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer(tmp_path: Path, backend: str) -> None:
    """Also with rows of zeros behind the text, as pads are."""
    model = tiny_dit()
    oracle_auraflow.exact(model)
    engine, ours = opened(aura_dit.NETWORK, model, tmp_path, backend)
    rng, levels = np.random.default_rng(0), (1.0, 0.625, 0.25)
    modulation = ours.modulate(aura_conditioning.time_rows([1000 * level for level in levels]))
    for (h, w), length in SHAPES:
        latents = rng.standard_normal((1, 4, h, w)).astype(np.float32)
        text = rng.standard_normal((1, length + 5, 60)).astype(np.float32)
        text[:, length:] = 0
        condition = ours.condition(engine.array(text), (h // 2, w // 2))
        for row, level in enumerate(levels):
            with torch.inference_mode():
                given = torch.from_numpy(latents), torch.from_numpy(text), torch.tensor([level])
                theirs = model(*given, return_dict=False)[0]
            made = ours.predict(engine.array(latents), (modulation, row), condition)
            error = relative_float32(np.asarray(engine.numpy(made)), theirs.numpy())
            print(f"{backend} {h}x{w}, {length} tokens, level {level}: {error:.1e} (limit {FLOAT32})")
            assert error <= FLOAT32 and theirs.std() > 0.1


def test_times_are_those_of_the_pipeline() -> None:
    """It divides a timestep by 1000 in float32, and the class multiplies again: an ulp of a time moves a gradient of a
    LoRA by 3e-5."""
    times = torch.linspace(0, 1, 1001) * 1000
    exact = [sinusoids(1000 * float(torch.tensor([time / 1000])), aura_dit.TIME_CHANNELS) for time in times]
    ours = aura_conditioning.time_rows([float(time) for time in times])
    unrounded = np.stack([sinusoids(float(time), aura_dit.TIME_CHANNELS) for time in times])
    print(f"{np.abs(ours - exact).max():.1e}; without the rounding {np.abs(unrounded - exact).max():.1e}")
    assert np.abs(ours - exact).max() < 1e-9 < 1e-5 < np.abs(unrounded - exact).max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_text_encoder(tmp_path: Path, backend: str) -> None:
    """States of UMT5 with its tables in every block, beside pads that nothing sees there."""
    model = tiny_text_encoder()
    engine, ours = opened(NETWORKS["text_encoder"], model, tmp_path, backend)
    for ids in IDS:
        mask = torch.tensor([[1] * len(ids) + [0] * 7])
        with torch.inference_mode():
            theirs = model(input_ids=torch.tensor([ids + [1] * 7]), attention_mask=mask)[0][:, : len(ids)]
        error = relative_float32(np.asarray(engine.numpy(ours.encode(ids))), theirs.numpy())
        print(f"{backend} {len(ids)} tokens: {error:.1e} (limit {FLOAT32})")
        assert error <= FLOAT32


def test_manifests_are_those_of_the_reference(tmp_path: Path) -> None:
    for network, model in ((aura_dit.NETWORK, tiny_dit()), (t5.UMT5, tiny_text_encoder())):
        model.save_pretrained(tmp_path / network.name)
        config = read_config(network, tmp_path / network.name)
        stored = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        stored.pop("encoder.embed_tokens.weight", None)  # a copy
        assert {network.rename(key): shape for key, shape in stored.items()} == network.manifest(config)
        assert {network.published(key) for key in network.manifest(config)} == stored.keys()


def test_windows_of_the_table() -> None:
    """Middles of odd sides too, in tables of even and of odd sides."""
    for side in (14, 15):
        model = tiny_dit(pos_embed_max_size=side**2)
        config = AuraConfig(**(DIT | {"pos_embed_max_size": side**2}))
        for rows, columns in ((1, 1), (2, 3), (side, side), (side - 1, 4), (5, side)):
            theirs = model.pos_embed.pe_selection_index_based_on_dim(2 * rows, 2 * columns)
            assert aura_conditioning.window(config, rows, columns)[0].tolist() == theirs.tolist()
    with pytest.raises(UsageError, match=r"15 x 16 tokens .* 15 a side \(240 px\)"):
        aura_conditioning.window(config, 15, 16)


@pytest.mark.parametrize("change", [{"pos_embed_max_size": 195}, {"caption_projection_dim": 41}, {"patch_size": 1}])
def test_configurations_that_are_refused(change: dict[str, Any]) -> None:
    config = AuraConfig()
    assert (config.hidden, config.dim, config.side) == (8192, 3072, 96)
    with pytest.raises(ModelError, match=next(iter(change))):
        replace(config, **change)


def test_a_configuration_of_umt5(tmp_path: Path) -> None:
    """What a saved one leaves out is transformers' default; and T5's is refused."""
    import transformers

    transformers.UMT5Config().save_pretrained(tmp_path)
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "config.json").write_text(json.dumps({"model_type": "umt5"}))
    assert read_config(t5.UMT5, tmp_path / "short") == read_config(t5.UMT5, tmp_path)
    assert not read_config(t5.UMT5, tmp_path).shares_bias
    with pytest.raises(ModelError, match="'t5' is not supported; expected 'umt5'"):
        t5.UMT5.fields({"model_type": "t5"})
