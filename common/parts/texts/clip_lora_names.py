"""LoRA files' names for the layers of CLIP's text encoders."""

from __future__ import annotations

import re
from collections.abc import Iterator

from qwenimg.common.base.shape import Manifest
from qwenimg.common.weights.loras.lora_names import TEXT, TEXT_1, TEXT_2, ComponentNames, component_names

_PROJECTION = re.compile(r"(?P<owner>.+\.self_attn)\.(?P<letter>q|k|v|out)_proj")


def text_part(name: str, weights: Manifest, *, two: bool) -> ComponentNames:
    """Return the table of the text encoder `name`, the only one or one of two."""
    prefixes = (TEXT_2 if name == "text_encoder_2" else TEXT_1) if two else (*TEXT_2, *TEXT)
    paths = (name.removesuffix(".weight") for name in weights if name.endswith(".weight"))
    return component_names(name, weights, prefixes, {path: list(_others(path)) for path in paths})


def _others(path: str) -> Iterator[str]:
    """Yield the path behind the name of the text model, and diffusers' older names of a projection."""
    yield f"text_model.{path}"
    if match := _PROJECTION.fullmatch(path):
        for prefix in ("", "text_model."):
            yield f"{prefix}{match['owner']}.to_{match['letter']}"
