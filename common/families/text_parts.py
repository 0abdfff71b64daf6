"""CLIP and T5 as parts of a model, for the rows of `Opening`: those that are given show by their tensors which text
encoders they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import is_file, is_folder
from qwenimg.common.families.opening import CONFIG, Given, Source
from qwenimg.common.networks.encoders import t5_names
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.parts.components import given_twice
from qwenimg.common.parts.open_file import is_in
from qwenimg.common.parts.texts.clip_files import of_type
from qwenimg.common.request.parts import LEFT_OUT


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


def config(source: Source, part: str, config: Any) -> Any:
    """Return the configuration of a part; the sizes of a CLIP that has none are those of its file."""
    is_known = not isinstance(config, CLIPConfig) or is_file(source.path / part / CONFIG)
    return config if is_known or is_folder(source.place(part)) else of_type(config)
