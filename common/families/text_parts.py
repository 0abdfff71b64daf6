"""CLIP and T5 as parts of a model, for the rows of `Opening`: in its folder or file, or given in others, whose tensors
show which text encoder each is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.safe_files import closed_on_error, is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families.opening import Given, Source
from qwenimg.common.formats.headers import open_header
from qwenimg.common.networks.encoders import t5
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import given_twice, open_component, open_tokenizer
from qwenimg.common.parts.ldm_configs import Text
from qwenimg.common.parts.texts import clip_files, t5_files
from qwenimg.common.parts.texts.clip_tokenizer import find_clip_tokenizer
from qwenimg.common.parts.texts.t5_tokenizer import find_t5_tokenizer
from qwenimg.common.prompts import clip as clip_tokenizer
from qwenimg.common.prompts import t5 as t5_tokenizer
from qwenimg.common.request.parts import LEFT_OUT
from qwenimg.common.runtime.checkpoint import Component, TokenizerFiles


def named_by_tensors(source: Source, t5_name: str, clip_of: Callable[[Source, Path], str]) -> Given:
    """Return the parts that are given, with the text encoders by their names in the model. clip_of: the name of a CLIP
    in a folder or file. Raises ModelError, and UsageError for one that is given twice."""
    places: dict[str, Path] = {}
    for part, path in source.options.parts.items():
        if path == LEFT_OUT:
            continue
        is_text = part.startswith("text_encoder")
        name = part if not is_text else t5_name if t5_files.is_t5(path) else clip_of(source, path)
        if name in places:
            raise given_twice(name, places[name], path)
        places[name] = path
    return places


def open_t5(source: Source, name: str, network: Network, config: Any, *, prefix: str) -> Component:
    """Open T5. prefix: of its names in the file of a whole model."""
    place, for_rewrite = source.place(name), source.options.for_rewrite
    if source.is_inside(name):
        header = open_header(place)
        with closed_on_error(header.file):
            return t5_files.within(header, prefix, name, for_rewrite=for_rewrite)
    if name in source.given and not is_folder(place):
        return t5_files.open_t5(place, name, for_rewrite=for_rewrite)
    return open_component(network, place, config, name, for_rewrite=for_rewrite)


def open_clip(source: Source, name: str, network: Network, config: Any, *, text: Text) -> Component:
    """Open a CLIP. text: how it is in the file of a whole model."""
    place, for_rewrite = source.place(name), source.options.for_rewrite
    if source.is_inside(name):
        header = open_header(place)
        with closed_on_error(header.file):
            return clip_files.within(header, text, for_rewrite=for_rewrite)
    if name in source.given and not is_folder(place):
        return clip_files.open_file(place, name, config, is_known=is_file(source.path / name / "config.json"))
    return open_component(network, place, config, name, for_rewrite=for_rewrite)


def tokenizers(
    source: Source, components: Mapping[str, Component], pads: Mapping[str, str]
) -> dict[str, TokenizerFiles]:
    """Return the tokenizers of the text encoders: those of a folder, else the chosen ones or those on this machine.
    pads: the padding of each CLIP, for a vocabulary that does not show it. Raises ModelError and UsageError."""
    path, chosen = source.path, source.options.tokenizer
    has_own = is_folder(path / "tokenizer")
    if has_own and chosen is not None:
        raise UsageError(f"--tokenizer is for a model that has none; {clean(path, 80)} has its own")
    near = path if source.in_one_file else source.given.get("transformer", path)  # beside its files
    found = {}
    for name, part in components.items():
        load: Callable[[Path], Any] = t5_tokenizer.load if part.network == t5.NETWORK.name else clip_tokenizer.load
        if part.role != "text":
            continue
        if has_own:
            folder = path / name.replace("text_encoder", "tokenizer")
        elif part.network == t5.NETWORK.name:
            folder = find_t5_tokenizer(near, part.config.vocab_size, chosen)
        else:
            also = source.options.refined_tokenizer
            folder = find_clip_tokenizer(near, part.config.vocab_size, chosen, also)
            load = partial(clip_tokenizer.load, pad=pads[name])
        found[name] = open_tokenizer(folder, load, part.config)
    return found
