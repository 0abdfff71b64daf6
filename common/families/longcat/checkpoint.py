"""Rows from which a LongCat-Image is opened: its networks, and the signs of Edit, whose files have the same tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.config import INDEX, read_json
from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.longcat.known import EDIT, IMAGE, SMALL_FILES, of_name
from qwenimg.common.families.opening import Opening, Source
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import longcat_dit, longcat_names
from qwenimg.common.networks.denoisers.flux_dit import PATCH
from qwenimg.common.networks.encoders import language_names, qwen, qwen_vl_vision
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.parts.texts import towers

VARIANTS = {"text": IMAGE, "edit": EDIT}  # by the values of --variant
PIPELINES = {"LongCatImagePipeline": "text", "LongCatImageEditPipeline": "edit"}
NETWORKS = {"transformer": longcat_dit.NETWORK, "text_encoder": qwen.QWEN2_5_VL, "vae": kl_vae.NETWORK}
FITS = (
    fits.text_states(lambda configs: configs["text_encoder"].hidden_size),
    fits.patches(lambda configs: PATCH**2 * configs["vae"].latent_channels),
)


def is_tower(header: Header) -> bool:
    """Return whether a file with this header is the vision tower of Qwen2.5-VL alone, as llama.cpp has it."""
    return towers.is_tower(header, "qwen2.5vl_merger")


def networks(variant: str) -> Mapping[str, Network]:
    """Return the networks of a variant, by their folders."""
    return NETWORKS | ({"text_encoder": qwen_vl_vision.NETWORK} if variant == "edit" else {})


def variant_in(folder: Path) -> str:
    """Return the variant of the model in a folder, by the class of its pipeline, or in a file, by its name. Raises
    ModelError."""
    if (folder / INDEX).is_file():
        return PIPELINES.get(str(read_json(folder / INDEX).get("_class_name")), "text")
    return variant_of(of_name(folder.name))


def variant_of(known: KnownModel) -> str:
    """Return the variant of a known model."""
    return next(name for name, one in VARIANTS.items() if one is known)


def model_of(transformer: Path, options: LoadOptions) -> str:
    """Return the name of the known model that a transformer, a folder or file, is of. Raises UsageError."""
    chosen = options.variant_of(VARIANTS, "LongCat-Image")
    return (of_name(transformer.name) if chosen is None else VARIANTS[chosen]).name


def _variant(source: Source) -> str:
    """Return the variant that the user says, else that of the transformer's file if it is not the folder's own, else
    that of the folder. Raises UsageError and ModelError."""
    if (chosen := source.options.variant_of(VARIANTS, "LongCat-Image")) is not None:
        return chosen
    given = source.given.get("transformer")
    return variant_in(source.path) if given is None else variant_of(of_name(given.name))


OPENING = Opening(
    networks=NETWORKS,
    layouts={
        "transformer": longcat_names.LAYOUTS,
        "text_encoder": language_names.QWEN2_5_VL,
        "vae": kl_vae_names.LAYOUTS,
    },
    model=lambda source: VARIANTS[source.variant].name,
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES),
    given=lambda source: towers.language_first(source.options.parts, source.path / towers.FIRST, is_tower),
    variant=_variant,
    networks_of=lambda source: networks(source.variant),
    seeing=[qwen_vl_vision.NETWORK],
    complete=lambda source, checkpoint: replace(checkpoint, variant=source.variant),
)
