"""Stable Diffusion 1.x, 2.x and XL as a row of data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.family import Family
from qwenimg.common.families.stable_diffusion import checkpoint as checkpoints
from qwenimg.common.families.stable_diffusion import lora_names
from qwenimg.common.families.stable_diffusion.checkpoint import PIPELINES, facts
from qwenimg.common.families.stable_diffusion.describe_file import describe_file, part_of
from qwenimg.common.families.stable_diffusion.model import StableDiffusion
from qwenimg.common.families.stable_diffusion.precision import KIND
from qwenimg.common.families.stable_diffusion.published import published
from qwenimg.common.families.stable_diffusion.single_file import reads
from qwenimg.common.families.stable_diffusion.small_files import small_files
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.request.parts import PARTS
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import schedules

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


FAMILY = Family(
    name="stable-diffusion",
    title="Stable Diffusion",
    pipelines=frozenset(PIPELINES),
    networks=(unet.NETWORK, clip.NETWORK, kl_vae.NETWORK),
    denoiser="unet",
    components=(("unet",), ("text_encoder", "text_encoder_2"), ("vae",)),
    precision=KIND,
    published=published,
    options=StableDiffusion.options,
    choices=frozenset({"prediction", "tokenizer", *PARTS}),
    open=checkpoints.open_checkpoint,
    reads_file=reads,
    describe_file=describe_file,
    part=part_of,
    model=StableDiffusion,
    lora_names=lora_names.names,
    lora_title=lora_names.title,
    small_files=small_files,
    defaults=_defaults,
    check=_check,
    described=_described,
    refines=_REFINES,
    check_refiner=_check_refiner,
)
