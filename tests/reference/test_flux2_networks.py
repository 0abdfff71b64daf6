"""Flux.2's transformer and text encoder on both backends against diffusers and transformers, in float32; and
faults in them, which are seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_flux2 import tiny_dit, tiny_text_encoder

from qwenimg import backends
from qwenimg.common.base.errors import ModelError
from qwenimg.common.networks.denoisers import flux2_conditioning, flux2_dit
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.numbers.timesteps import timestep_features
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 1e-6  # relative L2 of a forward; measured at most 3e-7
FAULT = 1e-3  # the least that a fault changes, relative L2; measured at least .03
GUIDANCE = 4.0
TAPS = (9, 18, 27)
TEXT = 3e-6  # relative L2 of 27 layers; measured at most 8e-7
CASES = [
    # rows and columns of the image and of its references; tokens of text; sigma
    ([(5, 3)], 13, 1.0),
    ([(4, 8), (7, 2)], 32, 0.625),
    ([(3, 5), (2, 3), (4, 1)], 1, 0.25),
]


class Compared:
    """A tiny transformer, and the same weights on a backend."""

    def __init__(self, folder: Path, backend: str, **changes: object):
        self.model: Any = tiny_dit(**changes)
        # The reference's own is in float32, whose angles of up to 4000 radians are worth more than the limit.
        self.model.time_guidance_embed.time_proj.forward = exact_sinusoids
        self.model.save_pretrained(folder)
        part = open_component(flux2_dit.NETWORK, folder, read_config(flux2_dit.NETWORK, folder), "transformer")
        self.engine, self.config = backends.load(backend), part.config
        self.ours = self.engine.open(part.network, part.config, part.stored(FP32), FP32)

    def errors(self) -> list[float]:
        return [self.error(*case) for case in CASES]

    def error(self, grids: list[tuple[int, int]], length: int, sigma: float) -> float:
        rng = np.random.default_rng(length)
        tokens = [rng.standard_normal((1, h * w, self.config.in_channels)).astype(np.float32) for h, w in grids]
        text = rng.standard_normal((1, length, self.config.joint_attention_dim)).astype(np.float32)
        guidance = GUIDANCE if self.config.guidance_embeds else None
        features = flux2_conditioning.time_rows(self.config, 1000 * sigma, "float32", guidance)

        image, *references = (self.engine.array(array) for array in tokens)
        condition = self.ours.condition(self.engine.array(text), (grids, references))
        result = np.asarray(self.engine.numpy(self.ours.predict(image, features, condition)))
        with torch.inference_mode():
            theirs = self.model(
                hidden_states=torch.from_numpy(np.concatenate(tokens, axis=1)),
                encoder_hidden_states=torch.from_numpy(text),
                timestep=torch.tensor([sigma]),
                guidance=None if guidance is None else torch.tensor([guidance]),
                img_ids=image_ids(grids),
                txt_ids=torch.cartesian_prod(*map(torch.arange, (1, 1, 1, length))).reshape(-1, 4),
                return_dict=False,
            )[0][:, : tokens[0].shape[1]].numpy()
        assert theirs.std() > 0.1
        return relative_float32(result, theirs)


def exact_sinusoids(times: torch.Tensor) -> torch.Tensor:
    [time] = times.tolist()
    return torch.from_numpy(timestep_features(time, 64)).float()[None]


def image_ids(grids: list[tuple[int, int]]) -> torch.Tensor:
    """As the pipeline of diffusers makes them."""
    from diffusers import Flux2KleinPipeline

    image, *references = (torch.zeros(1, 1, *grid) for grid in grids)
    parts = [Flux2KleinPipeline._prepare_latent_ids(image)[0]]
    if references:
        parts.append(Flux2KleinPipeline._prepare_image_ids(references)[0])
    return torch.cat(parts)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_transformer(tmp_path: Path, backend: str, guided: bool) -> None:
    errors = Compared(tmp_path, backend, guidance_embeds=guided).errors()
    print(f"{backend}, guidance {guided}: {', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT32})")
    assert max(errors) <= FLOAT32


def test_manifest_is_that_of_the_reference(tmp_path: Path) -> None:
    for guided in (False, True):
        model = tiny_dit(guidance_embeds=guided, mlp_ratio=2.5)
        model.save_pretrained(tmp_path)
        config = read_config(flux2_dit.NETWORK, tmp_path)
        assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == flux2_dit.manifest(config)


@pytest.mark.parametrize(
    ("blocks", "heads", "joint", "parameters", "tensors"),
    [
        ((8, 48), 48, 15360, 32223.28, 331),
        ((5, 20), 24, 7680, 3875.54, 169),
        ((8, 24), 32, 12288, 9078.58, 233),
    ],
    ids=["dev", "klein-4b", "klein-9b"],
)
def test_published_sizes(blocks: tuple[int, int], heads: int, joint: int, parameters: float, tensors: int) -> None:
    """Golden numbers: of the reference class on the meta device, in millions."""
    config = flux2_dit.Flux2Config(
        num_layers=blocks[0],
        num_single_layers=blocks[1],
        num_attention_heads=heads,
        joint_attention_dim=joint,
        guidance_embeds=heads == 48,
    )
    manifest = flux2_dit.manifest(config)
    assert (round(sum(map(prod, manifest.values())) / 1e6, 2), len(manifest)) == (parameters, tensors)


# The text encoder


class ComparedText:
    def __init__(self, folder: Path, backend: str):
        self.model: Any = tiny_text_encoder()
        self.model.save_pretrained(folder)
        config = replace(read_config(qwen.QWEN3, folder), taps=TAPS)
        part = open_component(qwen.QWEN3, folder, config, "text_encoder")
        self.names, self.engine = part.plan.entries.keys(), backends.load(backend)
        self.ours = self.engine.open(part.network, part.config, part.stored(FP32), FP32)

    def error(self, tokens: int, pads: int) -> float:
        ids = [*np.random.default_rng(tokens).integers(0, 500, tokens).tolist(), *pads * [3]]
        with torch.inference_mode():
            states = self.model(
                input_ids=torch.tensor([ids]),
                attention_mask=torch.tensor([tokens * [1] + pads * [0]]),
                output_hidden_states=True,
            ).hidden_states
        theirs = torch.cat([states[tap] for tap in TAPS], dim=-1).numpy()
        return relative_float32(np.asarray(self.engine.numpy(self.ours.encode(ids, pads))), theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_text_encoder(tmp_path: Path, backend: str) -> None:
    compared = ComparedText(tmp_path, backend)
    layers = {int(name.split(".")[1]) for name in compared.names if name.startswith("layers.")}
    assert layers == set(range(27)) and "norm.weight" not in compared.names
    for tokens, pads in ((13, 0), (13, 51), (1, 7)):
        error = compared.error(tokens, pads)
        print(f"{backend} {tokens} tokens and {pads} pads: {error:.1e} (limit {TEXT})")
        assert error <= TEXT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_faults_of_pads_are_seen(tmp_path: Path, backend: str) -> None:
    """Pads that see pads before them, and pads that are tokens like others."""
    compared, room = ComparedText(tmp_path, backend), "torch" if backend == "cpu" else backend
    attention = import_module(f"qwenimg.backends.{room}.networks.encoders.decoder").Attention
    ops = import_module(f"qwenimg.backends.{room}.ops")
    for attended in (
        lambda layer, q, k, v, tokens: ops.attention(q, k, v, causal=True),
        lambda layer, q, k, v, tokens: ops.attention(q, k, v),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "attended", attended)
            assert compared.error(13, 51) > FAULT
    assert compared.error(13, 51) <= TEXT


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="num_hidden_layers 27 is too small"):
        qwen.Qwen3Config(num_hidden_layers=27, taps=TAPS)


# Faults


Plant = Callable[[pytest.MonkeyPatch, ModuleType, ModuleType], None]


def halves_of_the_feed_forward_swapped(patch: pytest.MonkeyPatch, network: ModuleType, ops: ModuleType) -> None:
    plain = ops.swiglu
    patch.setattr(ops, "swiglu", lambda gate, values: plain(values, gate))


def feed_forward_before_qkv(patch: pytest.MonkeyPatch, network: ModuleType, ops: ModuleType) -> None:
    plain = network.ParallelAttention.heads

    def later(layer: Any, y: Any, number: int) -> Any:
        return plain(layer, y[..., 2 * layer.hidden :], number)

    patch.setattr(network.ParallelAttention, "heads", later)


def text_counted_as_images(patch: pytest.MonkeyPatch, network: ModuleType, ops: ModuleType) -> None:
    plain = flux2_conditioning.text_positions
    patch.setattr(flux2_conditioning, "text_positions", lambda length: plain(length)[:, ::-1])


def head_scale_and_shift_swapped(patch: pytest.MonkeyPatch, network: ModuleType, ops: ModuleType) -> None:
    _reordered(patch, ops, 2, (1, 0))


def scale_before_shift(patch: pytest.MonkeyPatch, network: ModuleType, ops: ModuleType) -> None:
    _reordered(patch, ops, 6, (1, 0, 2, 4, 3, 5))


def feed_forward_modulated_first(patch: pytest.MonkeyPatch, network: ModuleType, ops: ModuleType) -> None:
    _reordered(patch, ops, 6, (3, 4, 5, 0, 1, 2))


def gate_first_in_single_blocks(patch: pytest.MonkeyPatch, network: ModuleType, ops: ModuleType) -> None:
    _reordered(patch, ops, 3, (1, 2, 0))


def references_in_the_image(patch: pytest.MonkeyPatch, network: ModuleType, ops: ModuleType) -> None:
    patch.setattr(flux2_conditioning, "REFERENCE_STEP", 0)


def _reordered(patch: pytest.MonkeyPatch, ops: ModuleType, count: int, order: tuple[int, ...]) -> None:
    plain = ops.chunks

    def reordered(modulation: Any, pieces: int, index: Any) -> Any:
        parts = plain(modulation, pieces, index)
        return tuple(parts[i] for i in order) if pieces == count else parts

    patch.setattr(ops, "chunks", reordered)


FAULTS: tuple[Plant, ...] = (
    halves_of_the_feed_forward_swapped,
    feed_forward_before_qkv,
    text_counted_as_images,
    head_scale_and_shift_swapped,
    scale_before_shift,
    feed_forward_modulated_first,
    gate_first_in_single_blocks,
    references_in_the_image,
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_faults_are_seen(tmp_path: Path, backend: str) -> None:
    room = f"qwenimg.backends.{'torch' if backend == 'cpu' else backend}"
    compared = Compared(tmp_path, backend)
    network, ops = import_module(f"{room}.networks.denoisers.flux2_dit"), import_module(f"{room}.ops")
    for plant in FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, network, ops)
            worst = max(compared.errors())
        print(f"{backend} {plant.__name__}: {worst:.1e} (at least {FAULT})")
        assert worst > FAULT, plant.__name__
    assert max(compared.errors()) <= FLOAT32
