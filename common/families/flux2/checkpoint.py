"""Rows from which a FLUX.2 is opened, klein, klein KV or dev: its networks, and the published model that one without
configurations is like. No tensor tells klein KV from klein: the class in model_index.json does, or a file's name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import INDEX, read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.base.safe_files import bad, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.flux2.known import SMALL_FILES
from qwenimg.common.families.flux2.known_dev import DEV
from qwenimg.common.families.flux2.known_dev import SMALL_FILES as DEV_FILES
from qwenimg.common.families.opening import Opening, Source
from qwenimg.common.networks.denoisers import flux2_dit, flux2_kv_dit, flux2_names
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.encoders import language_names, qwen
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import flux2_vae, flux2_vae_names
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.components import on_paper
from qwenimg.common.parts.open_file import stored_shape
from qwenimg.common.prompts import language
from qwenimg.common.runtime.checkpoint import Checkpoint

TAPS, DEV_TAPS = (9, 18, 27), (10, 20, 30)
"""The layers of the text encoder behind which states are taken, of klein and of dev. No file of a model states
them."""
GUIDANCE = "time_guidance_embed.guidance_embedder.linear_1.weight"
"""A parameter of dev's transformer alone."""
KV, KV_PIPELINE = "kv", "Flux2KleinKVPipeline"
"""The variant of a checkpoint that keeps keys and values of references, and its class in model_index.json."""
_KV = re.compile(r"(?<![a-z])kv(?![a-z])")


NETWORKS: dict[str, Network] = {
    "transformer": flux2_dit.NETWORK,
    "text_encoder": replace(qwen.QWEN3, stated={"taps": TAPS}),
    "vae": flux2_vae.NETWORK,
}
DEV_NETWORKS: dict[str, Network] = NETWORKS | {
    "text_encoder": replace(language_names.MISTRAL_SMALL_3.network, stated={"taps": DEV_TAPS, "pads_first": True})
}
KV_NETWORKS: dict[str, Network] = NETWORKS | {"transformer": flux2_kv_dit.NETWORK}
LAYOUTS = {
    "transformer": flux2_names.LAYOUTS,
    "text_encoder": language_names.QWEN3,
    "vae": flux2_vae_names.LAYOUTS,
}
DEV_LAYOUTS = LAYOUTS | {"text_encoder": language_names.MISTRAL_SMALL_3}
FITS = (
    fits.text_states(lambda configs: configs["text_encoder"].state_size),
    fits.patches(lambda configs: configs["vae"].patch_channels),
)


def model_of(transformer: Path) -> str:
    """Return the name of the published model that the transformer in a folder or file is of: dev if guidance is an
    input, else the klein of the size that its width is nearer to, distilled unless its name says `base`, and 9B KV if
    that says `kv`. Raises ModelError."""
    if stored_shape(LAYOUTS["transformer"], transformer, GUIDANCE) is not None:
        return DEV.name
    models = (known_configs.read(f"flux2-klein-{size}", "transformer", flux2_dit.NETWORK) for size in ("4b", "9b"))
    small, large = (model.dim for model in models)
    width, *_ = stored_shape(LAYOUTS["transformer"], transformer, "x_embedder.weight") or (small,)
    size = "4b" if width - small < large - width else "9b"
    name = display_name(transformer).lower()
    return f"flux2-klein-{'base-' if 'base' in name else ''}{size}{'-kv' if size == '9b' and _KV.search(name) else ''}"


def variant_of(index: Path) -> str:
    """Return the variant of the model of `index`, a model_index.json. Raises ModelError."""
    return KV if read_json(index).get("_class_name") == KV_PIPELINE else ""


def _variant(source: Source) -> str:
    """Return the variant: that which the name of a given transformer's file says, else that of the model's index."""
    given = source.given.get("transformer")
    named = given is not None and not is_folder(given) and _KV.search(given.name.lower())
    return KV if named else variant_of(source.small_file(INDEX))


def is_distilled(index: Path) -> bool:
    """Return whether the model of `index`, a model_index.json, draws in few steps without guidance. Raises
    ModelError."""
    value = read_json(index).get("is_distilled", variant_of(index) == KV)
    if not isinstance(value, bool):
        raise bad(index, f"'is_distilled' is {clean(value, 40)}; expected true or false")
    return value


def published(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return a known klein with what its index tells. Raises ModelError."""
    variant = variant_of(folder / INDEX)
    if variant == KV:
        part = on_paper(flux2_kv_dit.NETWORK, checkpoint["transformer"].config, "bfloat16")
        checkpoint = checkpoint.with_part("transformer", part)
    return replace(checkpoint, distilled=is_distilled(folder / INDEX), variant=variant)


def _check(source: Source, config: Any) -> None:
    """Raise ModelError for the transformer of a klein in dev, and the reverse."""
    is_dev = source.rows is DEV_OPENING
    if isinstance(config, Flux2Config) and config.guidance_embeds != is_dev:
        own, other = ("FLUX.2 dev", "klein") if is_dev else ("FLUX.2 klein", "dev")
        raise ModelError(
            f"{clean(source.path)}: the transformer is FLUX.2 {other}'s by its guidance_embeds, and the other parts "
            f"are {own}'s: give all parts of one model"
        )


def _config(source: Source, part: str, config: Any) -> Any:
    _check(source, config)
    return config


def _complete(source: Source, checkpoint: Checkpoint) -> Checkpoint:
    _check(source, checkpoint["transformer"].config)  # which the tensors of a file may have shown
    distilled = source.variant == KV or is_distilled(source.small_file(INDEX))
    return replace(checkpoint, distilled=distilled, variant=source.variant)


OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=lambda source: model_of(source.path / "transformer"),
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES),
    variant=_variant,
    networks_of=lambda source: KV_NETWORKS if source.variant == KV else NETWORKS,
    config=_config,
    complete=_complete,
)
DEV_OPENING = replace(
    OPENING,
    networks=DEV_NETWORKS,
    variant=lambda source: "",
    networks_of=None,
    layouts=DEV_LAYOUTS,
    model=lambda source: DEV.name,
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, DEV_FILES, language.load),
)
