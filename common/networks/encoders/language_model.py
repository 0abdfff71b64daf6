"""Configurations of language models used as text encoders, flat or nested in a larger configuration, and llama.cpp's
tensor names in GGUF files."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean

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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
IGNORED = """
model_type text_config vision_config rope_parameters rope_scaling rope_theta hidden_act use_sliding_window
tie_word_embeddings layer_types sliding_window max_window_layers head_dim attention_bias
max_position_embeddings initializer_range use_cache dtype torch_dtype transformers_version architectures auto_map
pretraining_tp rope_deltas problem_type id2label label2id output_attentions output_hidden_states return_dict
torchscript use_bfloat16 tf_legacy_loss pruned_heads is_decoder is_encoder_decoder cross_attention_hidden_size
add_cross_attention tie_encoder_decoder chunk_size_feed_forward finetuning_task tokenizer_class prefix
task_specific_params
max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
num_return_sequences output_scores return_dict_in_generate exponential_decay_length_penalty suppress_tokens
begin_suppress_tokens remove_invalid_values
"""
"""Keys of a language model's configuration that are read apart, or change nothing in the forward: limits, training, how
weights are stored, and how text was drawn, in files of older programs."""
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


def language_fields(data: Mapping[str, Any], config: type[Any], kind: str) -> dict[str, Any]:
    """Return the fields of `config` from a flat or nested config.json of the model type `kind`. Raises ModelError for
    an unsupported value, and for a key of the language model that this version does not know."""
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
    stored = {field.name for field in fields(config) if field.metadata.get("in_files", True)}
    check_known(text, stored)
    values = {name: text[name] for name in stored if name in text}
    tied = data.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    values["tie_word_embeddings"] = tied
    return {"rope_theta": rope["rope_theta"]} | values if "rope_theta" in rope else values


def check_known(text: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ModelError for a key of a language model's configuration that is neither `known` nor without a meaning for
    the forward, unless its value switches something off."""
    ignored = IGNORED.split()
    for key, value in text.items():
        harmless = key in ignored or key.startswith(("_", "unsloth")) or key.endswith(("_token_id", "_dropout"))
        if not (harmless or key in known or value is None or value is False):
            raise ModelError(f"{clean(key, 60)!r} is {clean(value, 40)}: this version does not know what it changes")


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
