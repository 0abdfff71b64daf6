"""Flux.1 as a row of data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.family import ControlFiles, Family
from qwenimg.common.families.flux import control, controlnet, mflux, redux, variants
from qwenimg.common.families.flux.checkpoint import (
    FITS,
    NETWORKS,
    OPENING,
    REFUSED,
    is_schnell,
    known_name,
    model_of,
    of_channels,
    parts_of,
)
from qwenimg.common.families.flux.known import SCHNELL
from qwenimg.common.families.flux.model import Flux
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.part_file import CLIP_L, KL_VAE, T5, AdapterFile, ModelFile, PartFile, TinyVAEFile
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.networks.denoisers import flux_controlnet, flux_names
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.encoders import redux as redux_network
from qwenimg.common.networks.encoders import siglip_vision
from qwenimg.common.parts import flux_blocks, known_configs
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.loras.lora_metadata import LoraBase


def _described(folder: Path) -> str:
    path, index = folder / "transformer" / "config.json", folder / "model_index.json"
    config = read_json(path) if is_file(path) else mflux.sizes(folder)
    if is_file(index):
        kind = variants.of_pipeline(str(read_json(index).get("_class_name")))
    else:
        kind = variants.of_name(folder.name) or variants.TEXT
    taken: Any = config.get("in_channels", FluxConfig.in_channels)
    made: Any = config.get("out_channels") or taken
    kind = of_channels(taken, made, folder) or kind
    return f"Flux.1 {_text_model(folder, config) if kind is variants.TEXT else kind.title}, {kind.purpose}"


def _text_model(folder: Path, config: Mapping[str, Any]) -> str:
    guided = config.get("guidance_embeds") is True
    try:
        levels = OPENING.levels(OPENING.source(folder, LoadOptions())) if is_file(folder / "model_index.json") else None
    except ModelError:  # opening the folder says why
        return "dev or schnell"
    return "schnell" if is_schnell(folder, LoadOptions(), levels, guided=guided) else "dev"


def _published(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return a known model with what its pipeline and its noise levels tell."""
    dit = checkpoint["transformer"].config
    kind = variants.of_pipeline(str(read_json(folder / "model_index.json").get("_class_name")))
    kind = of_channels(dit.in_channels, dit.out_features, folder) or kind
    distilled = kind is variants.TEXT and not checkpoint.scheduler.use_dynamic_shifting
    return replace(checkpoint, variant=kind.name, distilled=distilled)


def _defaults(checkpoint: Checkpoint) -> Defaults:
    """Return the defaults of its variant, or of schnell. A model without an input for guidance has none."""
    if checkpoint.distilled:
        return Defaults(**SCHNELL.usual)
    usual = variants.VARIANTS[checkpoint.variant].defaults
    return usual if checkpoint["transformer"].config.guidance_embeds else replace(usual, guidance=0.0)


def _variant(path: Path, config: FluxConfig) -> str:
    """Return the variant, by the transformer's channels and the name of its file."""
    more = of_channels(config.in_channels, config.out_features, path)
    if more is not None:
        what = "a mask" if more is variants.FILL else "a control picture, by its name of this kind,"
        return f"{more.title}: it has {what} as an input"
    if variants.of_name(path.name):
        named = "Kontext, by its name: it is guidance-distilled"
    elif config.guidance_embeds:
        named = "dev: it is guidance-distilled"
    elif is_schnell(path, LoadOptions(), None, guided=False):
        named = "schnell: without guidance; if it is a dev without, say --variant dev"
    else:
        named = "dev, by its name: it is not guidance-distilled"
    return named


def _lora_base(checkpoint: Checkpoint) -> LoraBase:
    return LoraBase(architecture=f"flux-1-{'schnell' if checkpoint.distilled else 'dev'}", version="flux1")


def _not_trained(checkpoint: Checkpoint) -> str:
    sees = checkpoint.variant not in (variants.TEXT.name, variants.KONTEXT.name)
    return "takes a mask or a control picture, which no picture to learn from has" if sees else ""


FAMILY = Family(
    name="flux",
    title="Flux.1",
    pipelines=variants.PIPELINES,
    refused=REFUSED,
    precision=flux_blocks.KIND,
    parts=NETWORKS,
    fits=FITS,
    published=_published,
    load_options=frozenset({"transformer", "text_encoder", "text_encoder_2", "vae", "variant", "tokenizer"}),
    open=OPENING.open,
    files=(
        PartFile(
            option="control",
            title="a ControlNet for FLUX.1",
            network=flux_controlnet.NETWORK,
            is_in=lambda header: controlnet.is_control(header, kinds=False),
            use="-m flux-dev --control FILE=PICTURE",
        ),
        PartFile(
            option="control",
            title="a ControlNet Union for FLUX.1",
            network=flux_controlnet.NETWORK,
            is_in=lambda header: controlnet.is_control(header, kinds=True),
            use="-m flux-dev --control FILE=KIND@PICTURE",
        ),
        ModelFile(
            title="Flux.1",
            parts=(*NETWORKS,),
            is_in=lambda header: len(parts_of(header)) > 1,
            open=OPENING.open_inside,
            variant=lambda path, parts: _variant(path, parts["transformer"].config),
            fits=FITS,
        ),
        PartFile(
            option="transformer",
            title="Flux.1's transformer",
            layouts=flux_names.LAYOUTS,
            variant=_variant,
            use="--transformer FILE --text-encoder CLIP-L --text-encoder T5 --vae FILE",
        ),
        AdapterFile(
            option="ip_adapter",
            title="FLUX.1 Redux, which makes text tokens of pictures",
            is_in=redux.is_in,
            open=redux.open_file,
            about=redux.about,
            use="-m flux-dev --ip-adapter FILE --ip-image PICTURE",
        ),
        AdapterFile(
            option="ip_encoder",
            title="an image encoder (SigLIP)",
            is_in=redux.is_encoder,
            open=redux.open_encoder,
            about=redux.about_encoder,
            use="-m flux-dev --ip-adapter REDUX --ip-image PICTURE --ip-encoder FILE",
        ),
        T5,
        CLIP_L,
        KL_VAE,
        TinyVAEFile(names=("taef1",)),
    ),
    model_of=model_of,
    models={"": Flux},
    small_files=lambda checkpoint: known_configs.small_files(known_name(checkpoint)),
    class_name=lambda checkpoint: variants.VARIANTS[checkpoint.variant].pipeline,
    lora_base=_lora_base,
    defaults=_defaults,
    tiny_vae=lambda checkpoint: "taef1",
    control=ControlFiles(
        open=control.open_control,
        networks=(flux_controlnet.NETWORK,),
        adapters=(redux_network.NETWORK,),
        encoders=(siglip_vision.NETWORK,),
        published=control.published,
        check_published=control.check_published,
        with_encoder=redux.with_encoder,
        weights=redux.weights,
    ),
    described=_described,
    training=TrainingRow(layers=flux_blocks.LEARNING, refusal=_not_trained),
)
