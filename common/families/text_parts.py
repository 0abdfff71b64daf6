"""CLIP and T5 as parts of a model, for the rows of `Opening`: in its folder or file, or given in others, whose tensors
show which text encoder each is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import is_file, is_folder
from qwenimg.common.families.opening import CONFIG, Given, Source
from qwenimg.common.networks.encoders import clip_names, t5_names
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.networks.layout import Layouts
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import given_twice, open_component
from qwenimg.common.parts.open_file import is_in, open_part
from qwenimg.common.parts.texts.clip_files import Text, of_type
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
        name = part if not is_text else t5_name if is_in(t5_names.LAYOUTS, path) else clip_of(source, path)
        if name in places:
            raise given_twice(name, places[name], path)
        places[name] = path
    return places


def open_t5(source: Source, name: str, network: Network, config: Any, prefix: str) -> Component:
    """Open T5. prefix: of its names in the file of a whole model."""
    return _opened(source, name, network, config, t5_names.LAYOUTS, T5Config(), prefix)


def open_clip(source: Source, name: str, network: Network, config: Any, text: Text) -> Component:
    """Open a CLIP. text: how it is in the file of a whole model."""
    is_known = not source.is_inside(name) and is_file(source.path / name / CONFIG)
    like = config if is_known else of_type(text.like)
    return _opened(source, name, network, config, clip_names.LAYOUTS, like, text.prefix)


def _opened(
    source: Source, name: str, network: Network, config: Any, layouts: Layouts, like: Any, prefix: str
) -> Component:
    place, for_rewrite = source.place(name), source.options.for_rewrite
    if is_folder(place):
        return open_component(network, place, config, name, for_rewrite=for_rewrite)
    inside = prefix if source.is_inside(name) else ""
    return open_part(layouts, place, like, name, inside=inside, for_rewrite=for_rewrite)
