"""CLIP and T5 as parts of a model, for the rows of `Opening`: in its folder or file, or given in others, whose tensors
show which text encoder each is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import closed_on_error, is_file, is_folder
from qwenimg.common.families.opening import Given, Source
from qwenimg.common.formats.headers import open_header
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import given_twice, open_component
from qwenimg.common.parts.ldm_configs import Text
from qwenimg.common.parts.texts import clip_files, t5_files
from qwenimg.common.request.parts import LEFT_OUT
from qwenimg.common.runtime.checkpoint import Component


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


def open_t5(source: Source, name: str, network: Network, config: Any, prefix: str) -> Component:
    """Open T5. prefix: of its names in the file of a whole model."""
    place, for_rewrite = source.place(name), source.options.for_rewrite
    if source.is_inside(name):
        header = open_header(place)
        with closed_on_error(header.file):
            return t5_files.within(header, prefix, name, for_rewrite=for_rewrite)
    if name in source.given and not is_folder(place):
        return t5_files.open_t5(place, name, for_rewrite=for_rewrite)
    return open_component(network, place, config, name, for_rewrite=for_rewrite)


def open_clip(source: Source, name: str, network: Network, config: Any, text: Text) -> Component:
    """Open a CLIP. text: how it is in the file of a whole model."""
    place, for_rewrite = source.place(name), source.options.for_rewrite
    if source.is_inside(name):
        header = open_header(place)
        with closed_on_error(header.file):
            return clip_files.within(header, text, for_rewrite=for_rewrite)
    if name in source.given and not is_folder(place):
        return clip_files.open_file(place, name, config, is_known=is_file(source.path / name / "config.json"))
    return open_component(network, place, config, name, for_rewrite=for_rewrite)
