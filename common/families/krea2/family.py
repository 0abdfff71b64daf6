"""Krea 2 as a row of data."""

from __future__ import annotations

import re
from pathlib import Path

from qwenimg.common.base.config import INDEX
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.family import Family
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.families.krea2.checkpoint import FITS, LAYOUTS, NETWORKS, OPENING, distilled, is_distilled
from qwenimg.common.families.krea2.known import LICENSE, RAW, TURBO, of_name
from qwenimg.common.families.krea2.model import Krea2
from qwenimg.common.families.part_file import QWEN3_VL, QWEN_VAE, PartFile, TinyVAEFile, whole_model
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import ROTARY_PLACES, DenoiserKind, block_scales
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint

_LAYERS = r"(?:transformer_blocks|text_fusion\.\w+)\.\d+\."
KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "final_layer with its table; the prediction stays float32 for the sampler (switchable)",
        "modulation": "the timestep embedding and the scale, shift and gate of all blocks",
        "residual": "the residual streams of transformer, text fusion and text encoder, from img_in and txt_in on",
        **ROTARY_PLACES,
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"final_layer\."),
        "residual": re.compile(r"(img_in|txt_in\.linear_\d|text_fusion\.projector)\."),
        "modulation": re.compile(r"time_(embed|mod_proj)\.|transformer_blocks\.\d+\.scale_shift_table\."),
    },
    scales=block_scales(_LAYERS + r"attn\.", _LAYERS + r"ff\.(gate|up|down)", "to_[qkv]|to_gate"),
)
"""Under fp16 the streams are float32, and products are scaled by FLUX.2's factors. Measured with random weights alone:
that says what arithmetic costs, and nothing about how large published weights make values."""


def _like(checkpoint: Checkpoint) -> KnownModel:
    return TURBO if checkpoint.distilled else RAW


def _described(folder: Path) -> str:
    index = folder / INDEX
    turbo = is_distilled(index) if is_file(index) else of_name(display_name(folder)) is TURBO
    return f"Krea 2 {'Turbo' if turbo else 'Raw'}, text to image; license: {LICENSE}"


def _not_trained(checkpoint: Checkpoint) -> str:
    return f"{TURBO.name} is distilled: train {RAW.name}, whose LoRAs it takes too" if checkpoint.distilled else ""


FAMILY = Family(
    name="krea2",
    title="Krea 2",
    pipelines=frozenset({"Krea2Pipeline"}),
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    published=lambda checkpoint, folder: distilled(checkpoint, is_distilled(folder / INDEX)),
    open=OPENING.open,
    files=(
        whole_model("Krea 2", OPENING, FITS),
        PartFile(
            option="transformer",
            title="Krea 2's transformer",
            layouts=LAYOUTS["transformer"],
            variant=lambda path, config: f"{of_name(path.name).title}, by its file's name; license: {LICENSE}",
        ),
        QWEN3_VL,
        QWEN_VAE,
        TinyVAEFile(names=("taew2_1",)),
    ),
    model_of=lambda transformer, options: of_name(display_name(transformer)).name,
    models={"": Krea2},
    defaults=lambda checkpoint: Defaults(**_like(checkpoint).usual),
    tiny_vae=lambda checkpoint: "taew2_1",
    described=_described,
    small_files=lambda checkpoint: known_configs.small_files(_like(checkpoint).name),
    training=TrainingRow(
        layers=re.compile(r"transformer_blocks\.\d+\.(?:attn|ff)\..+"), guidance=0.0, refusal=_not_trained
    ),
)
