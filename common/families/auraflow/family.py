"""AuraFlow as a row of data."""

from __future__ import annotations

import re

from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.families.auraflow.checkpoint import FITS, LAYOUTS, NETWORKS, OPENING
from qwenimg.common.families.auraflow.known import of_name
from qwenimg.common.families.auraflow.model import AuraFlow
from qwenimg.common.families.family import Family
from qwenimg.common.families.part_file import UMT5, PartFile, TinyVAEFile, whole_model
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.parts import known_configs, vae_files
from qwenimg.common.precision.precision import PLACES, DenoiserKind
from qwenimg.common.request.request import Defaults

KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "layer_norm": "LayerNorm, of streams and of each head's queries and keys",
        **PLACES,
        "final_norm": "norm_out's scale and shift, and proj_out; the prediction stays float32 for the sampler "
        "(switchable)",
        "modulation": "the embedding of the time, and every block's shift, scale and gate",
        "residual": "the residual streams of transformer and text encoder, from the layers on that start them: of "
        "patches, text and registers",
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"(pos_embed\.proj|context_embedder|register_tokens)\."),
    },
)
"""In float16 no input is scaled: other programs draw it in float16 without, and its weights are published so. Not
measured on real weights."""


FAMILY = Family(
    name="auraflow",
    title="AuraFlow",
    pipelines=frozenset({"AuraFlowPipeline"}),
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    open=OPENING.open,
    files=(
        whole_model("AuraFlow", OPENING, FITS),
        PartFile(option="transformer", title="AuraFlow's transformer", layouts=LAYOUTS["transformer"]),
        UMT5,
        PartFile(
            option="vae",
            title="SDXL's VAE",
            layouts=LAYOUTS["vae"],
            is_in=lambda header: header.format != "GGUF" and vae_files.latent_channels(header.tensors) == 4,
            is_described=False,  # Stable Diffusion's rows describe it
            like=lambda: known_configs.read("auraflow", "vae", NETWORKS["vae"]),
        ),
        TinyVAEFile(names=("taesdxl",)),
    ),
    model_of=lambda transformer, options: of_name(display_name(transformer)).name,
    models={"": AuraFlow},
    defaults=lambda checkpoint: Defaults(**of_name(display_name(checkpoint.source)).usual),
    tiny_vae=lambda checkpoint: "taesdxl",
    described=lambda folder: f"{of_name(display_name(folder)).title}, text to image",
    small_files=lambda checkpoint: known_configs.small_files("auraflow"),
    training=TrainingRow(layers=re.compile(r"(?:joint|single)_transformer_blocks\.\d+\.(?:attn|ff|ff_context)\..+")),
)
