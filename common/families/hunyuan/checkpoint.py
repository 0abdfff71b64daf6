"""Rows from which a Hunyuan-DiT is opened: whether it is of the form of 1.2, or of 1.0 and 1.1, which see sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.base.safe_files import is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families import fits, text_parts
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.hunyuan.known import NEWER, OLDER, SMALL_FILES
from qwenimg.common.families.hunyuan.texts import BERT, T5
from qwenimg.common.families.opening import CONFIG, SCHEDULER, Opening, Source, check_tensors
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import hunyuan_dit, hunyuan_names
from qwenimg.common.networks.encoders import bert, bert_names, t5, t5_names
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.parts import merged_file
from qwenimg.common.parts.components import open_tokenizer
from qwenimg.common.parts.small_files import find_tokenizer
from qwenimg.common.prompts import bert as bert_tokenizer
from qwenimg.common.prompts import t5 as t5_tokenizer
from qwenimg.common.runtime.checkpoint import Checkpoint, Component, TokenizerFiles
from qwenimg.common.sampling.discrete import DiffusionConfig, parse_diffusion

NETWORKS = {"transformer": hunyuan_dit.NETWORK, BERT: bert.NETWORK, T5: t5.NETWORK, "vae": kl_vae.NETWORK}
LAYOUTS = {
    "transformer": hunyuan_names.LAYOUTS,
    BERT: bert_names.LAYOUTS,
    T5: t5_names.LAYOUTS,
    "vae": kl_vae_names.LAYOUTS,
}
PREFIXES = {BERT: "text_encoders.hydit_clip.transformer.", T5: "text_encoders.mt5xl.transformer."}
"""Of the text encoders in the file of a whole model."""
FITS = (
    fits.text_states(
        lambda configs: configs[BERT].hidden_size, lambda configs: configs["transformer"].cross_attention_dim
    ),
    Fit(
        "the transformer wants text states of {} channels, T5 makes {}",
        lambda configs: configs["transformer"].cross_attention_dim_t5,
        lambda configs: [configs[T5].d_model],
    ),
    fits.LATENTS,
)


def parts_of(header: Header) -> list[str]:
    """Return the parts in a file that has a transformer in its authors' names; none of another file."""
    return merged_file.named_parts(header, hunyuan_names.LAYOUTS, PREFIXES)


def variant_of(transformer: Path) -> str:
    """Return the variant of a transformer in a folder or file: 1.0 and 1.1 have an embedding of styles. Raises
    ModelError."""
    if is_file(transformer):
        return OLDER if any(name.endswith(hunyuan_names.STYLE) for name in peek(transformer).tensors) else NEWER
    places = (transformer / CONFIG, transformer / "transformer" / CONFIG)
    config = next((read_json(place) for place in places if is_file(place)), {})
    return OLDER if config.get("use_style_cond_and_image_meta_size", not config) is True else NEWER


def _transformer(source: Source) -> Path:
    return source.given.get("transformer", source.path)


def _variant(source: Source) -> str:
    return variant_of(_transformer(source))


def _levels(source: Source) -> DiffusionConfig:
    path = source.small_file(SCHEDULER)
    return parse_diffusion(read_json(path, infinities=True), path)


def is_distilled(path: Path) -> bool:
    """Return whether the name of a model says that it is distilled, which nothing else does."""
    return "distill" in display_name(path).lower()


def complete(checkpoint: Checkpoint, transformer: Path) -> Checkpoint:
    """Return a checkpoint with its variant."""
    variant = OLDER if checkpoint["transformer"].config.sees_size else NEWER
    return replace(checkpoint, variant=variant, distilled=is_distilled(transformer))


def _tokenizers(source: Source, components: Mapping[str, Component]) -> dict[str, TokenizerFiles]:
    """Return the tokenizers of a folder, else those of the chosen one. Raises ModelError and UsageError."""
    path, chosen = source.path, source.options.tokenizer
    if is_folder(path / "tokenizer"):
        if chosen is not None:
            raise UsageError(f"--tokenizer is for a model that has none; {clean(path, 80)} has its own")
        first = path / "tokenizer"
    else:
        near = path if source.in_one_file else _transformer(source)
        first = find_tokenizer(near, chosen, SMALL_FILES)
    second = first.parent / "tokenizer_2"
    rows: tuple[tuple[str, Path, Any], ...] = ((BERT, first, bert_tokenizer), (T5, second, t5_tokenizer))
    return {name: open_tokenizer(folder, module.load, components[name].config) for name, folder, module in rows}


def _bert_of(source: Source, path: Path) -> str:
    return BERT


OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=_variant,
    variant=_variant,
    levels=_levels,
    tokenizers=_tokenizers,
    given=lambda source: text_parts.named_by_tensors(source, T5, _bert_of),
    inside=parts_of,
    prefixes=PREFIXES,
    check_file=lambda source, parts: check_tensors(source, parts, "Hunyuan-DiT", ["text_encoders."]),
    complete=lambda source, checkpoint: complete(checkpoint, _transformer(source)),
)


def described(folder: Path) -> str:
    """Return the model in `folder` and its purpose."""
    return f"{title(variant_of(folder))}, text to image"


def title(variant: str) -> str:
    """Return the title of a variant."""
    return "Hunyuan-DiT 1.0 or 1.1" if variant == OLDER else "Hunyuan-DiT 1.2"
