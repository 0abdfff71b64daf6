"""The FP32 places and the policies of Stable Diffusion.

Why the three switchable places exist: the normalized mean square error of two UNets (136 M and 63 M random parameters)
against float64, in bfloat16 and in float16: all low 1.4e-4, 2.0e-4; 3.6e-6, 4.0e-6. Head and modulation in float32
1.2e-4, 2.2e-4; 3.6e-6, 4.1e-6. The residual stream as well 7.9e-5, 1.4e-4; 2.0e-6, 2.0e-6. And the 1x1 convolutions
that carry the stream where its width changes 4.8e-5, 6.8e-5; 1.4e-6, 1.5e-6. Its samplers too 4.5e-5, 6.1e-5; 1.2e-6,
1.6e-6, which would need 3x3 convolutions in float32: they stay low.
"""

from __future__ import annotations

import re

from qwenimg.common.precision.precision import BASES, PLACES, DenoiserKind

KIND = DenoiserKind(
    denoiser="unet",
    places={
        "final_norm": "conv_norm_out and conv_out; the prediction stays float32 for the sampler (switchable)",
        "modulation": "the embeddings of time, sizes and pooled text, and each residual block's projection of them",
        "residual": "the residual streams of UNet and text encoders, and the convolutions that start or carry the "
        "UNet's: conv_in and the 1x1 conv_shortcut; what is kept for the up blocks",
        "timestep": PLACES["timestep"],
        "softmax": PLACES["softmax"],
        "group_norm": "the statistics of group and layer norms",
        "guidance": PLACES["guidance"],
        "scheduler": PLACES["scheduler"],
    },
    bases=BASES,
    presets={"quality": "fp32", "balanced": "bf16", "fast": "bf16-plain", "memory": "fp16,attention=fp32"},
    prefers=("fp16", "bf16"),
    preferred="its weights are published in float16, which bfloat16 would round",
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(conv_norm_out|conv_out)\."),
        "residual": re.compile(r"conv_in\.|.*\.conv_shortcut\."),
        "modulation": re.compile(r"(time|add)_embedding\.|.*\.time_emb_proj\."),  # made in every step
    },
)
