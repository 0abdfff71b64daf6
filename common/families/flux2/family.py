"""FLUX.2 klein and FLUX.2 dev as rows of data: they differ in their text encoder and in guidance. klein KV is a variant
of klein."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.config import INDEX
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.family import Family
from qwenimg.common.families.flux2.checkpoint import (
    DEV_NETWORKS,
    DEV_OPENING,
    FITS,
    KV,
    KV_PIPELINE,
    LAYOUTS,
    NETWORKS,
    OPENING,
    model_of,
    published,
    variant_of,
)
from qwenimg.common.families.flux2.known import BASE_4B, KLEIN_4B, KLEIN_9B_KV
from qwenimg.common.families.flux2.known_dev import DEV as DEV_MODEL
from qwenimg.common.families.flux2.known_dev import LICENSE
from qwenimg.common.families.flux2.model import Flux2, Flux2Dev, Flux2KV
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.families.part_file import FLUX_2_VAE, MISTRAL_SMALL_3, QWEN3, PartFile, TinyVAEFile
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import flux2_kv_dit
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import ROTARY_PLACES, DenoiserKind
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.loras.lora_metadata import LoraBase

_GUIDANCE = ("guidance_in.in_layer.weight", "guidance_embedder.linear_1.weight")  # ends of names
_DOUBLE, _SINGLE = r"transformer_blocks\.\d+\.", r"single_transformer_blocks\.\d+\."
KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "norm_out, its modulation, proj_out; the prediction stays float32 for the sampler (switchable)",
        "modulation": "the timestep embedding and the shift, scale and gate of all blocks",
        "residual": "the residual streams of transformer and text encoder, from x_embedder and context_embedder on",
        **ROTARY_PLACES,
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"(x_embedder|context_embedder)\."),
        "modulation": re.compile(r"time_guidance_embed\.|(double|single)_stream_modulation"),  # made in every step
    },
    scales={
        re.compile(_DOUBLE + r"attn\.(to_[qkv]|add_[qkv]_proj|attend)"): 2.0**-3,
        re.compile(_DOUBLE + r"attn\.(to_out\.0|to_add_out)"): 2.0**-4,
        re.compile(_DOUBLE + r"(ff|ff_context)\.linear_(in|out)"): 2.0**-5,
        re.compile(_SINGLE + r"attn\.attend"): 2.0**-3,
        re.compile(_SINGLE + r"attn\.(to_qkv_mlp_proj|to_out)"): 2.0**-5,
    },
)
"""The reference clips the text stream, and both streams in blocks of one stream, to float16's range: they are known to
exceed it. Under fp16 the streams are float32 and nothing is clipped; products are scaled by Flux.1's factors, and the
feed-forward multiplies its halves in float32. Under fp16-plain the streams are float16, and clipped as in diffusers.
Measured at full width with random weights alone (docs/measured/precision.md): that says what arithmetic costs, and
nothing about how large published weights make values."""


def _like(checkpoint: Checkpoint) -> KnownModel:
    """Return a known model with the steps, guidance and small files of `checkpoint`; both sizes have the same."""
    if checkpoint.variant == KV:
        return KLEIN_9B_KV
    return KLEIN_4B if checkpoint.distilled else BASE_4B


def _variant(path: Path, config: Flux2Config) -> str:
    """Return the published model that is nearest to a transformer."""
    return DEV_MODEL.title if config.guidance_embeds else f"{model_of(path)}, by its width and its file's name"


def _described(folder: Path) -> str:
    """Return the purpose of a folder, or of one without an index."""
    index = folder / INDEX
    kept = " KV, whose references are computed once," if is_file(index) and variant_of(index) == KV else ","
    return f"FLUX.2 klein{kept} text and reference images to image"


def _is_dev(header: Header) -> bool:
    """Return whether guidance is an input of the transformer in a file."""
    return any(name.endswith(_GUIDANCE) for name in header.tensors)


_LAYOUT = LAYOUTS["transformer"]
_TRANSFORMER = PartFile(option="transformer", title="FLUX.2's transformer", layouts=_LAYOUT, variant=_variant)
_PIPELINE = "Flux2KleinPipeline"
FAMILY = Family(
    name="flux2",
    title="FLUX.2 klein",
    pipelines=frozenset({_PIPELINE, KV_PIPELINE}),
    refused={"Flux2": "is a FLUX.2 pipeline for another task: give the model's own folder"},
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    other_networks=(flux2_kv_dit.NETWORK,),
    published=published,
    open=OPENING.open,
    files=(
        replace(_TRANSFORMER, is_in=lambda header: _LAYOUT.find_in(header) is not None and not _is_dev(header)),
        FLUX_2_VAE,
        QWEN3,
        TinyVAEFile(names=("taef2",)),
    ),
    model_of=lambda transformer, options: model_of(transformer),
    models={"": Flux2, KV: Flux2KV},
    class_name=lambda checkpoint: KV_PIPELINE if checkpoint.variant == KV else _PIPELINE,
    # an image is a reference, and the run starts from noise
    lora_base=lambda checkpoint: LoraBase(architecture="flux-2-klein", version="flux2"),
    defaults=lambda checkpoint: Defaults(**_like(checkpoint).usual, strength=1.0, mask_strength=0.8),
    tiny_vae=lambda checkpoint: "taef2",
    described=_described,
    small_files=lambda checkpoint: known_configs.small_files(_like(checkpoint).name),
    training=TrainingRow(layers=re.compile(r"(?:single_)?transformer_blocks\.\d+\.(?:attn|ff|ff_context)\..+")),
)
DEV = replace(
    FAMILY,
    name="flux2-dev",
    title="FLUX.2 dev",
    pipelines=frozenset({"Flux2Pipeline"}),
    refused={},
    class_name=None,
    parts=DEV_NETWORKS,
    other_networks=(),
    published=lambda checkpoint, folder: checkpoint,
    open=DEV_OPENING.open,
    files=(
        replace(_TRANSFORMER, is_in=lambda header: _LAYOUT.find_in(header) is not None and _is_dev(header)),
        FLUX_2_VAE,
        MISTRAL_SMALL_3,
        TinyVAEFile(names=("taef2",)),
    ),
    models={"": Flux2Dev},
    lora_base=lambda checkpoint: LoraBase(architecture="flux-2-dev", version="flux2"),
    defaults=lambda checkpoint: Defaults(**DEV_MODEL.usual, strength=1.0, mask_strength=0.8),
    described=lambda folder: f"FLUX.2 dev, text and reference images to image; license: {LICENSE}",
    small_files=lambda checkpoint: known_configs.small_files(DEV_MODEL.name),
)
