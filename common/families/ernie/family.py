"""ERNIE-Image as a row of data."""

from __future__ import annotations

import re
from dataclasses import replace

from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.families.ernie.checkpoint import FITS, LAYOUTS, NETWORKS, OPENING
from qwenimg.common.families.ernie.enhancer import ENHANCER
from qwenimg.common.families.ernie.known import IMAGE, TURBO, of_name
from qwenimg.common.families.ernie.model import Ernie
from qwenimg.common.families.family import Family
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.families.part_file import FLUX_2_VAE, MINISTRAL_3, PartFile, TinyVAEFile, whole_model
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import PLACES, DenoiserKind, block_scales
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint

_LAYER = r"layers\.\d+\."
KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "final_norm, its modulation, final_linear; the prediction stays float32 for the sampler "
        "(switchable)",
        "modulation": "the timestep embedding and the shift, scale and gate of all blocks",
        "residual": "the residual streams of transformer and text encoder, from x_embedder and text_proj on",
        "rope": "RoPE tables, made in float64, and the turn",
        "rms_norm": "RMSNorm, gain included",
        **PLACES,
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"final_(norm|linear)\."),
        "residual": re.compile(r"(x_embedder|text_proj)\."),
        "modulation": re.compile(r"time_embedding\.|adaLN_modulation\."),  # made in every step
    },
    scales=block_scales(_LAYER + r"self_attention\.", _LAYER + r"mlp\.(gate_proj|up_proj|linear_fc2)"),
)
"""Under fp16 the streams are float32, and products are scaled by FLUX.2's factors. Measured with random weights alone:
that says what arithmetic costs, and nothing about how large published weights make values."""


def _like(checkpoint: Checkpoint) -> KnownModel:
    return TURBO if checkpoint.distilled else IMAGE


FAMILY = Family(
    name="ernie",
    title="ERNIE-Image",
    pipelines=frozenset({"ErnieImagePipeline"}),
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    published=lambda checkpoint, folder: replace(checkpoint, distilled=of_name(folder.name) is TURBO),
    open=OPENING.open,
    files=(
        whole_model("ERNIE-Image", OPENING, FITS),
        PartFile(
            option="transformer",
            title="ERNIE-Image's transformer",
            layouts=LAYOUTS["transformer"],
            variant=lambda path, config: f"{of_name(path.name).title}, by its file's name",
        ),
        FLUX_2_VAE,
        MINISTRAL_3,
        TinyVAEFile(names=("taef2",)),
    ),
    model_of=lambda transformer, options: of_name(display_name(transformer)).name,
    models={"": Ernie},
    defaults=lambda checkpoint: Defaults(**_like(checkpoint).usual),
    tiny_vae=lambda checkpoint: "taef2",
    described=lambda folder: f"{of_name(display_name(folder)).title}, text to image",
    small_files=lambda checkpoint: known_configs.small_files(_like(checkpoint).name),
    prompt_writer=ENHANCER,
    training=TrainingRow(layers=re.compile(_LAYER + r"(?:self_attention|mlp)\..+")),
)
