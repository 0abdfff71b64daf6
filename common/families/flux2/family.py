"""Flux.2 klein as a row of data."""

from __future__ import annotations

from qwenimg.common.families.family import Family
from qwenimg.common.families.flux2 import lora_names
from qwenimg.common.families.flux2.checkpoint import open_folder
from qwenimg.common.families.flux2.describe_file import describe_file, part_of
from qwenimg.common.families.flux2.model import Flux2
from qwenimg.common.families.flux2.precision import KIND
from qwenimg.common.families.flux2.published import defaults, model_of, published
from qwenimg.common.families.flux2.small_files import PIPELINE, small_files
from qwenimg.common.networks.denoisers import flux2_dit
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.networks.vaes import flux2_vae
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Runtime

_DEV = "is FLUX.2 dev, whose text encoder is Mistral Small 3 of 24 B parameters: not supported; FLUX.2 klein is"


def _model(runtime: Runtime, checkpoint: Checkpoint, refiner: Checkpoint | None) -> Flux2:
    assert refiner is None
    return Flux2(runtime, checkpoint)


FAMILY = Family(
    name="flux2",
    title="FLUX.2 klein",
    pipelines=frozenset({PIPELINE}),
    refused={
        "Flux2KleinKV": "is a FLUX.2 klein that keeps keys and values of reference images: not supported",
        "Flux2Klein": "is a FLUX.2 klein pipeline for another task: give the model's own folder",
        "Flux2": _DEV,
    },
    networks=(flux2_dit.NETWORK, qwen3.NETWORK, flux2_vae.NETWORK),
    denoiser="transformer",
    components=(("transformer",), ("text_encoder",), ("vae",)),
    precision=KIND,
    published=published,
    options=Flux2.options,
    choices=frozenset({"transformer", "text_encoder", "vae", "tokenizer"}),
    open=open_folder,
    describe_file=describe_file,
    model_of=lambda transformer, choices: model_of(transformer),
    model=_model,
    lora_names=lora_names.names,
    defaults=lambda checkpoint: defaults(checkpoint.distilled),
    described=lambda folder: "FLUX.2 klein, text and reference images to image",
    part=part_of,
    small_files=small_files,
)
