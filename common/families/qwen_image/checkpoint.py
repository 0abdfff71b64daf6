"""Rows from which a Qwen-Image is opened: its variant, the networks of that, and the configurations that files show."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import INDEX, parse, read_json
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import bad, is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.opening import CONFIG, Opening, Source
from qwenimg.common.families.qwen_image import captions, variants
from qwenimg.common.families.qwen_image.known import SMALL_FILES
from qwenimg.common.families.qwen_image.variants import QwenVariant
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import qwen_dit, qwen_names
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.encoders import decoder, language_names, qwen, qwen_vl_vision, vision_tower
from qwenimg.common.networks.encoders.decoder import DecoderConfig
from qwenimg.common.networks.encoders.qwen_vl_vision import QwenVLVisionConfig
from qwenimg.common.networks.layout import Shapes, shape_of
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig
from qwenimg.common.parts.components import renaming
from qwenimg.common.parts.texts import towers
from qwenimg.common.weights.part_names import plain

_UP = re.compile(r"decoder\.(?:up_blocks\.0\.resnets\.(\d)\.conv1|upsamples\.(\d{1,2})\.residual\.2)\.weight")
_SAMPLER = re.compile(r"decoder\.(?:up_blocks\.\d\.upsamplers\.0|upsamples\.(\d{1,2}))\.resample\.1\.weight")
NETWORKS = {"transformer": qwen_dit.NETWORK, "text_encoder": qwen.QWEN2_5_VL, "vae": qwen_vae.NETWORK}
LAYOUTS = {"transformer": qwen_names.LAYOUTS, "text_encoder": language_names.QWEN2_5_VL}
FITS = (
    fits.text_states(lambda configs: configs["text_encoder"].hidden_size),
    fits.patches(lambda configs: configs["vae"].z_dim * configs["transformer"].patch_size ** 2),
    Fit(
        "the transformer makes {} channels, the VAE's latents have {} in patches",
        lambda configs: configs["transformer"].out_features,
        lambda configs: [configs["vae"].z_dim * configs["transformer"].patch_size ** 2],
    ),
)


def networks(kind: QwenVariant) -> dict[str, Network]:
    """Return the networks of a variant, by their folders; of Layered, with all that its text encoder may have."""
    text = qwen_vl_vision.NETWORK if kind.edits else captions.NETWORK if kind.layered else qwen.QWEN2_5_VL
    return NETWORKS | {"text_encoder": text}


def is_tower(header: Header) -> bool:
    """Return whether a file with this header is the vision tower of Qwen2.5-VL alone, as llama.cpp has it."""
    return towers.is_tower(header, "qwen2.5vl_merger")


def _variant(source: Source) -> QwenVariant:
    """Return the variant: the one that the user says, else the one that the transformer's file says if it is not the
    folder's own, else that of `folder`. Raises UsageError, and ModelError for a folder whose parts do not go
    together."""
    if (chosen := source.options.variant_of(variants.VARIANTS, "Qwen-Image")) is not None:
        return variants.VARIANTS[chosen]
    folder, given, place = source.path, source.given.get("transformer"), source.place("transformer")
    if not is_file(place / CONFIG) and _has_addition(place):
        return variants.LAYERED
    named = variants.of_name(given.name) if given is not None and not is_folder(given) else None
    if named is not None:
        return named
    if not source.has_index:
        return variants.of_name(folder.name) or variants.TEXT
    transformer: QwenDiTConfig = source.config("transformer", qwen_dit.NETWORK)
    try:
        return variants.of_pipeline(
            str(read_json(folder / INDEX).get("_class_name")), transformer.zero_cond_t, transformer.use_layer3d_rope
        )
    except ModelError as error:
        raise ModelError(f"{clean(folder)}: {error}") from None


def _has_addition(place: Path) -> bool:
    """Return whether the file or folder of a transformer has the tensor that only Qwen-Image-Layered has. Raise
    ModelError."""
    return any(plain("transformer", key) == qwen_dit.ADDITION for key in _keys(place))


def _keys(place: Path) -> Iterator[str]:
    """Yield the names of the tensors in a file or folder. Raise ModelError."""
    for path in find_files(place).files:
        yield from peek(path).tensors


def _writing(config: Any, folders: list[Path]) -> Any:
    """Return the configuration of a text encoder, with the settings for writing text from the first
    generation_config.json in `folders`. Raise ModelError."""
    path = next((path for folder in folders if is_file(path := folder / "generation_config.json")), None)
    if path is None or not isinstance(config, DecoderConfig):
        return config
    try:
        return decoder.with_writing(config, read_json(path))
    except ModelError as error:
        raise bad(path, str(error)) from None


def _check_sees(places: Sequence[Path]) -> None:
    """Raise ModelError for a text encoder without its vision tower."""
    rename = renaming(qwen_vl_vision.NETWORK, QwenVLVisionConfig())
    if any((rename(key) or "").startswith(vision_tower.PREFIX) for place in places for key in _keys(place)):
        return
    raise ModelError(
        f"{clean(places[0])}: is a text encoder without its vision tower, by which Qwen-Image-Edit sees pictures: give "
        "a whole one, or its tower too (--text-encoder FILE --text-encoder mmproj.gguf)"
    )


def _check_channels(folder: Path, kind: QwenVariant, vae: QwenVAEConfig) -> None:
    """Raise ModelError for a VAE of pictures with other channels than those of the variant."""
    if vae.input_channels != kind.channels:
        raise ModelError(
            f"{clean(folder)}: the VAE is of pictures of {vae.input_channels} channels, "
            f"{kind.title.partition(',')[0]} needs one of {kind.channels}: give its own with --vae"
        )


def _texts(source: Source) -> list[Path]:
    """Return the places of the text encoder: it may be in two files."""
    tower = source.given.get(towers.SECOND)
    return [source.place(towers.FIRST), *([] if tower is None else [tower])]


def _networks(source: Source) -> dict[str, Network]:
    parts = networks(source.variant)
    if source.variant.layered and captions.lacks(file for place in _texts(source) for file in find_files(place).files):
        parts["text_encoder"] = qwen.QWEN2_5_VL
    return parts


def _check_tower(source: Source) -> None:
    """Raise ModelError for a model that sees pictures without a vision tower, UsageError for another with one."""
    kind, tower = source.variant, source.given.get(towers.SECOND)
    if kind.edits:
        _check_sees(_texts(source))
    elif tower is not None and not kind.layered:
        raise UsageError(f"{clean(tower, 80)}: is a vision tower, and {kind.title} sees no picture: leave it out")


def _config(source: Source, part: str, config: Any) -> Any:
    """Return the configuration of a part, of this variant. Raise ModelError for a VAE of another."""
    kind, place = source.variant, source.place(part)
    if part == "text_encoder":
        _check_tower(source)
        return _writing(config, [place, source.path / part])
    if part == "vae" and source.is_inside(part):
        config = _vae(peek(source.path), config)
    if part == "transformer" or not is_file(place / CONFIG):  # else it is that of another VAE, or the published one
        config = variants.of_kind(config, kind)
    if part == "vae":
        _check_channels(source.path, kind, config)
    return config


# A whole model in one file: nothing shows the latents' statistics, which are as published


def _vae(header: Header, like: QwenVAEConfig) -> QwenVAEConfig:
    """Return the configuration of the VAE, in diffusers' names or Wan's."""
    path = header.file.path
    shapes: Shapes = {name: one.shape for key, one in header.tensors.items() if (name := plain("vae", key)) is not None}
    first = next((name for name in ("encoder.conv_in.weight", "encoder.conv1.weight") if name in shapes), "")
    width = shape_of(path, shapes, first or "encoder.conv1.weight", 5)[0]
    sampler = min((int(match[1] or 100) for name in shapes if (match := _SAMPLER.fullmatch(name))), default=100)
    blocks = {int(match[1] or match[2]) for name in shapes if (match := _UP.fullmatch(name))}
    layers = sum(block < sampler for block in blocks)
    return parse(QwenVAEConfig, asdict(like) | {"base_dim": width, "num_res_blocks": layers - 1}, source=path)


OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=lambda source: "qwen-image",
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES),
    given=lambda source: towers.language_first(source.options.parts, source.path / towers.FIRST, is_tower),
    variant=_variant,
    networks_of=_networks,
    config=_config,
    seeing=[qwen_vl_vision.NETWORK, captions.NETWORK],
    complete=lambda source, checkpoint: replace(checkpoint, variant=source.variant.name),
)
open_folder = OPENING.open
