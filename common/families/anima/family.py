"""Anima as a row of data."""

from __future__ import annotations

import re

from qwenimg.common.families.anima.checkpoint import FITS, LAYOUTS, NETWORKS, OPENING, described
from qwenimg.common.families.anima.known import BASE, LICENSE, TURBO, is_turbo
from qwenimg.common.families.anima.model import Anima
from qwenimg.common.families.family import Family
from qwenimg.common.families.part_file import QWEN3, QWEN_VAE, PartFile, TinyVAEFile, whole_model
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import ROTARY_PLACES, DenoiserKind, block_scales
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint

KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "norm_out, its modulation, proj_out; the prediction stays float32 for the sampler (switchable)",
        "modulation": "the embedding of the time, and the narrow layers of scale, shift and gate of all blocks",
        "residual": "the residual streams of transformer, text conditioner and text encoder, from patch_embed on",
        **ROTARY_PLACES,
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"patch_embed\."),
        "modulation": re.compile(r"time_embed\.|transformer_blocks\.\d+\.norm\d\."),
    },
    scales=block_scales(r"transformer_blocks\.\d+\.attn\d\.", r"transformer_blocks\.\d+\.ff\.net\.\d.*"),
)
"""Under fp16 the streams are float32, and products are scaled by FLUX.2's factors. Measured with random weights alone
(latents of the tiny model 2e-3 off in fp16, 1.2e-2 in bf16): that says what arithmetic costs, and nothing about how
large published weights make values."""


def _not_trained(checkpoint: Checkpoint) -> str:
    return f"Anima Turbo is distilled: train {BASE.name}, whose LoRAs it takes too" if checkpoint.distilled else ""


FAMILY = Family(
    name="anima",
    title="Anima",
    pipelines=frozenset({"AnimaModularPipeline"}),
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    open=OPENING.open,
    files=(
        whole_model("Anima", OPENING, FITS, lacks=True),
        PartFile(
            option="transformer",
            title="Anima's transformer",
            layouts=LAYOUTS["transformer"],
            variant=lambda path, config: (
                f"{'Anima Turbo' if is_turbo(path.name) else BASE.title}, by its file's name; license: {LICENSE}"
            ),
        ),
        QWEN3,
        QWEN_VAE,
        TinyVAEFile(names=("taew2_1",)),
    ),
    model_of=lambda transformer, options: BASE.name,
    models={"": Anima},
    defaults=lambda checkpoint: Defaults(**(BASE.usual | (TURBO if checkpoint.distilled else {}))),
    tiny_vae=lambda checkpoint: "taew2_1",
    described=described,
    small_files=lambda checkpoint: known_configs.small_files(BASE.name),
    training=TrainingRow(
        # not the text conditioner, which its makers advise not to train
        layers=re.compile(r"transformer_blocks\.\d+\.(?:attn\d|ff)\..+"),
        refusal=_not_trained,
    ),
)
