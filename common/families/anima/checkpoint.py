"""Rows from which an Anima is opened: its networks, of which the text conditioner may be in the transformer's file, and
whether it is distilled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.config import model_index
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.base.safe_files import is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.anima.known import BASE, SMALL_FILES, T5_TOKENIZER, TURBO, is_turbo
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.opening import Given, Opening, Source
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import anima_dit, anima_names
from qwenimg.common.networks.encoders import anima_conditioner, anima_conditioner_names, language_names, qwen
from qwenimg.common.networks.encoders.anima_conditioner import INSIDE
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.parts import merged_file
from qwenimg.common.parts.components import open_tokenizer
from qwenimg.common.parts.small_files import find_tokenizer
from qwenimg.common.parts.texts.t5_tokenizer import find_t5_tokenizer
from qwenimg.common.prompts import t5
from qwenimg.common.runtime.checkpoint import Checkpoint, Component, TokenizerFiles

CONDITIONER = "text_conditioner"
NETWORKS: dict[str, Network] = {
    "transformer": anima_dit.NETWORK,
    "text_encoder": replace(qwen.QWEN3, stated={"taps": ()}),  # its states are those after the final norm
    CONDITIONER: anima_conditioner.NETWORK,
    "vae": qwen_vae.NETWORK,
}
LAYOUTS = {
    "transformer": anima_names.LAYOUTS,
    "text_encoder": language_names.QWEN3,
    CONDITIONER: anima_conditioner_names.LAYOUTS,
}
FITS = (
    Fit(
        "the text conditioner wants text states of {} channels, the text encoder makes {}",
        lambda configs: configs[CONDITIONER].source_dim,
        lambda configs: [configs["text_encoder"].state_size],
    ),
    Fit(
        "the transformer wants text of {} channels, the text conditioner makes {}",
        lambda configs: configs["transformer"].text_embed_dim,
        lambda configs: [configs[CONDITIONER].target_dim],
    ),
    fits.Z_LATENTS,
)


def has_conditioner(header: Header) -> bool:
    """Return whether a file with this header has a text conditioner."""
    return LAYOUTS[CONDITIONER].find(header.tensors) is not None


def parts_of(header: Header) -> Collection[str]:
    """Return the parts in the file of a model with this header."""
    own = [CONDITIONER] if has_conditioner(header) else []
    return ("transformer", *own, *merged_file.parts_of(header))


def _given(source: Source) -> Given:
    """Return the parts that the user gives; a transformer's file, and its folder of mflux, has the text conditioner
    too."""
    parts = dict(source.options.parts)
    by_mflux = is_folder(source.path) and not is_file(model_index(source.path))
    transformer = parts.get("transformer", source.path / "transformer" if by_mflux else None)
    inside = transformer is not None and any(has_conditioner(peek(file)) for file in find_files(transformer).files)
    return parts | ({CONDITIONER: transformer} if inside and transformer else {})


def _networks(source: Source) -> Mapping[str, Network]:
    """Return the networks, the text conditioner's with the names that it has beside the transformer's."""
    beside = replace(anima_conditioner.NETWORK, rename=lambda key: key if key.startswith(INSIDE) else None)
    return NETWORKS | ({CONDITIONER: beside} if CONDITIONER in source.given else {})


def _tokenizers(source: Source, parts: Mapping[str, Component]) -> dict[str, TokenizerFiles]:
    """Return the tokenizers of the text encoder and, beside it or from another model, of the text conditioner."""
    found = tokenizers.of_language_model(source, parts, SMALL_FILES)
    own = find_tokenizer(source.path, source.options.tokenizer, SMALL_FILES).parent / T5_TOKENIZER
    config = parts[CONDITIONER].config
    folder = own if is_folder(own) else find_t5_tokenizer(source.place("transformer"), config.vocab_size)
    return found | {T5_TOKENIZER: open_tokenizer(folder, t5.load, config)}


def _complete(source: Source, checkpoint: Checkpoint) -> Checkpoint:
    name = display_name(source.given.get("transformer", source.path))
    if not is_turbo(name):
        return checkpoint
    asked = " ".join(f"--{option} {value:g}" for option, value in TURBO.items())
    line = f"{clean(name, 60)}: Anima Turbo, by its name, is made for {asked}"
    return replace(checkpoint, distilled=True, reports=(*checkpoint.reports, ("notice", line)))


OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=lambda source: BASE.name,
    given=_given,
    inside=parts_of,
    networks_of=_networks,
    tokenizers=_tokenizers,
    notes={CONDITIONER: ", with the file of a transformer that has it"},
    complete=_complete,
)


def described(folder: Path) -> str:
    """Return the model in `folder` and its purpose."""
    return f"Anima{' Turbo' if is_turbo(display_name(folder)) else ''}, text to image; license: {BASE.license}"
