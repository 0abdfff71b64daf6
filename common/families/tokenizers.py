"""The tokenizers of a model, for the rows of `Opening`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families.opening import Source
from qwenimg.common.networks.encoders import t5
from qwenimg.common.parts.components import open_tokenizer
from qwenimg.common.parts.downloads import CLIP_TOKENIZER, T5_TOKENIZER, Download
from qwenimg.common.parts.small_files import find_tokenizer
from qwenimg.common.parts.texts.clip_tokenizer import find_clip_tokenizer
from qwenimg.common.parts.texts.t5_tokenizer import find_t5_tokenizer
from qwenimg.common.prompts import clip as clip_tokenizer
from qwenimg.common.prompts import qwen
from qwenimg.common.prompts import t5 as t5_tokenizer
from qwenimg.common.runtime.checkpoint import Component, TokenizerFiles


def of_language_model(
    source: Source,
    components: Mapping[str, Component],
    download: Download,
    load: Callable[[Path], Any] = qwen.load,
) -> dict[str, TokenizerFiles]:
    """Return the tokenizer of a model with one text encoder; `download` has it for a model without one, and `load`
    reads it. Raises ModelError and UsageError."""
    path = find_tokenizer(source.path, source.options.tokenizer, download)
    return {"text_encoder": open_tokenizer(path, load, components["text_encoder"].config)}


def of_clip_and_t5(
    source: Source, components: Mapping[str, Component], pads: Mapping[str, str]
) -> dict[str, TokenizerFiles]:
    """Return the tokenizers of the text encoders: those of a folder, else the chosen ones or those on this machine.
    pads: the padding of each CLIP, for a vocabulary that does not show it. Raises ModelError and UsageError."""
    path, chosen = source.path, source.options.tokenizer
    has_own = is_folder(path / "tokenizer")
    if has_own and chosen is not None:
        raise UsageError(f"--tokenizer is for a model that has none; {clean(path, 80)} has its own")
    near = path if source.in_one_file else source.given.get("transformer", path)  # beside its files
    found, absent = {}, dict[Download, ModelError]()
    for name, part in components.items():
        if part.role != "text":
            continue
        is_t5, size = part.network == t5.NETWORK.name, part.config.vocab_size
        load: Callable[[Path], Any] = t5_tokenizer.load if is_t5 else clip_tokenizer.load
        try:
            if has_own:
                folder = path / name.replace("text_encoder", "tokenizer")
            elif is_t5:
                folder = find_t5_tokenizer(near, size, chosen)
            else:
                folder = find_clip_tokenizer(near, size, chosen, source.options.refined_tokenizer)
                load = partial(clip_tokenizer.load, pad=pads[name])
        except ModelError as error:
            absent[T5_TOKENIZER if is_t5 else CLIP_TOKENIZER] = error
            continue
        found[name] = open_tokenizer(folder, load, part.config)
    if len(absent) > 1 and chosen is None:
        ways = " and ".join(f"qwenimg pull {one.name} ({size_text(one.bytes)})" for one in absent)
        raise ModelError(
            f"{clean(near.name, 60)}: needs the vocabularies of CLIP and of T5, which files of weights do not hold, "
            f"and neither is on this machine: {ways}, or --tokenizer FOLDER"
        )
    if absent:
        raise next(iter(absent.values()))
    return found
