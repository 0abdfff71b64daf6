"""Code that all models of Flux.1's blocks share: their precision, and the bytes and operations of a step and of its
modulation."""

from __future__ import annotations

import re

from qwenimg.common.networks.denoisers.flux_controlnet import FluxControlNetConfig
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.precision.precision import PLACES, DenoiserKind
from qwenimg.common.weights.plan import LoadPlan

_DOUBLE, _SINGLE = r"transformer_blocks\.\d+\.", r"single_transformer_blocks\.\d+\."
KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "norm_out, its modulation and proj_out; the prediction stays float32 for the sampler "
        "(switchable)",
        "modulation": "the embeddings of time, guidance and pooled text, and every block's shift, scale and gate",
        "residual": "the residual streams of transformer and text encoders, from x_embedder and context_embedder on, "
        "which start them",
        "timestep": "timestep, guidance and their sinusoids (switchable: `rounded` is what diffusers does in half "
        "precision, where a guidance of 3.5 is seen as 3.504)",
        "rope": "RoPE tables, made in float64, and the rotation",
        "softmax": PLACES["softmax"],
        "rms_norm": "RMSNorm, gain included",
        "guidance": "guidance by a negative prompt",
        "scheduler": PLACES["scheduler"],
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"((controlnet_)?x_embedder|context_embedder|controlnet_mode_embedder)\."),
    },
    scales={
        re.compile(_DOUBLE + r"attn\.(to_[qkv]|add_[qkv]_proj|attend)"): 2.0**-3,
        re.compile(_DOUBLE + r"attn\.(to_out\.0|to_add_out)"): 2.0**-4,
        re.compile(_DOUBLE + r"(ff|ff_context)\.net\.(0\.proj|2)"): 2.0**-5,
        re.compile(_SINGLE + r"attn\.(to_[qkv]|attend)"): 2.0**-3,
        re.compile(_SINGLE + r"proj_(mlp|out)"): 2.0**-5,
        re.compile(r"controlnet_(single_)?blocks\.\d+"): 2.0**-10,  # they take the stream itself
    },
    rounds_time=True,
)
"""The places are those of Qwen-Image, whose blocks of two streams are the same. The text stream is known to exceed
float16: diffusers clips it there. Under fp16 the streams are float32 and nothing is clipped; the products are scaled by
Qwen-Image's factors, since no measurement of Flux.1's own activations is known here. Under fp16-plain the streams are
float16, and are clipped as in diffusers."""


LEARNING = re.compile(r"(?:single_)?transformer_blocks\.\d+\.(?:attn\..+|ff(?:_context)?\..+|proj_mlp|proj_out)")
"""The layers that a LoRA is trained on."""


def step_peak(config: FluxConfig, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` image and text tokens.

    Each token has two residuals, and in a block of one stream the channels of the feed-forward, twice, since they are
    joined with those of the attention."""
    return tokens * (32 * config.dim + 4 * config.hidden)


def modulation_rows(
    config: FluxConfig, plan: LoadPlan, rows: int, made_by: str = "transformer_blocks.0.norm1.linear", head: bool = True
) -> int:
    """Return the bytes of `rows` rows of modulation: twelve vectors for each block of two streams, three for each
    block of one, and two for the `head`, which a ControlNet lacks. `plan` is the transformer's as it is in memory,
    made_by: a layer that makes such a vector."""
    bias = plan.entries[f"{made_by}.bias"]
    vectors = 12 * config.num_layers + 3 * config.num_single_layers + 2 * head
    return rows * vectors * config.dim * bias.storage.nbytes((1,))


def step_operations(config: FluxConfig, tokens: int) -> float:
    """Count the operations of one prediction for `tokens` image and text tokens: for each token and block eight
    squares of the width in linear layers and the first layer of the feed-forward, and attention to all tokens."""
    blocks = config.num_layers + config.num_single_layers
    return blocks * tokens * config.dim * (16.0 * config.dim + 2.0 * config.hidden + 4.0 * tokens)


def control_operations(config: FluxControlNetConfig, image: int, tokens: int) -> float:
    """Count the operations of one call of a ControlNet for `tokens` tokens, `image` of them the image's."""
    residuals = config.num_layers + config.num_single_layers
    return step_operations(config, tokens) + residuals * 2.0 * image * config.dim**2
