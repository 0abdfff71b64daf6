"""Times one forward of a denoiser at full width against diffusers, in one run, with the correctness beside the time.

    python tools/bench_step.py                                    # Qwen-Image: two layers, 256+40 and 1024+64 tokens
    python tools/bench_step.py --backend mlx                      # and MLX
    python tools/bench_step.py --device cuda --layers 60 --size 1024 --cfg --dtypes bf16
    python tools/bench_step.py flux z-image                       # a few layers, 256 + 40 tokens
    python tools/bench_step.py flux --device cuda --tokens 4096+512 --dtypes bf16
    python tools/bench_step.py sdxl --device cuda --tokens 16384+77 --dtypes bf16 fp16
    python tools/bench_step.py sd15 --peer openvino --threads 1   # OpenVINO on a CPU: our network as it compiles it
    python tools/bench_step.py sd15-controlnet --threads 1        # the UNet and a ControlNet, 32 x 32 latents

A step here is one forward of the whole model: for one branch, with `--cfg` for two in one batch, as Stable Diffusion's
always is. What depends on no step (keys, values or states of the text, RoPE tables, the modulation of a schedule) is
made beforehand, once per run, as the product does; diffusers makes it in every step, the embedding of a ControlNet's
picture too. Qwen-Image has `ours, all inside`
too, which makes it in every step as well. `bench.py` says how arms are timed and judged.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench
import numpy as np
import torch
from against import openvino_arm as openvino
from bench import Arm
from random_model import write

import qwenimg.backends
from qwenimg.common.base.config import parse
from qwenimg.common.families import registry
from qwenimg.common.families.stable_diffusion import control
from qwenimg.common.networks.denoisers import (
    anima_conditioning,
    anima_dit,
    aura_conditioning,
    aura_dit,
    chroma_conditioning,
    chroma_dit,
    ernie_conditioning,
    ernie_dit,
    flux2_conditioning,
    flux2_dit,
    flux3_conditioning,
    flux3_dit,
    flux_conditioning,
    flux_dit,
    hunyuan_conditioning,
    hunyuan_dit,
    krea2_conditioning,
    krea2_dit,
    longcat_dit,
    lumina_conditioning,
    lumina_dit,
    ovis_dit,
    pixart_conditioning,
    pixart_dit,
    qwen21_conditioning,
    qwen21_dit,
    qwen_conditioning,
    qwen_dit,
    sana_conditioning,
    sana_dit,
    sd3_conditioning,
    sd3_dit,
    unet,
    unet_controlnet,
    zimage_conditioning,
    zimage_dit,
)
from qwenimg.common.networks.denoisers.anima_dit import AnimaConfig
from qwenimg.common.networks.denoisers.aura_dit import AuraConfig
from qwenimg.common.networks.denoisers.chroma_dit import ChromaConfig
from qwenimg.common.networks.denoisers.flux3_dit import Flux3Config
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.denoisers.hunyuan_dit import HunyuanConfig
from qwenimg.common.networks.denoisers.longcat_dit import LongCatConfig
from qwenimg.common.networks.denoisers.lumina_dit import LuminaConfig
from qwenimg.common.networks.denoisers.ovis_dit import OvisConfig
from qwenimg.common.networks.denoisers.pixart_dit import PixArtConfig
from qwenimg.common.networks.denoisers.qwen21_dit import Qwen21Config
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.denoisers.sana_dit import QK_NORM, SanaConfig
from qwenimg.common.networks.denoisers.sd3_dit import SD3Config
from qwenimg.common.networks.network import Network
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.timesteps import timestep_features
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import DenoiserKind, bases
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import LoadPlan

QWEN21_WORDS = 5  # in front of the picture
SIGMA, GUIDANCE = 0.25, 3.5  # times that bfloat16 holds, so that no arm rounds them
SD_TIME = 437.0  # a whole number, as Stable Diffusion's times are
LARGEST_FP64 = 4  # layers of Qwen-Image; a reference for more is float32
Step = Callable[[], Any]
Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]  # latents [1 C h w], text [B S C] and pooled text [B P]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A network, and diffusers' class for it."""

    network: Network
    config: Any
    oracle: str
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the oracle, where they are not the configuration's


@dataclass(frozen=True, kw_only=True)
class Case(Part):
    """A model with few layers. `theirs` makes a step of a model, latents, text and pooled text, `ours` the same as a
    function of the latents, these latents, and a function that makes its result numpy; with a `control` they get its
    network after the model."""

    family: str
    control: Part | None = None
    embedding: str  # the module of the oracle that makes sinusoids
    text: int  # channels
    pooled: int = 1
    theirs: Callable[..., Step]
    ours: Callable[..., tuple[Callable[[Any], Any], Any, Callable[[Any], np.ndarray]]]
    inside: Callable[..., Step] | None = None  # as `ours`: a step that makes all anew
    patch: int = 2  # latents of a side of a token
    latents: int = 16  # channels of latents that are in patches
    tokens: tuple[str, ...] = ("256+40",)
    dtypes: tuple[str, ...] = ("fp32",)
    branches: int = 1

    @property
    def channels(self) -> int:
        """Of the latents."""
        return self.config.in_channels if self.patch == 1 else self.latents

    @property
    def parts(self) -> list[Part]:
        return [self, *([self.control] if self.control else [])]

    @property
    def kind(self) -> DenoiserKind:
        return next(family.precision for family in registry.FAMILIES if family.name == self.family)


# FLUX.1


