"""Qwen-Image-2.1 as a row of data."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.families.family import Family
from qwenimg.common.families.part_file import QWEN3_VL, PartFile
from qwenimg.common.families.qwen_image_21 import references
from qwenimg.common.families.qwen_image_21.checkpoint import FITS, NETWORKS, OPENING, is_tower, sample_sigmas
from qwenimg.common.families.qwen_image_21.known import BASE, LICENSE, TURBO, of_name
from qwenimg.common.families.qwen_image_21.model import QwenImage21
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import qwen21_names
from qwenimg.common.networks.encoders import qwen, qwen3_vl_vision
from qwenimg.common.networks.vaes import qwen21_vae
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import ROTARY_PLACES, DenoiserKind
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint

KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "norm_out, its modulation, proj_out; the prediction stays float32 for the sampler (switchable)",
        "modulation": "the timestep embedding and the scale and gate of all blocks",
        "residual": "the residual streams of transformer and text encoder, from img_in and txt_in on",
        **ROTARY_PLACES,
    },
    bases=("fp32", "bf16", "bf16-plain"),
    prefers=("bf16",),
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"(img_in|txt_in)\."),
        "modulation": re.compile(r"(time_text_embed|modulation)\."),  # made in every step
    },
    refused={"float16": "whether Qwen-Image-2.1's activations stay within float16 is not measured"},
)


def _described(folder: Path) -> str:
    turbo = "-Turbo" if sample_sigmas(folder / "model_index.json") else ""
    return f"Qwen-Image-2.1{turbo}, text and reference images to image, with alpha; license: {LICENSE}"


def _published(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return a known model with the noise levels of its own that `folder` states."""
    levels = sample_sigmas(folder / "model_index.json")
    return replace(checkpoint, scheduler=replace(checkpoint.scheduler, sample_sigmas=levels), distilled=bool(levels))


def _defaults(checkpoint: Checkpoint) -> Defaults:
    """Return the defaults: an image is a reference, and the run starts from noise."""
    usual = (TURBO if checkpoint.scheduler.sample_sigmas else BASE).usual
    steps = len(checkpoint.scheduler.sample_sigmas) or usual["steps"]
    return Defaults(**usual | {"steps": steps}, strength=1.0, mask_strength=0.8, edited=references.AREA)


def _has_vae(header: Header) -> bool:
    return any(qwen21_vae.rename(key) == qwen21_vae.SIGN for key in header.tensors)


def _vae(header: Header) -> str:
    names = ", in Wan's names, as ComfyUI has it" if any(".middle.0." in key for key in header.tensors) else ""
    return f"Qwen-Image-2.1's VAE{names}"


FAMILY = Family(
    name="qwen-image-2.1",
    title="Qwen-Image-2.1",
    pipelines=frozenset({"QwenImage21Pipeline"}),
    refused={"QwenImage21": "is a Qwen-Image-2.1 pipeline in another form: give the model's own folder"},
    precision=KIND,
    parts=NETWORKS,
    other_networks=(qwen.QWEN3_VL,),
    fits=FITS,
    published=_published,
    load_options=frozenset({"transformer", "text_encoder", "text_encoder_2", "vae", "tokenizer"}),
    small_files=lambda checkpoint: known_configs.small_files((TURBO if checkpoint.distilled else BASE).name),
    open=OPENING.open,
    files=(
        PartFile(option="transformer", title="Qwen-Image-2.1's transformer", layouts=qwen21_names.LAYOUTS),
        QWEN3_VL,
        PartFile(
            option="text_encoder",
            title="the vision tower of Qwen3-VL, a text encoder: give it beside the language model's file",
            network=qwen3_vl_vision.NETWORK,
            is_in=is_tower,
        ),
        PartFile(option="vae", title=_vae, network=qwen21_vae.NETWORK, is_in=_has_vae),
    ),
    model_of=lambda transformer, options: of_name(display_name(transformer)).name,
    models={"": QwenImage21},
    defaults=_defaults,
    described=_described,
    training=TrainingRow(layers=re.compile(r"transformer_blocks\.\d+\.(?:attn|img_mlp)\..+")),
)
