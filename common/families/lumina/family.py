"""Lumina-Image 2.0 as a row of data."""

from __future__ import annotations

import re

from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.families.family import Family
from qwenimg.common.families.lumina.checkpoint import FITS, LAYOUTS, NETWORKS, OPENING
from qwenimg.common.families.lumina.known import IMAGE, of_name
from qwenimg.common.families.lumina.model import Lumina
from qwenimg.common.families.part_file import GEMMA_2, KL_VAE, PartFile, TinyVAEFile, whole_model
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import ROTARY_PLACES, DenoiserKind
from qwenimg.common.request.request import Defaults

KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "modulation": "the timestep embedding and every block's scale and gate",
        **ROTARY_PLACES,
        "final_norm": "final_layer, its modulation included; the prediction stays float32 for the sampler (switchable)",
        "residual": "the residual streams of transformer and text encoder, from the embedders on",
    },
    bases=("fp32", "bf16", "bf16-plain"),
    prefers=("bf16",),
    keys={
        "final_norm": re.compile(r"final_layer\."),
        "residual": re.compile(r"(x_embedder|cap_embedder\.1)\."),
        "modulation": re.compile(r"t_embedder\.|.*\.adaLN_modulation\."),  # made in every step
    },
    refused={"float16": "other programs draw it in bfloat16 and float32 alone"},
)


FAMILY = Family(
    name="lumina",
    title="Lumina-Image 2.0",
    pipelines=frozenset({"Lumina2Pipeline", "Lumina2Text2ImgPipeline"}),
    refused={"Lumina": "is an older Lumina, before Lumina-Image 2.0, which this version does not draw with"},
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    open=OPENING.open,
    files=(
        whole_model("Lumina-Image 2.0", OPENING, FITS),
        PartFile(
            option="transformer",
            title="Lumina-Image 2.0's transformer",
            layouts=LAYOUTS["transformer"],
            like=lambda: known_configs.read("lumina", "transformer", NETWORKS["transformer"]),
        ),
        GEMMA_2,
        KL_VAE,
        TinyVAEFile(names=("taef1",)),
    ),
    model_of=lambda transformer, options: of_name(display_name(transformer)).name,
    models={"": Lumina},
    defaults=lambda checkpoint: Defaults(**IMAGE.usual),
    tiny_vae=lambda checkpoint: "taef1",
    described=lambda folder: f"{of_name(display_name(folder)).title}, text to image",
    small_files=lambda checkpoint: known_configs.small_files("lumina"),
    training=TrainingRow(layers=re.compile(r"layers\.\d+\.(?:attention|feed_forward)\..+")),
)
