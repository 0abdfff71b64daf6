"""Stable Cascade's UNets and VAE on both backends against diffusers, in float32, and its encoder of pictures against
its description in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import oracle_cascade, oracle_effnet
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_cascade import DECODER, PRIOR, tiny_decoder, tiny_prior, tiny_vqgan

from qwenimg import backends
from qwenimg.common.networks.denoisers import cascade_conditioning, cascade_unet
from qwenimg.common.networks.denoisers.cascade_unet import CascadeConfig
from qwenimg.common.networks.vaes import effnet, paella_vae
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.parts.open_file import open_part

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-5  # relative L2 of a forward
SHAPES = [((4, 6), 77), ((1, 9), 3), ((5, 3), 154)]  # of the embedding; tokens of text
LATENTS = [((42, 64), (4, 6)), ((10, 96), (1, 9)), ((30, 22), (3, 2))]  # of the decoder, whose levels have odd sides


def opened(model: Any, folder: Path, backend: str, network: Any = cascade_unet.NETWORK) -> tuple[Any, Any]:
    model.save_pretrained(folder)
    part = open_component(network, folder, read_config(network, folder), "it")
    engine = backends.load(backend)
    return engine.open(part.network, part.config, part.stored(FP32), FP32), engine


def compare(title: str, model: Any, ours: Any, engine: Any, latents: np.ndarray, condition: Any, **given: Any) -> None:
    """Compare predictions at three times with those of diffusers' model, which is `given` more."""
    for time in (1.0, 0.613, 0.007):
        with torch.inference_mode():
            theirs = model(torch.from_numpy(latents), timestep_ratio=torch.tensor([time]), **given, return_dict=False)[
                0
            ]
        row = cascade_conditioning.time_row(ours.config, time)
        made = ours.predict(engine.array(latents), row, condition)
        error = relative_float32(np.asarray(engine.numpy(made)), theirs.numpy())
        print(f"{title}, time {time}: {error:.1e} (limit {FLOAT32})")
        assert error <= FLOAT32 and theirs.std() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_prior(tmp_path: Path, backend: str) -> None:
    model, rng = tiny_prior(), np.random.default_rng(0)
    ours, engine = opened(model, tmp_path, backend)
    oracle_cascade.exact(model, 1000)
    for (h, w), length in SHAPES:
        latents, text, pooled = (
            rng.standard_normal(shape).astype(np.float32) for shape in ((1, 16, h, w), (1, length, 80), (1, 52))
        )
        condition = ours.condition(engine.array(pooled), engine.array(text))
        compare(
            f"{backend} prior {h}x{w}, {length} tokens", model, ours, engine, latents, condition,
            clip_text_pooled=torch.from_numpy(pooled)[:, None], clip_text=torch.from_numpy(text),
            clip_img=torch.zeros(1, 1, 24),
        )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", [{}, {"pixel_mapper_in_channels": None, "timestep_conditioning_type": ()}])
