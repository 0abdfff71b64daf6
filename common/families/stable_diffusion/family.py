"""Stable Diffusion 1.x, 2.x and XL as a row of data."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.family import ControlFiles, Family, RefinerFiles
from qwenimg.common.families.part_file import CLIP, PartFile, TinyVAEFile
from qwenimg.common.families.stable_diffusion import checkpoint as checkpoints
from qwenimg.common.families.stable_diffusion import control, derived_control, lora_title
from qwenimg.common.families.stable_diffusion import ip_adapter as adapters
from qwenimg.common.families.stable_diffusion.checkpoint import FITS, NETWORKS, PIPELINES, facts, zeros_for_empty
from qwenimg.common.families.stable_diffusion.describe_file import (
    ADAPTER,
    ENCODER,
    LdmFile,
    is_adapter,
    is_control,
    is_unet,
    is_union,
    is_vae,
)
from qwenimg.common.families.stable_diffusion.model import StableDiffusion
from qwenimg.common.families.stable_diffusion.small_files import small_files
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.networks.denoisers import t2i_adapter, unet, unet_controlnet, unet_controlnet_union
from qwenimg.common.networks.encoders import clip_vision, ip_adapter
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.precision.precision import PLACES, DenoiserKind
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import schedules
from qwenimg.common.weights.loras.lora_metadata import LoraBase

KIND = DenoiserKind(
    denoiser="unet",
    places={
        "final_norm": "conv_norm_out and conv_out; the prediction stays float32 for the sampler (switchable)",
        "modulation": "the embeddings of time, sizes and pooled text, and each residual block's projection of them",
        "residual": "the residual streams of UNet and text encoders, and the convolutions that start or carry the "
        "UNet's: conv_in and the 1x1 conv_shortcut; what is kept for the up blocks",
        "timestep": PLACES["timestep"],
        "softmax": PLACES["softmax"],
        "group_norm": "the statistics of group and layer norms",
        "guidance": PLACES["guidance"],
        "scheduler": PLACES["scheduler"],
    },
    presets={"quality": "fp32", "balanced": "bf16", "fast": "bf16-plain", "memory": "fp16,attention=fp32"},
    prefers=("fp16", "bf16"),
    preferred="its weights are published in float16, which bfloat16 would round",
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(conv_norm_out|conv_out)\."),
        "residual": re.compile(r"conv_in\.|.*\.conv_shortcut\."),
        "modulation": re.compile(r"(time|add|control_add)_embedding\.|.*\.time_emb_proj\."),  # made in every step
    },
)
"""Why the three switchable places exist: the normalized mean square error of two UNets (136 M and 63 M random
parameters) against float64, in bfloat16 and in float16: all low 1.4e-4, 2.0e-4; 3.6e-6, 4.0e-6. Head and modulation
in float32 1.2e-4, 2.2e-4; 3.6e-6, 4.1e-6. The residual stream as well 7.9e-5, 1.4e-4; 2.0e-6, 2.0e-6. And the 1x1
convolutions that carry the stream where its width changes 4.8e-5, 6.8e-5; 1.4e-6, 1.5e-6. Its samplers too 4.5e-5,
6.1e-5; 1.2e-6, 1.6e-6, which would need 3x3 convolutions in float32: they stay low."""


_REFINES = "SDXL base models"
_TITLES = {False: "Stable Diffusion 1.x or 2.x", True: "SDXL"}


def _defaults(checkpoint: Checkpoint) -> Defaults:
    model = facts(checkpoint)
    size = model.native_size
    usual = Defaults(width=size, height=size, negative_prompt="", guidance=7.5, strength=0.8, mask_strength=1.0)
    return replace(usual, guidance=5.0, strength=0.3, mask_strength=0.9999) if model.sdxl else usual


def _described(folder: Path) -> str:
    """Return the purpose of a folder, by its class and by the UNet's channels."""
    index = read_json(folder / "model_index.json")
    kind = _TITLES[PIPELINES[str(index["_class_name"])]]
    if index.get("requires_aesthetics_score"):
        kind = "SDXL refiner"
    channels = read_json(folder / "unet" / "config.json").get("in_channels", 4)
    scheduler = read_json(folder / "scheduler" / "scheduler_config.json", infinities=True)
    purpose = "inpainting" if channels == 9 else "text to image"
    predicts = clean(scheduler.get("prediction_type", "epsilon"), 20)
    return f"{kind}, {purpose} ({clean(channels, 20)} channels), predicts {predicts}"


