"""Configurations of language models that are text encoders: flat, or nested beside those of other networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from qwenimg.common.base.errors import ModelError


def language_fields(data: Mapping[str, Any], config: type[Any], kind: str) -> dict[str, Any]:
    """Return the fields of `config` from a flat or nested config.json of the model type `kind`. Raises ModelError for
    an unsupported value."""
    if data.get("model_type", kind) != kind:
        raise ModelError(f"model_type {data['model_type']!r} is not supported; expected {kind!r}")
    text = data.get("text_config", data)
    if not isinstance(text, Mapping):
        raise ModelError("text_config is not an object")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ModelError("rope_parameters is not an object")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "mrope"):
        raise ModelError(f"RoPE of type {rope_type!r} is not supported; expected 'default' or 'mrope'")
    if text.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {text['hidden_act']!r} is not supported; expected 'silu'")
    if text.get("use_sliding_window"):
        raise ModelError("use_sliding_window is true: sliding-window attention is not supported")
    values = {field.name: text[field.name] for field in fields(config) if field.name in text}
    return {"rope_theta": rope["rope_theta"]} | values if "rope_theta" in rope else values
