"""Flux.1 as a row of data."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.config import read_json
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.family import Family
from qwenimg.common.families.flux import lora_names, mflux, variants
from qwenimg.common.families.flux.checkpoint import REFUSED, model_of, open_checkpoint
from qwenimg.common.families.flux.describe_file import describe_file, part_of
from qwenimg.common.families.flux.model import Flux
from qwenimg.common.families.flux.precision import KIND
from qwenimg.common.families.flux.published import defaults, published
from qwenimg.common.families.flux.single_file import is_model
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
    return defaults(checkpoint.variant, guided=checkpoint["transformer"].config.guidance_embeds)


def _described(folder: Path) -> str:
    path, index = folder / "transformer" / "config.json", folder / "model_index.json"
    config = read_json(path) if is_file(path) else mflux.sizes(folder)
    if is_file(index):
        kind = variants.of_pipeline(str(read_json(index).get("_class_name")))
    elif config.get("in_channels") != (config.get("out_channels") or config.get("in_channels")):
        kind = variants.FILL
    else:
        kind = variants.of_name(folder.name) or variants.TEXT
    name = ("dev" if config.get("guidance_embeds") is True else "schnell") if kind is variants.TEXT else kind.title
    return f"Flux.1 {name}, {kind.purpose}"


FAMILY = Family(
    name="flux",
    title="Flux.1",
    pipelines=variants.PIPELINES,
    refused=REFUSED,
    networks=(flux_dit.NETWORK, t5.NETWORK, clip.NETWORK, kl_vae.NETWORK),
    denoiser="transformer",
    components=(("transformer",), ("text_encoder",), ("text_encoder_2",), ("vae",)),
    precision=KIND,
    published=published,
    options=Flux.options,
    choices=frozenset({"transformer", "text_encoder", "text_encoder_2", "vae", "variant", "tokenizer"}),
    open=open_checkpoint,
    reads_folder=mflux.layout,
    reads_names=mflux.are_names,
    reads_file=is_model,
    describe_file=describe_file,
    model_of=model_of,
    model=_model,
    lora_names=lora_names.names,
    small_files=small_files,
    class_name=lambda checkpoint: variants.VARIANTS[checkpoint.variant].pipeline,
    defaults=_defaults,
    described=_described,
    part=part_of,
)
