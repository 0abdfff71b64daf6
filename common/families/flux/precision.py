"""The FP32 places and the policies of Flux.1.

The places are those of Qwen-Image, whose blocks of two streams are the same. The text stream is known to exceed
float16: diffusers clips it there. Under fp16 the streams are float32 and nothing is clipped; the products are scaled by
Qwen-Image's factors, since no measurement of Flux.1's own activations is known here. Under fp16-plain the streams are
float16, and are clipped as in diffusers.
"""

from __future__ import annotations

import re

from qwenimg.common.precision.precision import BASES, PLACES, DenoiserKind

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
    bases=BASES,
    presets={"quality": "fp32", "balanced": "bf16", "fast": "bf16-plain", "memory": "bf16"},
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"(x_embedder|context_embedder)\."),
    },
    scales={
        re.compile(_DOUBLE + r"attn\.(to_[qkv]|add_[qkv]_proj|attend)"): 2.0**-3,
        re.compile(_DOUBLE + r"attn\.(to_out\.0|to_add_out)"): 2.0**-4,
        re.compile(_DOUBLE + r"(ff|ff_context)\.net\.(0\.proj|2)"): 2.0**-5,
        re.compile(_SINGLE + r"attn\.(to_[qkv]|attend)"): 2.0**-3,
        re.compile(_SINGLE + r"proj_(mlp|out)"): 2.0**-5,
    },
    rounds_time=True,
)
