"""The Stable Cascade models that are known by name, and the prior, which is published by itself."""

from __future__ import annotations

from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.parts.downloads import Download

NAME = "stable-cascade"
"""The folder of published configurations."""
LICENSE = "Stability AI non-commercial research (Stable Cascade)"
EFFNET_FILE = "effnet_encoder.safetensors"
"""The encoder of pictures, beside the folders of the decoder's repository."""
PRIOR = Download(
    name="stable-cascade-prior",
    repo="stabilityai/stable-cascade-prior",
    title="the prior of Stable Cascade",
    bytes=7_200_000_000,
    license=LICENSE,
    purpose="the first half of stable-cascade, which makes an embedding of the picture",
    files=("prior/config.json", "prior/diffusion_pytorch_model.bf16.safetensors"),
    needed_by=NAME,
    option="--transformer",
)
PARTS = (PRIOR,)
CASCADE = KnownModel(
    name=NAME,
    repo="stabilityai/stable-cascade",
    title="Stable Cascade, 3.6B + 1.5B",
    license=LICENSE,
    purpose=f"pictures of 1024 pixels in two parts; needs {PRIOR.name} too",
    steps=20,
    guidance=4.0,
    bytes=9_200_000_000,
    memory=10_000_000_000,
    family="cascade",
    dtype="float32",
    denoiser_dtype="bfloat16",
    aliases=("cascade",),
    files=("stable_cascade_stage_b", "stage_b_bf16", "stage_b"),
)
KNOWN = (CASCADE,)
