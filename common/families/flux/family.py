"""Flux.1 as a row of data."""

from __future__ import annotations

import re
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
from qwenimg.common.families.flux.describe_file import EncoderFile, ReduxFile
from qwenimg.common.families.flux.known import SCHNELL
from qwenimg.common.families.flux.model import Flux
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.part_file import CLIP_L, KL_VAE, T5, ModelFile, PartFile, TinyVAEFile
from qwenimg.common.networks.denoisers import flux_controlnet, flux_names
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.encoders import redux as redux_network
from qwenimg.common.networks.encoders import siglip_vision
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import PLACES, DenoiserKind
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint

_DOUBLE, _SINGLE = r"transformer_blocks\.\d+\.", r"single_transformer_blocks\.\d+\."
KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "norm_out, its modulation and proj_out; the prediction stays float32 for the sampler "
        "(switchable)",
        "modulation": "the embeddings of time, guidance and pooled text, and every block's shift, scale and gate",
        "residual": "the residual streams of transformer and text encoders, from x_embedder and context_embedder on, "
        "which start them",
        "timestep": "timestep, guidance and their sinusoids (switchable: `rounded` is what diffusers does in half "
        "precision, where a guidance of 3.5 is seen as 3.504)",
        "rope": "RoPE tables, made in float64, and the rotation",
        "softmax": PLACES["softmax"],
        "rms_norm": "RMSNorm, gain included",
        "guidance": "guidance by a negative prompt",
        "scheduler": PLACES["scheduler"],
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"((controlnet_)?x_embedder|context_embedder|controlnet_mode_embedder)\."),
    },
    scales={
        re.compile(_DOUBLE + r"attn\.(to_[qkv]|add_[qkv]_proj|attend)"): 2.0**-3,
        re.compile(_DOUBLE + r"attn\.(to_out\.0|to_add_out)"): 2.0**-4,
        re.compile(_DOUBLE + r"(ff|ff_context)\.net\.(0\.proj|2)"): 2.0**-5,
        re.compile(_SINGLE + r"attn\.(to_[qkv]|attend)"): 2.0**-3,
        re.compile(_SINGLE + r"proj_(mlp|out)"): 2.0**-5,
        re.compile(r"controlnet_(single_)?blocks\.\d+"): 2.0**-10,  # they take the stream itself
    },
    rounds_time=True,
)
"""The places are those of Qwen-Image, whose blocks of two streams are the same. The text stream is known to exceed
float16: diffusers clips it there. Under fp16 the streams are float32 and nothing is clipped; the products are scaled by
Qwen-Image's factors, since no measurement of Flux.1's own activations is known here. Under fp16-plain the streams are
float16, and are clipped as in diffusers."""


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


FAMILY = Family(
    name="flux",
    title="Flux.1",
    pipelines=variants.PIPELINES,
    refused=REFUSED,
    components=(("transformer",), ("text_encoder",), ("text_encoder_2",), ("vae",)),
    precision=KIND,
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
        ReduxFile(),
        EncoderFile(),
        T5,
        CLIP_L,
        KL_VAE,
        TinyVAEFile(names=("taef1",)),
    ),
    model_of=model_of,
    models={"": Flux},
    small_files=lambda checkpoint: known_configs.small_files(known_name(checkpoint)),
    class_name=lambda checkpoint: variants.VARIANTS[checkpoint.variant].pipeline,
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
)
