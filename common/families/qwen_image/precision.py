"""The FP32 places and the policies of Qwen-Image.

Why the three switchable places exist (measured against float64 on two full-width blocks with bfloat16 weights,
normalized mean square error, docs/measured/precision.md): everything in bfloat16 4.5e-5; residual stream and
modulation in float32 1.7e-5; the head as well 6.7e-6. They spare roundings, not overflow: bfloat16 has float32's range.
"""

from __future__ import annotations

import re

from qwenimg.common.precision.precision import BASES, PLACES, DenoiserKind

_BLOCK = r"transformer_blocks\.\d+\."
KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "norm_out, its modulation and proj_out; the prediction stays float32 for the sampler "
        "(switchable)",
        "modulation": "the timestep embedding and every block's shift, scale and gate",
        "residual": "the residual streams of transformer and text encoder, from img_in and txt_in on, which start them",
        "timestep": "the timestep and its sinusoid (switchable: `rounded` is what diffusers does in half precision)",
        "rope": "RoPE tables, made in float64, and the rotation",
        "softmax": PLACES["softmax"],
        "rms_norm": "RMSNorm, gain included",
        "guidance": "classifier-free guidance and its norms",
        "scheduler": PLACES["scheduler"],
    },
    bases=BASES,
    presets={"quality": "fp32", "balanced": "bf16", "fast": "bf16-plain", "memory": "bf16"},
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"(img_in|txt_in|controlnet_x_embedder)\."),
    },
    # Activations reach 2e7 in the streams, which stay float32; these scale the inputs and outputs of the products.
    scales={
        re.compile(_BLOCK + r"attn\.(to_[qkv]|add_[qkv]_proj|attend)"): 2.0**-3,
        re.compile(_BLOCK + r"attn\.(to_out\.0|to_add_out)"): 2.0**-4,
        re.compile(_BLOCK + r"(img|txt)_mlp\.net\.(0\.proj|2)"): 2.0**-5,
        re.compile(r"controlnet_blocks\.\d+"): 2.0**-10,  # they take the stream itself
    },
    texts={"fp16": "bfloat16"},  # Qwen2.5-VL's activations are beyond float16 too
    rounds_time=True,
)
