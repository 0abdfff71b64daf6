"""Flux.1 as a row of data."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.config import read_json
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.family import Family
from qwenimg.common.families.flux import lora_names, mflux
from qwenimg.common.families.flux.checkpoint import REFUSED, open_folder
from qwenimg.common.families.flux.describe_file import describe_file, part_of
from qwenimg.common.families.flux.model import Flux
from qwenimg.common.families.flux.precision import KIND
from qwenimg.common.families.flux.published import defaults, published
from qwenimg.common.families.flux.small_files import small_files
from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.encoders import clip, t5
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Runtime


def _model(runtime: Runtime, checkpoint: Checkpoint, refiner: Checkpoint | None) -> Flux:
    assert refiner is None
    return Flux(runtime, checkpoint)


def _defaults(checkpoint: Checkpoint) -> Defaults:
    return defaults(guided=checkpoint["transformer"].config.guidance_embeds)


def _described(folder: Path) -> str:
    path = folder / "transformer" / "config.json"
    guided = read_json(path).get("guidance_embeds") is True if is_file(path) else mflux.is_guided(folder)
    return f"Flux.1 {'dev' if guided else 'schnell'}, text to image"


FAMILY = Family(
    name="flux",
    title="Flux.1",
    pipelines=frozenset({"FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline"}),
    refused=REFUSED,
    networks=(flux_dit.NETWORK, t5.NETWORK, clip.NETWORK, kl_vae.NETWORK),
    denoiser="transformer",
    components=(("transformer",), ("text_encoder",), ("text_encoder_2",), ("vae",)),
    precision=KIND,
    published=published,
    options=Flux.options,
    choices=frozenset({"transformer", "text_encoder", "text_encoder_2", "vae"}),
    open=open_folder,
    reads_folder=mflux.layout,
    reads_names=mflux.are_names,
    describe_file=describe_file,
    model=_model,
    lora_names=lora_names.names,
    small_files=small_files,
    defaults=_defaults,
    described=_described,
    part=part_of,
)