def _flux_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    ids = _ids(latents, text)
    kind = {"device": latents.device, "dtype": latents.dtype}
    more = {"guidance": torch.full((1,), GUIDANCE, **kind), "pooled_projections": pooled}
    return lambda: model(_tokens(latents), text, timestep=torch.full((1,), SIGMA, **kind), **ids, **more)[0]


def _unpooled_theirs(
    model: Any, latents: Any, text: Any, pooled: Any, counts_text: bool, behind_text: bool = True
) -> Step:
    """A step of Chroma, or of a model whose text counts: Ovis-Image, or LongCat-Image with the image behind it."""
    ids, time = _ids(latents, text), _time(SIGMA, text)
    if counts_text:
        ids["txt_ids"][:, 1:] = torch.arange(text.shape[1])[:, None]
        ids["img_ids"] = ids["img_ids"] + torch.tensor([1, text.shape[1], text.shape[1]]) * behind_text
    return lambda: model(_tokens(latents), text, timestep=time, **ids)[0]


def _flux_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    h, w = latents.shape[2:]
    if isinstance(component.config, ChromaConfig):
        modulation = component.modulate(chroma_conditioning.features(component.config, [1000 * SIGMA], "float32"))
    else:
        features = (
            flux_conditioning.time_rows([1000 * SIGMA], "float32"),
            flux_conditioning.guidance_row(GUIDANCE, "float32"),
        )
        modulation = component.modulate(*features, [engine.array(pooled) if pooled.shape[1] > 1 else None])
    condition, x = component.condition(engine.array(text), [(h // 2, w // 2)]), engine.array(packing.pack(latents))
    return lambda x: component.predict(x, (modulation, 0), condition), x, lambda y: engine.numpy(y)


# FLUX.2 and FLUX.3


def _flux2_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    ids = _ids(latents, text, axes=4)
    tokens, time = latents.flatten(2).transpose(1, 2), _time(SIGMA, text)
    guidance = text.new_full((1,), GUIDANCE) if model.config.guidance_embeds else None
    return lambda: model(tokens, text, timestep=time, **ids, guidance=guidance)[0]


def _flux2_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    if isinstance(component.config, Flux3Config):
        features = flux3_conditioning.time_rows(component.config, 1000 * SIGMA, "float32", 0.0)
    else:
        guidance = (GUIDANCE,) if component.config.guidance_embeds else ()
        features = flux2_conditioning.time_rows(component.config, 1000 * SIGMA, "float32", *guidance)
    condition = component.condition(engine.array(text), ([latents.shape[2:]], []))
    x = engine.array(packing.tokens(latents))
    return lambda x: component.predict(x, features, condition), x, lambda y: engine.numpy(y)


def _flux3_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    """A step of the base, from which diffusers takes out references that are not there."""
    ids = _ids(latents, text, axes=4)
    ids["img_ids"] = 0.5 * ids["img_ids"]
    tokens, time = latents.flatten(2).transpose(1, 2), _time(SIGMA, text)
    return lambda: model(tokens, text, timestep=time, **ids)[0]


# Stable Diffusion 3


def _sd3_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    time = _time(1000 * SIGMA, text)
    return lambda: model(latents, text, pooled, time, return_dict=False)[0]


def _sd3_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    h, w = latents.shape[2:]
    modulation = component.modulate(sd3_conditioning.time_rows([1000 * SIGMA]), [pooled])
    condition, x = component.condition(text, (h // 2, w // 2)), engine.array(latents)
    return lambda x: component.predict(x, (modulation, 0), condition), x, lambda y: engine.numpy(y)


# Z-Image


def _zimage_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    time = _time(1 - SIGMA, text)
    return lambda: model([latents[0][:, None]], time, [text[0]])[0][0][:, 0]


def _zimage_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    h, w = latents.shape[2:]
    condition = component.condition(engine.array(text), (h // 2, w // 2))
    features = zimage_conditioning.time_row(1000 * SIGMA, "float32")
    x = engine.array(packing.pack(latents, channels_last=True))
    return (
        lambda x: component.predict(x, features, condition),
        x,
        lambda y: packing.unpack(engine.numpy(y), h, w, channels_last=True)[0],
    )


# AuraFlow


def _aura_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    return lambda: model(latents, text, _time(SIGMA, text), return_dict=False)[0][0]


def _aura_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    modulation = component.modulate(aura_conditioning.time_rows([1000 * SIGMA]))
    condition = component.condition(engine.array(text), (latents.shape[2] // 2, latents.shape[3] // 2))
    x = engine.array(latents)
    return lambda x: component.predict(x, (modulation, 0), condition), x, lambda y: engine.numpy(y)[0]


# Lumina-Image 2.0


def _lumina_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    mask = torch.ones(text.shape[:2], dtype=torch.int64, device=text.device)
    return lambda: model(latents, _time(1 - SIGMA, text), text, mask, return_dict=False)[0][0]


def _lumina_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    condition = component.condition(engine.array(text), (latents.shape[2] // 2, latents.shape[3] // 2))
    features, x = lumina_conditioning.time_row(1000 * SIGMA), engine.array(latents)
    return lambda x: component.predict(x, features, condition), x, lambda y: engine.numpy(y)[0]


# PixArt


def _pixart_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    time = _time(1000 * SIGMA, text)
    return lambda: model(latents, text, time, return_dict=False)[0][0, : model.config.in_channels]


def _pixart_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    condition = component.condition(engine.array(text), (latents.shape[2] // 2, latents.shape[3] // 2))
    features, x = pixart_conditioning.time_row(1000 * SIGMA), engine.array(latents)
    return lambda x: component.predict(x, features, condition), x, lambda y: engine.numpy(y)[0]


# Hunyuan-DiT


def _hunyuan_texts(config: Any, text: Any) -> tuple[Any, Any]:
    """Return BERT's states [1 77 C] of as many words as the text has, a part of its channels, and T5's [1 256 C'], both
    with zeros behind the words."""
    padded = text.new_zeros(1, max(config.text_len, config.text_len_t5), text.shape[2])
    padded[:, : text.shape[1]] = text
    return padded[:, : config.text_len, : config.cross_attention_dim], padded[:, : config.text_len_t5]


def _hunyuan_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    """A step whose rotations are made beforehand, as its pipeline does."""
    states, words = _hunyuan_texts(model.config, text), text.shape[1]
    masks = [(torch.arange(one.shape[1], device=text.device) < words)[None] for one in states]
    tables = hunyuan_conditioning.rope(HunyuanConfig(), (latents.shape[2] // 2, latents.shape[3] // 2))
    rope = [torch.from_numpy(table.repeat(2, axis=1)).to(text) for table in tables]
    given = {"encoder_hidden_states": states[0], "encoder_hidden_states_t5": states[1], "image_rotary_emb": rope}
    more = given | {"text_embedding_mask": masks[0], "text_embedding_mask_t5": masks[1], "return_dict": False}
    return lambda: model(latents, _time(1000 * SIGMA, text), **more)[0][0, : model.config.in_channels]


def _hunyuan_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    words = text.shape[1]
    bert, t5 = (one.numpy() for one in _hunyuan_texts(component.config, torch.from_numpy(text)))
    grid = latents.shape[2] // 2, latents.shape[3] // 2
    condition = component.condition(engine.array(bert[:, :words]), engine.array(t5), words, grid)
    features, x = hunyuan_conditioning.time_row(1000 * SIGMA), engine.array(latents)
    return lambda x: component.predict(x, features, condition), x, lambda y: engine.numpy(y)[0]


# SANA


def _sana_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    return lambda: model(latents, text, _time(1000 * SIGMA, text), return_dict=False)[0][0]


def _sana_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    condition = component.condition(engine.array(text), latents.shape[2:])
    features, x = sana_conditioning.time_rows(component.config, 1000 * SIGMA, GUIDANCE), engine.array(latents)
    return lambda x: component.predict(x, features, condition), x, lambda y: engine.numpy(y)[0]


# Models whose text is made for the step by the condition, and whose latents are packed: Anima, ERNIE-Image, Krea 2


def _anima_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    """A step without torchvision, which resizes a mask of zeros there."""
    from diffusers.models.transformers import transformer_cosmos

    transformer_cosmos.transforms = SimpleNamespace(  # type: ignore[attr-defined]
        functional=SimpleNamespace(resize=lambda mask, size, interpolation: mask),
        InterpolationMode=SimpleNamespace(NEAREST=None),
    )
    mask, time = latents.new_zeros(1, 1, *latents.shape[2:]), _time(SIGMA, text)
    return lambda: _tokens(model(latents[:, :, None], time, text, padding_mask=mask, return_dict=False)[0][:, :, 0])


def _ernie_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    more = {"timestep": _time(1000 * SIGMA, text), "text_bth": text, "text_lens": torch.tensor([text.shape[1]])}
    return lambda: model(latents, **more, return_dict=False)[0].flatten(2).transpose(1, 2)


def _krea2_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    """A step for text states of which each token has those of all layers."""
    states = text.unflatten(2, (model.config.num_text_layers, -1))
    positions = krea2_conditioning.positions((latents.shape[2] // 2, latents.shape[3] // 2), text.shape[1])
    more = {"timestep": _time(SIGMA, text), "position_ids": torch.from_numpy(positions)}
    return lambda: model(_tokens(latents), states, **more, return_dict=False)[0]


def _one_stream_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    h, w = latents.shape[2:]
    if isinstance(component.config, ernie_dit.ErnieConfig):
        features, grid, x = ernie_conditioning.time_row(component.config, 1000 * SIGMA), (h, w), packing.tokens(latents)
    else:
        conditioning = krea2_conditioning if isinstance(component.config, krea2_dit.Krea2Config) else anima_conditioning
        features = conditioning.time_row(component.config, 1000 * SIGMA, "float32")
        grid, x = (h // 2, w // 2), packing.pack(latents)
    condition, tokens = component.condition(engine.array(text), grid), engine.array(x)
    return lambda x: component.predict(x, features, condition), tokens, lambda y: engine.numpy(y)


# Qwen-Image-2.1, which sees a picture like the latents behind the first words


def _qwen21_parts(latents: Any, text: Any) -> tuple[Any, Any, Any]:
    """Return tokens [1 L C], the text's states with those of slots among them, and which of them are slots."""
    count, words = latents.shape[2] * latents.shape[3] // 4, QWEN21_WORDS
    slots = torch.zeros(1, count, text.shape[2], device=text.device, dtype=text.dtype)
    states = torch.cat((text[:, :words], slots, text[:, words:]), dim=1)
    mask = torch.zeros(1, states.shape[1], dtype=torch.bool, device=text.device)
    mask[:, words : words + count] = True
    return latents.flatten(2).transpose(1, 2), states, mask


def _qwen21_theirs(model: Any, latents: Any, text: Any, pooled: Any, kept: bool = False) -> Step:
    """A step as it is without keys and values that are `kept`, or with them."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    tokens, states, mask = _qwen21_parts(latents, text)
    shape, count = (1, *latents.shape[2:]), tokens.shape[1]
    every = torch.cat((mask, torch.ones_like(mask[:, :1]).expand(1, count // 4)), dim=1)
    time = _time(SIGMA, text)
    more = {"img_shapes": [[shape, shape]], "img_mask": every, "return_dict": False}
    cache = QwenImage21KVCache(len(model.transformer_blocks)) if kept else None

    def step(mode: str | None) -> Any:
        given = torch.cat((tokens, tokens), dim=1), states, time
        return model(*given, **more, kv_cache=cache, kv_cache_mode=mode)[0][:, -count:]

    if kept:
        with torch.inference_mode():
            step("extract")
    return lambda: step("cached" if kept else None)


def _qwen21_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    tokens, states, _ = _qwen21_parts(torch.from_numpy(latents), torch.from_numpy(text))
    (h, w), x = latents.shape[2:], engine.array(tokens.contiguous().numpy())
    places = [(QWEN21_WORDS, h // 2, w // 2)]
    condition = component.condition(engine.array(states.numpy()), ((h, w), places, [x]))
    features = qwen21_conditioning.time_row(1000 * SIGMA, "float32")
    return lambda x: component.predict(x, features, condition), x, lambda y: engine.numpy(y)


# Qwen-Image, which sees as many pictures like the latents as it is told


def _qwen_theirs(model: Any, latents: Any, text: Any, pooled: Any, pictures: int = 0) -> Step:
    branches, tokens = len(text), _tokens(latents)
    shape, time = (1, latents.shape[2] // 2, latents.shape[3] // 2), _time(SIGMA, text)
    x, seen = torch.cat([tokens] * (1 + pictures), dim=1).expand(branches, -1, -1), [[shape] * (1 + pictures)]
    more = {"encoder_hidden_states_mask": None, "return_dict": False}
    return lambda: model(x, text, timestep=time, img_shapes=seen * branches, **more)[0][:, : tokens.shape[1]]


def _qwen_given(engine: Any, latents: np.ndarray, text: np.ndarray, pictures: int) -> Any:
    """Return tokens, and texts, shapes and pictures of the condition."""
    shape, tokens = (1, latents.shape[2] // 2, latents.shape[3] // 2), engine.array(packing.pack(latents))
    return tokens, ([engine.array(one[None]) for one in text], [shape] * (1 + pictures), [tokens] * pictures)


def _qwen_ours(
    component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray, pictures: int = 0
) -> Any:
    tokens, given = _qwen_given(engine, latents, text, pictures)
    modulation = component.modulate(qwen_conditioning.time_rows(component.config, [1000 * SIGMA], "float32"))
    condition = component.condition(*given)
    return lambda x: component.predict(x, (modulation, 0), condition), tokens, lambda y: engine.numpy(y)


def _qwen_inside(
    component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray, pictures: int = 0
) -> Step:
    """A step that makes all; the weights of the modulation, freed when it was made, are loaded again."""
    device = [] if engine.name == "mlx" else [component.device]
    sys.modules[type(component).__module__].load.fill(component.model, component.plan.when(ONCE), *device)  # type: ignore[attr-defined]
    rows = engine.array(qwen_conditioning.time_rows(component.config, [1000 * SIGMA], "float32"))
    tokens, given = _qwen_given(engine, latents, text, pictures)
    model, grad = component.model, torch.inference_mode if engine.name != "mlx" else nullcontext

    def step() -> Any:
        with grad():
            temb = model.time_text_embed(rows, None)
            blocks = [block.modulation(temb) for block in model.transformer_blocks]
            modulation = _modulation(component)(blocks, model.norm_out.modulation(temb))
            return component.predict(tokens, (modulation, 0), component.condition(*given))

    return step


def _modulation(component: Any) -> Any:
    return sys.modules[type(component).__module__].Modulation  # type: ignore[attr-defined]


# Stable Diffusion's UNet; of XL with the addition of pooled text and sizes

UNETS: dict[str, dict[str, Any]] = {
    "sd15": {"cross_attention_dim": 768},
    "sdxl": {
        "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "attention_head_dim": [5, 10, 20],
        "transformer_layers_per_block": [1, 2, 10],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}


def _sinusoids_of(times: np.ndarray, channels: int) -> np.ndarray:
    """[T] -> [T channels] in float64: cosines, then sines."""
    frequencies = np.exp(-np.log(10000.0) * np.arange(channels // 2) / (channels // 2))
    angles = times.astype(np.float64)[:, None] * frequencies
    return np.concatenate((np.cos(angles), np.sin(angles)), axis=1)


def _sizes(latents: Any) -> np.ndarray:
    height, width = (8.0 * side for side in latents.shape[2:])
    return np.array([[height, width, 0, 0, height, width]] * 2, np.float32)


def _unet_theirs(model: Any, latents: Any, text: Any, pooled: Any) -> Step:
    x, time = latents.expand(2, -1, -1, -1), torch.tensor([SD_TIME] * 2, device=latents.device)
    sizes = torch.from_numpy(_sizes(latents)).to(text.device, text.dtype)
    added = {"added_cond_kwargs": {"text_embeds": pooled, "time_ids": sizes}} if pooled.shape[1] > 1 else {}
    return lambda: model(x, time, text, return_dict=False, **added)[0]


def _unet_ours(component: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray) -> Any:
    addition, config = None, component.config
    if config.addition_time_embed_dim:
        rows = _sinusoids_of(_sizes(latents).reshape(-1), config.addition_time_embed_dim).reshape(2, -1)
        addition = np.concatenate((pooled, rows), axis=1)
    features = _sinusoids_of(np.array([SD_TIME]), config.time_channels)
    condition, x = component.condition(text, addition), engine.array(latents)
    return lambda x: component.predict(x, features, condition), x, lambda y: engine.numpy(y)


def _picture(latents: Any) -> np.ndarray:
    """Return the control picture of an image of these latents [1 3 H W], in 0..1."""
    height, width = (8 * side for side in latents.shape[2:])
    return bench.exact(np.random.default_rng(3).random((1, 3, height, width), np.float32))


def _controlled_theirs(model: Any, net: Any, latents: Any, text: Any, pooled: Any) -> Step:
    x, time = latents.expand(2, -1, -1, -1), torch.tensor([SD_TIME] * 2, device=latents.device)
    picture = torch.from_numpy(_picture(latents)).to(latents.device, latents.dtype).expand(2, -1, -1, -1)

    def step() -> Any:
        down, mid = net(x, time, text, picture, conditioning_scale=1.0, return_dict=False)
        residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        return model(x, time, text, return_dict=False, **residuals)[0]

    return step


def _controlled_ours(
    component: Any, net: Any, engine: Any, latents: np.ndarray, text: np.ndarray, pooled: np.ndarray
) -> Any:
    features = _sinusoids_of(np.array([SD_TIME]), component.config.time_channels)
    condition, x = component.condition(text, None), engine.array(latents)
    of_net = net.condition(text, (None, len(text)), engine.array(_picture(latents)))
    scales = [1.0] * (len(net.config.skips) + 1)

    def step(x: Any) -> Any:
        return component.predict(x, features, condition, [net.predict(x, features, of_net, scales)])

    return step, x, lambda y: engine.numpy(y)


# What peers of several models take


def _time(value: float, text: Any) -> Any:
    return torch.full((len(text),), value, device=text.device, dtype=text.dtype)


def _tokens(latents: Any) -> Any:
    """[1 C h w] -> [1 L 4C], as FLUX.1 packs them."""
    c, h, w = latents.shape[1:]
    return latents.reshape(1, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, h * w // 4, 4 * c)


def _ids(latents: Any, text: Any, axes: int = 3) -> dict[str, Any]:
    """The positions that a pipeline of diffusers gives: of 2 x 2 latents for FLUX.1, of each for FLUX.2."""
    step, S = (2, text.shape[1]) if axes == 3 else (1, text.shape[1])
    h, w = (side // step for side in latents.shape[2:])
    image, words = torch.zeros(h, w, axes), torch.zeros(S, axes)
    image[..., 1], image[..., 2] = torch.arange(h)[:, None], torch.arange(w)[None]
    if axes == 4:
        words[:, 3] = torch.arange(S)
    return {"img_ids": image.reshape(-1, axes).to(text.device), "txt_ids": words.to(text.device)}


def _qwen(config: QwenDiTConfig, pictures: int = 0, **more: Any) -> Case:
    functions = {"theirs": _qwen_theirs, "ours": _qwen_ours, "inside": _qwen_inside}
    return Case(
        family="qwen-image", network=qwen_dit.NETWORK, config=config, oracle="QwenImageTransformer2DModel",
        embedding="time_text_embed.time_proj", text=config.joint_attention_dim,
        **{name: partial(function, pictures=pictures) for name, function in functions.items()}, **more,
    )  # fmt: skip


def cases(layers: int = 2) -> dict[str, Case]:
    """Return each model with one block of each kind, or two; Qwen-Image with so many `layers`."""
    klein, flux2_dev = (
        replace(known_configs.read(name, "transformer", flux2_dit.NETWORK), num_layers=1, num_single_layers=1)
        for name in ("flux2-klein-4b", "flux2-dev")
    )
    zimage = replace(known_configs.read("z-image", "transformer", zimage_dit.NETWORK), n_layers=2, n_refiner_layers=1)
    medium = SD3Config(num_layers=2, dual_attention_layers=(0,), qk_norm="rms_norm", pos_embed_max_size=384)
    dev = FluxConfig(num_layers=1, num_single_layers=1, guidance_embeds=True)
    qwen21 = Case(
        family="qwen-image-2.1", network=qwen21_dit.NETWORK, config=Qwen21Config(num_layers=2),
        oracle="QwenImage21Transformer2DModel", embedding="time_text_embed.time_proj", text=4096, patch=1,
        theirs=_qwen21_theirs, ours=_qwen21_ours,
    )  # fmt: skip
    unets = {
        name: Case(
            family="stable-diffusion", network=unet.NETWORK, fields=fields, oracle="UNet2DConditionModel",
            config=parse(unet.UNetConfig, unet.unet_fields(fields), source=name), embedding="time_proj",
            text=fields["cross_attention_dim"], pooled=1280 if name == "sdxl" else 1, patch=1, branches=2,
            tokens=("4096+77",), dtypes=("fp32", "bf16"), theirs=_unet_theirs, ours=_unet_ours,
        )
        for name, fields in UNETS.items()
    }  # fmt: skip
    controlnet = Part(
        network=unet_controlnet.NETWORK, config=control.config_like(unets["sd15"].config), oracle="ControlNetModel",
        fields=UNETS["sd15"],
    )  # fmt: skip
    unets["sd15-controlnet"] = replace(
        unets["sd15"],
        control=controlnet,
        theirs=_controlled_theirs,
        ours=_controlled_ours,
        tokens=("1024+77",),
        dtypes=("fp32",),
    )
    return {
        "qwen": _qwen(QwenDiTConfig(num_layers=layers), tokens=("256+40", "1024+64"), dtypes=("fp32", "bf16")),
        "edit": replace(_qwen(QwenDiTConfig(num_layers=2, zero_cond_t=True), pictures=2), inside=None),  # 2511
        "qwen21": qwen21,  # diffusers makes keys and values of text and picture anew in each step
        "qwen21-kept": replace(qwen21, theirs=partial(_qwen21_theirs, kept=True)),
        "z-image": Case(
            family="z-image", network=zimage_dit.NETWORK, config=zimage, oracle="ZImageTransformer2DModel",
            embedding="t_embedder", text=zimage.cap_feat_dim, theirs=_zimage_theirs, ours=_zimage_ours,
        ),
        "flux": Case(
            family="flux", network=flux_dit.NETWORK, config=dev, oracle="FluxTransformer2DModel",
            embedding="time_text_embed.time_proj", text=4096, pooled=768, theirs=_flux_theirs, ours=_flux_ours,
        ),
        "flux2": Case(
            family="flux2", network=flux2_dit.NETWORK, config=klein, oracle="Flux2Transformer2DModel",
            embedding="time_guidance_embed.time_proj", text=klein.joint_attention_dim, patch=1,
            theirs=_flux2_theirs, ours=_flux2_ours,
        ),
        "flux2-dev": Case(  # both models have 9 GB in float32
            family="flux2", network=flux2_dit.NETWORK, config=flux2_dev, oracle="Flux2Transformer2DModel",
            embedding="time_guidance_embed.time_proj", text=flux2_dev.joint_attention_dim, patch=1,
            theirs=_flux2_theirs, ours=_flux2_ours,
        ),
        "flux3": Case(
            family="flux3", network=flux3_dit.NETWORK, config=Flux3Config(num_layers=1, num_single_layers=1),
            oracle="Flux3Transformer2DModel", embedding="time_proj", text=20480, patch=1,
            theirs=_flux3_theirs, ours=_flux2_ours,
        ),
        "anima": Case(
            family="anima", network=anima_dit.NETWORK, config=AnimaConfig(num_layers=2),
            oracle="CosmosTransformer3DModel", embedding="time_embed.time_proj", text=1024,
            theirs=_anima_theirs, ours=_one_stream_ours, tokens=("256+512", "1024+512"),
        ),
        "auraflow": Case(
            family="auraflow", network=aura_dit.NETWORK,
            config=AuraConfig(num_mmdit_layers=1, num_single_dit_layers=1), oracle="AuraFlowTransformer2DModel",
            embedding="time_step_embed", text=2048, latents=4, theirs=_aura_theirs, ours=_aura_ours,
        ),
        "lumina": Case(
            family="lumina", network=lumina_dit.NETWORK, config=LuminaConfig(n_layers=2, n_refiner_layers=1),
            oracle="Lumina2Transformer2DModel",
            embedding="time_caption_embed.time_proj", text=2304,
            theirs=_lumina_theirs, ours=_lumina_ours,
        ),
        "pixart": Case(
            family="pixart", network=pixart_dit.NETWORK,
            config=PixArtConfig(num_layers=2, use_additional_conditions=False),
            oracle="PixArtTransformer2DModel", embedding="adaln_single.emb.time_proj", text=4096, latents=4,
            theirs=_pixart_theirs, ours=_pixart_ours,
        ),
        "hunyuan": Case(  # four blocks, of which the last one takes the stream behind the first
            family="hunyuan", network=hunyuan_dit.NETWORK, config=HunyuanConfig(num_layers=4),
            oracle="HunyuanDiT2DModel", embedding="time_extra_emb.time_proj", text=2048, latents=4,
            theirs=_hunyuan_theirs, ours=_hunyuan_ours,
        ),
        "sana": Case(
            family="sana", network=sana_dit.NETWORK, config=SanaConfig(num_layers=2, qk_norm=QK_NORM),
            oracle="SanaTransformer2DModel", embedding="time_embed.emb.time_proj", text=2304, patch=1,
            theirs=_sana_theirs, ours=_sana_ours,
        ),
        "longcat": Case(
            family="longcat", network=longcat_dit.NETWORK, config=LongCatConfig(num_layers=1, num_single_layers=1),
            oracle="LongCatImageTransformer2DModel", embedding="time_embed.time_proj", text=3584,
            theirs=partial(_unpooled_theirs, counts_text=True), ours=_flux_ours,
        ),
        "ovis": Case(
            family="ovis", network=ovis_dit.NETWORK, config=OvisConfig(num_layers=1, num_single_layers=1),
            oracle="OvisImageTransformer2DModel", embedding="time_proj", text=2048,
            theirs=partial(_unpooled_theirs, counts_text=True, behind_text=False), ours=_flux_ours,
        ),
        "chroma": Case(
            family="chroma", network=chroma_dit.NETWORK, config=ChromaConfig(num_layers=1, num_single_layers=1),
            oracle="ChromaTransformer2DModel", embedding="time_text_embed.time_proj", text=4096,
            theirs=partial(_unpooled_theirs, counts_text=False), ours=_flux_ours,
        ),
        "ernie": Case(
            family="ernie", network=ernie_dit.NETWORK, config=ernie_dit.ErnieConfig(num_layers=2),
            oracle="ErnieImageTransformer2DModel", embedding="time_proj", text=3072, patch=1,
            theirs=_ernie_theirs, ours=_one_stream_ours,
        ),
        "krea2": Case(
            family="krea2", network=krea2_dit.NETWORK, config=krea2_dit.Krea2Config(num_layers=2),
            oracle="Krea2Transformer2DModel", embedding="time_embed", text=12 * 2560,
            theirs=_krea2_theirs, ours=_one_stream_ours,
        ),
        "sd3": Case(
            family="sd3", network=sd3_dit.NETWORK, config=medium, oracle="SD3Transformer2DModel",
            embedding="time_text_embed.time_proj", text=4096, pooled=2048, theirs=_sd3_theirs, ours=_sd3_ours,
        ),
        **unets,
    }  # fmt: skip


# The run


def inputs(case: Case, image: int, text: int, branches: int = 1) -> Inputs:
    """Return the same numbers for every arm, all exact in bfloat16."""
    rows = max(r for r in range(1, int(image**0.5) + 1) if image % r == 0)
    sides = rows * case.patch, image // rows * case.patch
    shapes = ((1, case.channels, *sides), (branches, text, case.text), (branches, case.pooled))
    rng = np.random.default_rng(7)
    latents, states, pooled = (bench.exact(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
    return latents, states, pooled


def checkpoint(part: Part, folder: Path) -> Path:
    manifest = {part.network.published(key): shape for key, shape in part.network.manifest(part.config).items()}
    return write(folder / f"{part.network.name}.safetensors", manifest)


class ExactTimes(torch.nn.Module):
    """The sinusoids of a timestep, which diffusers makes in float32 whatever its dtype, in float64."""

    def __init__(self, channels: int = 256, scale: float = 1.0):
        super().__init__()
        self.channels, self.scale = channels, scale

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        values = self.scale * times.double().cpu().numpy()
        return torch.from_numpy(_sinusoids_of(values.reshape(-1), self.channels)).to(times.device)


def oracle(case: Case, part: Part, file: Path, dtype: torch.dtype, device: str) -> Any:
    """diffusers' model of a part with the weights of `file`, and sinusoids that are made in float64."""
    import diffusers

    kind = getattr(diffusers, part.oracle)
    written = asdict(part.config) | {**part.network.described(part.config)}  # with diffusers' names, where they differ
    fields = {name: list(v) if isinstance(v, tuple) else v for name, v in written.items()}
    with torch.device("meta"):
        model = kind(**(part.fields or {name: v for name, v in fields.items() if name in signature(kind).parameters}))
    model = bench.stored(model, file, dtype, device)
    maker = model.get_submodule(case.embedding)
    if case.family == "qwen-image":
        from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope

        model.pos_embed = QwenEmbedRope(theta=10000, axes_dim=list(case.config.axes_dims_rope), scale_rope=True)
        model.time_text_embed.time_proj = ExactTimes(scale=1000)
    elif case.family == "qwen-image-2.1":
        from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope

        model.pos_embed = QwenImage21Rope(theta=10000, axes_dim=list(case.config.axes_dims_rope))
        maker.forward = lambda times: torch.cat([_sinusoids(1000 * time) for time in times])
    elif case.family == "chroma":
        from diffusers.models.transformers.transformer_chroma import ChromaCombinedTimestepTextProjEmbeddings

        channels = case.config.approximator_num_channels // 4
        model.time_text_embed = ChromaCombinedTimestepTextProjEmbeddings(channels, case.config.vectors)  # not on meta
        model.time_text_embed.time_proj.forward = partial(_sinusoids, dim=channels)
    elif case.family == "auraflow":
        model.time_step_embed = ExactTimes(scale=1000)
    elif case.family == "lumina":
        from diffusers.models.transformers.transformer_lumina2 import Lumina2RotaryPosEmbed

        axes = [*case.config.axes_dims], [*case.config.axes_lens]
        model.rope_embedder = Lumina2RotaryPosEmbed(10000, *axes)  # not on meta
        model.time_caption_embed.time_proj = ExactTimes(256)
    elif case.family == "pixart":
        from diffusers.models.embeddings import PatchEmbed

        side, patch, proj = case.config.sample_size, case.config.patch_size, model.pos_embed.proj
        scale = case.config.scale
        model.pos_embed = PatchEmbed(  # not on meta
            side, side, patch, case.config.in_channels, case.config.dim, interpolation_scale=scale
        )
        model.pos_embed.proj = proj
        model.adaln_single.emb.time_proj = ExactTimes()
    elif case.family == "anima":
        model.time_embed.time_proj = ExactTimes(case.config.dim)
    elif case.family == "ernie":
        sinusoids, half = ExactTimes(case.config.dim), case.config.dim // 2
        maker.forward = lambda times: sinusoids(times).roll(half, dims=1)  # sines first
    elif case.family == "krea2":
        pass  # it makes them in float32 within a larger module
    elif case.family == "stable-diffusion":
        model.time_proj = ExactTimes(model.config.block_out_channels[0])
        if model.config.addition_time_embed_dim:
            model.add_time_proj = ExactTimes(model.config.addition_time_embed_dim)
    else:
        setattr(maker, "timestep_embedding" if case.family == "z-image" else "forward", _sinusoids)
    return model


def oracles(case: Case, files: Sequence[Path], dtype: torch.dtype, device: str) -> torch.nn.ModuleList:
    """diffusers' models of all parts."""
    pairs = zip(case.parts, files, strict=True)
    return torch.nn.ModuleList([oracle(case, part, file, dtype, device) for part, file in pairs])


def _sinusoids(t: torch.Tensor, dim: int = 256) -> torch.Tensor:
    return torch.from_numpy(timestep_features(float(t), dim)).float()[None].to(t.device)


def oracle_arm(case: Case, models: torch.nn.ModuleList, given: Inputs) -> Arm:
    first = next(models.parameters())
    step = case.theirs(*models, *(torch.from_numpy(x).to(first.device, first.dtype) for x in given))
    return bench.peer_arm("diffusers", models, step)


def openvino_arm(case: Case, engine: Any, plans: Sequence[LoadPlan], given: Inputs) -> Arm:
    predict, x, unpacked = case.ours(*_opened(case, engine, plans, "fp32"), engine, *given)
    step = openvino.compiled(predict, x)
    return Arm("OpenVINO", step, lambda y: unpacked(torch.from_numpy(y)))


def _opened(case: Case, engine: Any, plans: Sequence[LoadPlan], policy: str) -> list[Any]:
    precision = bases(case.kind)[policy]
    return [
        engine.open(part.network.name, part.config, plan.stored(precision), precision)
        for part, plan in zip(case.parts, plans, strict=True)
    ]


def our_arms(case: Case, engine: Any, plans: Sequence[LoadPlan], policy: str, given: Inputs) -> list[Arm]:
    """`ours`, and `ours, all inside` on the same weights where the case has it."""
    components = _opened(case, engine, plans, policy)
    predict, x, unpacked = case.ours(*components, engine, *given)
    name = bench.our_name(engine, policy)
    weights = sum(size for component in components for size in bench.parameter_bytes(component.model))
    arms = [Arm(name, lambda: bench.evaluated(engine, predict(x)), unpacked, weights)]
    if case.inside:
        again = case.inside(*components, engine, *given)
        weights = sum(size for component in components for size in bench.parameter_bytes(component.model))
        arms.append(Arm(f"{name}, all inside", lambda: bench.evaluated(engine, again()), unpacked, weights))
    return arms


def planned(case: Case, part: Part, file: Path) -> LoadPlan:
    network, uses = part.network, partial(part.network.used, part.config)
    return keys.plan(file, case.kind.denoiser, network.manifest(part.config), uses=uses, rename=network.rename)


def measure(name: str, case: Case, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    files, branches = [checkpoint(part, folder) for part in case.parts], 2 if options.cfg else case.branches
    sizes = [tuple(map(int, tokens.split("+"))) for tokens in options.tokens or case.tokens]
    given = [inputs(case, *size, branches) for size in sizes]
    dtype64 = torch.float64 if name == "qwen" and options.layers <= LARGEST_FP64 else torch.float32
    model = oracles(case, files, dtype64, options.device)
    references = [(arm := oracle_arm(case, model, one)).numpy(arm.step()) for one in given]
    del model, arm
    gc.collect()
    bench.synchronize_and_free()
    engines = [qwenimg.backends.load(name) for name in [options.device, "mlx"][: 1 + (options.backend == "mlx")]]
    tables = []
    for dtype in options.dtypes or case.dtypes:
        model = None if options.peer == "openvino" else oracles(case, files, bench.DTYPES[dtype], options.device)
        for (image, text), one, reference in zip(sizes, given, references, strict=True):
            plans = [planned(case, part, file) for part, file in zip(case.parts, files, strict=True)]
            arms = [openvino_arm(case, engines[0], plans, one) if model is None else oracle_arm(case, model, one)]
            for engine in engines:
                for policy in bench.POLICIES[dtype]:
                    arms += our_arms(case, engine, plans, policy, one)
            rows = bench.rows_of(arms, dtype, reference, options.runs)
            for plan in plans:
                plan.close()
            size = {"dtype": dtype, "image_tokens": image, "text_tokens": text, "branches": branches}
            tables.append({"model": name, **size, "reference": str(dtype64), "rows": rows})
            bench.show(f"{name}, {dtype}, {image} + {text} tokens x {branches}", rows)
            del arms
            gc.collect()
            bench.synchronize_and_free()
        del model
    return tables


def read_options() -> argparse.Namespace:
    parser = bench.options(__doc__)
    known = cases()
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["qwen"], help=", ".join(known))
    parser.add_argument("--tokens", nargs="+", metavar="IMAGE+TEXT", help="default: that of the model")
    parser.add_argument("--size", type=int, metavar="PIXELS", help="a square image of this side, with 64 text tokens")
    parser.add_argument("--dtypes", nargs="+", choices=bench.POLICIES, help="default: those of the model")
    parser.add_argument("--layers", type=int, default=2, help="of Qwen-Image")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of torch")
    parser.add_argument("--backend", choices=("torch", "mlx"), default="torch", help="mlx: MLX's arms as well")
    parser.add_argument("--peer", choices=("diffusers", "openvino"), default="diffusers", help="openvino: in float32")
    parser.add_argument("--cfg", action="store_true", help="two branches in one batch, of Qwen-Image")
    options = parser.parse_args()
    if options.size:
        options.tokens = [*(options.tokens or []), f"{(options.size // 16) ** 2}+64"]
    if unknown := [name for name in options.models if name not in known]:
        parser.error(f"no model {unknown[0]}; choose of {', '.join(known)}")
    if options.peer == "openvino":
        options.dtypes = options.dtypes or ["fp32"]
        if (options.device, {*options.dtypes}) != ("cpu", {"fp32"}):
            parser.error("--peer openvino is for --device cpu and --dtypes fp32")
    if options.cfg and any(known[name].branches == 1 and name != "qwen" for name in options.models):
        parser.error("--cfg is for qwen")
    return options


def main() -> None:
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    if options.backend == "mlx":
        if sys.platform == "linux":
            import fast_blas  # noqa: F401
        import mlx.core  # noqa: F401

    tables = []
    both = options.cfg or options.models[0].startswith(tuple(UNETS))
    layers = options.layers if options.models == ["qwen"] else options.models[0]
    step = f"one forward, {'both branches of guidance in one batch' if both else 'guidance off'}"
    head = bench.header(options.runs, options.device, layers=layers, step=step)
    if head["load_average"] > 0.5 * head["cores"]:
        print(f"the machine is busy (load average {head['load_average']:.1f}): only ratios mean anything")
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
            tables += measure(name, cases(options.layers)[name], options, Path(folder))
    bench.keep(options.out, head, tables)


if __name__ == "__main__":
    main()