def _published(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return a known model with what its pipeline tells."""
    return replace(checkpoint, zeros_for_empty=zeros_for_empty(read_json(folder / "model_index.json")))


def _check(checkpoint: Checkpoint) -> None:
    """Raise ModelError for a scheduler whose sampler is not built."""
    schedules.sampler_of(checkpoint.scheduler)


def _check_refiner(base: Checkpoint, refiner: Checkpoint | None) -> None:
    of_base = facts(base)
    if not of_base.sdxl or of_base.refiner or of_base.sees_mask:
        raise UsageError(f"--refiner is for {_REFINES} only")
    if refiner is None:
        return
    of_refiner = facts(refiner)
    latents = (checkpoint["vae"].config.latent_channels for checkpoint in (base, refiner))
    if not of_refiner.sdxl or of_refiner.sees_mask or len(set(latents)) > 1:
        raise ModelError(f"{clean(refiner.source, 120)}: is no SDXL refiner for latents like the base's")


def _lora_base(checkpoint: Checkpoint) -> LoraBase:
    """Return the names of sd-scripts, by which A1111 tells which LoRAs fit the model."""
    if facts(checkpoint).sdxl:
        return LoraBase(architecture="stable-diffusion-xl-v1-base", version="sdxl_base_v1-0")
    if checkpoint["unet"].config.cross_attention_dim == 1024:  # the states of OpenCLIP-H
        return LoraBase(architecture="stable-diffusion-v2", version="sd_v2", v2=True)
    return LoraBase(architecture="stable-diffusion-v1", version="sd_v1")


FAMILY = Family(
    name="stable-diffusion",
    title="Stable Diffusion",
    pipelines=frozenset(PIPELINES),
    components=(("unet",), ("text_encoder", "text_encoder_2"), ("vae",)),
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    published=_published,
    load_options=frozenset(
        {"transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "vae", "tokenizer", "prediction"}
    ),
    open=checkpoints.open_checkpoint,
    files=(
        PartFile(
            option="control",
            title=derived_control.title,
            network=unet_controlnet.NETWORK,
            is_in=is_control,
            type_of=lora_title.title_of_network,
            use="-m MODEL --control FILE=PICTURE",
        ),
        ADAPTER,
        ENCODER,
        PartFile(
            option="control",
            title="a ControlNet Union for SDXL",
            network=unet_controlnet_union.NETWORK,
            is_in=is_union,
            use="-m MODEL --control FILE=KIND@PICTURE",
        ),
        PartFile(
            option="control",
            title="a T2I-Adapter for Stable Diffusion",
            network=t2i_adapter.NETWORK,
            is_in=is_adapter,
            use="-m MODEL --control FILE=PICTURE",
        ),
        LdmFile(option="model"),
        LdmFile(option="transformer"),
        LdmFile(option="vae"),
        CLIP,
        PartFile(
            option="transformer",
            title="Stable Diffusion's UNet, diffusers' names",
            network=unet.NETWORK,
            is_in=is_unet,
            type_of=lora_title.title_of_network,
            use="-m MODEL --unet FILE",
        ),
        PartFile(
            option="vae",
            title="Stable Diffusion's VAE, diffusers' names",
            network=kl_vae.NETWORK,
            use="-m MODEL --vae FILE",
            is_in=is_vae,
        ),
        TinyVAEFile(names=("taesd", "taesdxl")),
    ),
    models={"": StableDiffusion},
    lora_title=lora_title.title,
    small_files=small_files,
    lora_base=_lora_base,
    defaults=_defaults,
    control=ControlFiles(
        open=control.open_control,
        networks=(unet_controlnet.NETWORK, unet_controlnet_union.NETWORK, t2i_adapter.NETWORK),
        adapters=(ip_adapter.NETWORK,),
        encoders=(clip_vision.NETWORK,),
        published=control.published,
        check_published=control.check_published,
        with_encoder=adapters.with_encoder,
    ),
    embeddings=True,
    check=_check,
    tiny_vae=lambda checkpoint: "taesdxl" if facts(checkpoint).sdxl else "taesd",
    described=_described,
    refiner=RefinerFiles(title=_REFINES, check=_check_refiner),
    training=TrainingRow(
        layers=re.compile(r".+\.attentions\.\d+\.(?:proj_in|proj_out|transformer_blocks\.\d+\.(?:attn|ff).+)"),
        text_layers=re.compile(r"encoder\.layers\.\d+\.(?:self_attn|mlp)\..+"),
        refusal=lambda checkpoint: (
            "takes a mask, which no picture to learn from has" if facts(checkpoint).sees_mask else ""
        ),
    ),
)
