"""The FP32 places and the policies of Stable Diffusion 3.

Measured against float64 on three full-width blocks of SD 3.5 medium with random bfloat16 weights, normalized mean
square error of the velocity in bfloat16 and in float16: everything low 3.2e-5, 5.2e-7; the places in float32 1.2e-6,
1.8e-8; without that of the modulation 4.8e-6, 7.4e-8, of the final norm 9.9e-6, 1.8e-7, of the residual streams 2.1e-5,
3.4e-7. In float16 no input is scaled, since the reference clips none. Not measured on real weights.
"""

from __future__ import annotations

import re

from qwenimg.common.precision.precision import BASES, PLACES, DenoiserKind

KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "rms_norm": "RMSNorm, gain included",
        **PLACES,
        "final_norm": "norm_out, its modulation and proj_out; the prediction stays float32 for the sampler "
        "(switchable)",
        "modulation": "the embeddings of time and pooled text, and every block's shift, scale and gate",
        "residual": "the residual streams of transformer and text encoders, from the convolution of patches and from "
        "context_embedder on, which start them",
    },
    bases=BASES,
    presets={"quality": "fp32", "balanced": "bf16", "fast": "bf16-plain", "memory": "bf16"},
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"(pos_embed\.proj|context_embedder)\."),
    },
)
