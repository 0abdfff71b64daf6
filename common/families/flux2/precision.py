"""The FP32 places and the policies of Flux.2.

The reference clips the text stream, and both streams in blocks of one stream, to float16's range: they are known to
exceed it. Under fp16 the streams are float32 and nothing is clipped; products are scaled by Flux.1's factors, so that
what goes into them may be 8 to 32 times float16's range, and the feed-forward multiplies its halves in float32. Under
fp16-plain the streams are float16, and are clipped as in diffusers. Measured at full width with random weights alone
(docs/measured/precision.md): that says what arithmetic costs, and nothing about how large published weights make
values.
"""

from __future__ import annotations

import re

from qwenimg.common.precision.precision import BASES, PLACES, DenoiserKind

_DOUBLE, _SINGLE = r"transformer_blocks\.\d+\.", r"single_transformer_blocks\.\d+\."
KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "norm_out, its modulation, proj_out; the prediction stays float32 for the sampler (switchable)",
        "modulation": "the timestep embedding and the shift, scale and gate of all blocks",
        "residual": "the residual streams of transformer and text encoder, from x_embedder and context_embedder on",
        "rope": "RoPE tables, made in float64, and the rotation",
        "rms_norm": "RMSNorm, gain included",
        **PLACES,
    },
    bases=BASES,
    presets={"quality": "fp32", "balanced": "bf16", "fast": "bf16-plain", "memory": "bf16"},
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"(x_embedder|context_embedder)\."),
        "modulation": re.compile(r"time_guidance_embed\.|(double|single)_stream_modulation"),  # made in every step
    },
    scales={
        re.compile(_DOUBLE + r"attn\.(to_[qkv]|add_[qkv]_proj|attend)"): 2.0**-3,
        re.compile(_DOUBLE + r"attn\.(to_out\.0|to_add_out)"): 2.0**-4,
        re.compile(_DOUBLE + r"(ff|ff_context)\.linear_(in|out)"): 2.0**-5,
        re.compile(_SINGLE + r"attn\.attend"): 2.0**-3,
        re.compile(_SINGLE + r"attn\.(to_qkv_mlp_proj|to_out)"): 2.0**-5,
    },
)
