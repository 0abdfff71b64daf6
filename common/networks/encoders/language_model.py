"""Configurations of language models used as text encoders, flat or nested in a larger configuration, and llama.cpp's
tensor names in GGUF files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params

LLAMA_CPP = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
COMPUTED = ".inv_freq"
"""End of the names of RoPE's frequencies, which some files have and which are computed here."""
_LLAMA_CPP_KEY = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>[a-z_]+)\.(?P<leaf>weight|bias)")


def from_llama_cpp(key: str, names: Mapping[str, str] = LLAMA_CPP) -> str:
    """Return the manifest's name of a tensor that llama.cpp calls `key`, by its `names` of layers; other keys
    unchanged."""
    match = _LLAMA_CPP_KEY.fullmatch(key)
    if match is None or match["part"] not in names:
        return key
    layer = f"layers.{match['layer']}." if match["layer"] else ""
    return f"{layer}{names[match['part']]}.{match['leaf']}"


def manifest(config: Any, attention: Manifest) -> Manifest:
    """Return the shape of every tensor of a language model, by its key after the file's prefix. attention: the shapes
    of one layer's attention; config: its sizes."""
    layer = params.merge(
        params.norm("input_layernorm", config.hidden_size),
        params.under("self_attn", attention),
        params.norm("post_attention_layernorm", config.hidden_size),
        params.linear("mlp.gate_proj", config.intermediate_size, config.hidden_size, bias=False),
        params.linear("mlp.up_proj", config.intermediate_size, config.hidden_size, bias=False),
        params.linear("mlp.down_proj", config.hidden_size, config.intermediate_size, bias=False),
    )
    return params.merge(
        {"embed_tokens.weight": (config.vocab_size, config.hidden_size)},
        params.repeat("layers", config.num_hidden_layers, layer),
        params.norm("norm", config.hidden_size),
    )


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


def vision_fields(
    data: Mapping[str, Any], names: Mapping[str, str], fixed: Mapping[str, object], width: int
) -> dict[str, Any]:
    """Return the fields of a vision tower from the `vision_config` of a config.json. names: the fields of its keys;
    fixed: the only values of other keys that are supported; width: the channels that the language model takes. Raises
    ModelError for an unsupported value."""
    vision = data.get("vision_config", {})
    if not isinstance(vision, Mapping):
        raise ModelError("vision_config is not an object")
    for key, expected in fixed.items():
        if vision.get(key, expected) != expected:
            raise ModelError(f"vision_config: {key} {vision[key]!r} is not supported; expected {expected!r}")
    if vision.get("out_hidden_size", width) != width:
        raise ModelError(
            f"vision_config: the tower makes {vision['out_hidden_size']} channels, the language model takes {width}"
        )
    return {ours: vision[theirs] for theirs, ours in names.items() if theirs in vision}
