"""PixArt-alpha and PixArt-Sigma as a row of data."""

from __future__ import annotations

import re

from qwenimg.common.families.family import Family
from qwenimg.common.families.part_file import KL_VAE_4, T5, PartFile, TinyVAEFile, whole_model
from qwenimg.common.families.pixart.checkpoint import (
    FITS,
    LAYOUTS,
    NETWORKS,
    OPENING,
    PIPELINES,
    complete,
    described,
    model_of,
    of_folder,
    title,
    variant_of,
)
from qwenimg.common.families.pixart.known import ALPHA, ALPHA_1024, LCM, SIGMA_1024
from qwenimg.common.families.pixart.model import PixArt
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import PLACES, DenoiserKind
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import schedules

KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "the last norm with its table, and proj_out; the prediction stays float32 for the sampler "
        "(switchable)",
        "modulation": "the embeddings of time and sizes, and every block's shift, scale and gate",
        "residual": "the residual streams of transformer and text encoder, from the convolution of patches on",
        **PLACES,
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(proj_out|scale_shift_table)\."),
        "residual": re.compile(r"pos_embed\.proj\."),
        "modulation": re.compile(r"adaln_single\.|transformer_blocks\.\d+\.scale_shift_table\."),
    },
)
"""In float16 no input is scaled, since its authors draw it in float16; T5 has float32 where its values exceed that."""


def _defaults(checkpoint: Checkpoint) -> Defaults:
    known = LCM if checkpoint.distilled else ALPHA_1024 if checkpoint.variant == ALPHA else SIGMA_1024
    side = checkpoint["transformer"].config.sample_size * checkpoint["vae"].config.scale
    return Defaults(**(known.usual | {"width": side, "height": side}))


def _not_trained(checkpoint: Checkpoint) -> str:
    return f"PixArt-LCM is distilled: train {ALPHA_1024.name}" if checkpoint.distilled else ""


def _check(checkpoint: Checkpoint) -> None:
    """Raise ModelError for a scheduler whose sampler is not built."""
    schedules.sampler_of(checkpoint.scheduler)


FAMILY = Family(
    name="pixart",
    title="PixArt",
    pipelines=frozenset(PIPELINES),
    precision=KIND,
    parts=NETWORKS,
    published=lambda checkpoint, folder: complete(checkpoint, of_folder(folder)),
    fits=FITS,
    open=OPENING.open,
    files=(
        whole_model("PixArt", OPENING, FITS, lacks=True),
        PartFile(
            option="transformer",
            title="PixArt's transformer",
            layouts=LAYOUTS["transformer"],
            variant=lambda path, config: title(variant_of(path)),
        ),
        T5,
        KL_VAE_4,
        TinyVAEFile(names=("taesd", "taesdxl")),
    ),
    model_of=lambda transformer, options: model_of(transformer),
    models={"": PixArt},
    small_files=lambda checkpoint: known_configs.small_files(LCM.name if checkpoint.distilled else checkpoint.variant),
    defaults=_defaults,
    check=_check,
    tiny_vae=lambda checkpoint: "taesd" if checkpoint.variant == ALPHA else "taesdxl",
    described=described,
    training=TrainingRow(layers=re.compile(r"transformer_blocks\.\d+\.(?:attn\d|ff)\..+"), refusal=_not_trained),
)