def test_decoder(tmp_path: Path, backend: str, change: dict[str, Any]) -> None:
    model, rng = tiny_decoder(**change), np.random.default_rng(0)
    ours, engine = opened(model, tmp_path, backend)
    oracle_cascade.exact(model, 1000)
    for (h, w), (below, beside) in LATENTS:
        latents, pooled, embedding = (
            rng.standard_normal(shape).astype(np.float32) for shape in ((1, 4, h, w), (1, 52), (1, 16, below, beside))
        )
        condition = ours.condition(engine.array(pooled), None, engine.array(embedding), (h // 2, w // 2))
        compare(
            f"{backend} decoder {h}x{w}", model, ours, engine, latents, condition,
            clip_text_pooled=torch.from_numpy(pooled)[:, None], effnet=torch.from_numpy(embedding),
        )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_vae(tmp_path: Path, backend: str) -> None:
    """As a whole, and in bands of rows, which see the same neighbours."""
    model, rng = tiny_vqgan(), np.random.default_rng(0)
    ours, _ = opened(model, tmp_path, backend, paella_vae.NETWORK)
    for h, w in ((5, 7), (16, 3), (40, 24)):
        latents = rng.standard_normal((1, 4, h, w)).astype(np.float32)
        with torch.inference_mode():
            theirs = 2 * model.decode(torch.from_numpy(latents)).sample.numpy() - 1
        for rows in (None, 16, 8):
            error = relative_float32(ours.decode(latents, rows), theirs)
            print(f"{backend} VAE {h}x{w} in bands of {rows}: {error:.1e} (limit {FLOAT32})")
            assert error <= FLOAT32 and theirs.std() > 0.1


NORMED = np.array(effnet.MEAN, np.float32)[:, None, None], np.array(effnet.STD, np.float32)[:, None, None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", ["tiny", "published"])
def test_encoder(tmp_path: Path, backend: str, size: str) -> None:
    """Of a tiny one and of the published sizes, from its authors' file and from ComfyUI's; the configuration is that
    of the shapes."""
    config = effnet.EffnetConfig(**oracle_effnet.TINY) if size == "tiny" else effnet.EffnetConfig()
    tensors = oracle_effnet.tiny_effnet(shapes=effnet.manifest(config))
    comfy = {f"vae.encoder.{name}": one for name, one in tensors.items()} | {"vae.encoder.mean": torch.ones(3)}
    rng, engine = np.random.default_rng(1), backends.load(backend)
    for i, file in enumerate((tensors, comfy)):
        save_file(file, tmp_path / f"{i}.safetensors")
        part = open_part(effnet.LAYOUTS, tmp_path / f"{i}.safetensors", effnet.EffnetConfig(), "effnet")
        assert part.config == config
        ours = engine.open(part.network, part.config, part.stored(FP32), FP32)
        for h, w in ((1, 2), (3, 2)) if i == 0 else ((1, 1),):
            pixels = rng.random((1, 3, 32 * h, 32 * w), np.float32)
            theirs = oracle_effnet.encoded(tensors, pixels)
            made = ours.encode((pixels - NORMED[0]) / NORMED[1])
            error = relative_float32(made, theirs)
            print(f"{backend} encoder, {size}, {h}x{w}: {error:.1e} (limit {FLOAT32})")
            assert error <= FLOAT32 and made.shape == (1, 16, h, w) and theirs.std() > 0.1


@pytest.mark.parametrize("kind", ["prior", "decoder", "vae"])
def test_manifests_are_those_of_the_reference(tmp_path: Path, kind: str) -> None:
    model = {"prior": tiny_prior, "decoder": tiny_decoder, "vae": tiny_vqgan}[kind]()
    model.save_pretrained(tmp_path)
    network = paella_vae.NETWORK if kind == "vae" else cascade_unet.NETWORK
    config = read_config(network, tmp_path)
    stored = {key: tuple(value.shape) for key, value in model.state_dict().items() if "num_batches" not in key}
    assert {network.rename(key): shape for key, shape in stored.items()} == network.manifest(config)
    assert {network.published(key) for key in network.manifest(config)} == stored.keys()
    written = network.written(config)
    (tmp_path / "again").mkdir()
    import json

    (tmp_path / "again" / "config.json").write_text(json.dumps(written))
    assert read_config(network, tmp_path / "again") == config


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"switch_level": [True]}, "switch_level"),
        ({"self_attn": [True, False]}, "self_attn"),
        ({"block_types_per_layer": [["SDCascadeAttnBlock"]] * 2}, "block_types"),
        ({"up_num_layers_per_block": [1]}, "up_num_layers"),
        ({"num_attention_heads": [5, 5]}, "num_attention_heads"),
        ({"clip_image_in_channels": None}, "clip_image"),
        ({"kernel_size": 4}, "kernel_size"),
    ],
)
def test_configurations_that_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CascadeConfig(**cascade_unet.fields({**PRIOR, **change}))


def test_other_counts() -> None:
    config = CascadeConfig(**cascade_unet.fields({k: v for k, v in DECODER.items() if k != "dropout"}))
    assert not config.is_prior and config.text_tokens(77) == 2 and replace(config).times == 2
