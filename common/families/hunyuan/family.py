"""Hunyuan-DiT as a row of data."""

from __future__ import annotations

import re

from qwenimg.common.families.family import Family
from qwenimg.common.families.hunyuan.checkpoint import (
    FITS,
    LAYOUTS,
    NETWORKS,
    OPENING,
    complete,
    described,
    is_distilled,
    parts_of,
    title,
    variant_of,
)
from qwenimg.common.families.hunyuan.known import NEWER, OLDER, V11, V11_DISTILLED, V12, V12_DISTILLED
from qwenimg.common.families.hunyuan.model import Hunyuan
from qwenimg.common.families.part_file import KL_VAE_4, T5, ModelFile, PartFile, TinyVAEFile
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.networks.encoders import bert_names
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import PLACES, DenoiserKind
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import schedules

_KNOWN = {(NEWER, False): V12, (NEWER, True): V12_DISTILLED, (OLDER, False): V11, (OLDER, True): V11_DISTILLED}
KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "norm_out, its modulation and proj_out; the prediction stays float32 for the sampler "
        "(switchable)",
        "modulation": "the embeddings of time, pooled text and sizes, and every block's shift",
        "residual": "the residual streams of transformer and text encoders, from the convolution of patches on, and "
        "the layers that join two of them",
        **PLACES,
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"pos_embed\.proj\."),
        "modulation": re.compile(r"time_extra_emb\.|blocks\.\d+\.norm1\.linear\."),
    },
)
"""In float16 no input is scaled, since its authors draw it in float16, though ComfyUI keeps the scores of 1.2 in
float32, as kernels here do; T5 has float32 where its values exceed that. Not measured on real weights."""


def _defaults(checkpoint: Checkpoint) -> Defaults:
    side = checkpoint["transformer"].config.sample_size * checkpoint["vae"].config.scale
    known = _KNOWN[str(checkpoint.variant), checkpoint.distilled]
    return Defaults(**(known.usual | {"width": side, "height": side}))


def _check(checkpoint: Checkpoint) -> None:
    """Raise ModelError for a scheduler whose sampler is not built."""
    schedules.sampler_of(checkpoint.scheduler)


FAMILY = Family(
    name="hunyuan",
    title="Hunyuan-DiT",
    pipelines=frozenset({"HunyuanDiTPipeline"}),
    refused={"HunyuanDiTControlNet": "is a Hunyuan-DiT with a ControlNet, which this version does not support"},
    components=(("transformer",), ("text_encoder", "text_encoder_2"), ("vae",)),
    precision=KIND,
    parts=NETWORKS,
    published=lambda checkpoint, folder: complete(checkpoint, checkpoint.source),
    fits=FITS,
    load_options=frozenset({"transformer", "text_encoder", "text_encoder_2", "vae", "tokenizer"}),
    open=OPENING.open,
    files=(
        ModelFile(
            title="Hunyuan-DiT",
            parts=(*NETWORKS,),
            is_in=lambda header: len(parts_of(header)) > 1,
            open=OPENING.open_inside,
            fits=FITS,
        ),
        PartFile(
            option="transformer",
            title="Hunyuan-DiT's transformer",
            layouts=LAYOUTS["transformer"],
            variant=lambda path, config: title(OLDER if config.sees_size else NEWER),
            use="--transformer FILE --text-encoder BERT --text-encoder MT5 --vae FILE",
        ),
        PartFile(
            option="text_encoder",
            title="BERT, a text encoder",
            use="-m MODEL --text-encoder FILE",
            layouts=bert_names.LAYOUTS,
            is_alone=True,
        ),
        T5,
        KL_VAE_4,
        TinyVAEFile(names=("taesdxl",)),
    ),
    model_of=lambda transformer, options: _KNOWN[variant_of(transformer), is_distilled(transformer)].name,
    models={"": Hunyuan},
    small_files=lambda checkpoint: known_configs.small_files(str(checkpoint.variant)),
    defaults=_defaults,
    check=_check,
    tiny_vae=lambda checkpoint: "taesdxl",
    described=described,
    training=TrainingRow(layers=re.compile(r"blocks\.\d+\.(?:attn\d|ff|skip_linear)\b.*")),
)
