"""Language models other than Qwen's text encoders, as rows of the network `decoder`: LLaMA (SmolLM2 too), Mistral,
Ministral 3, Gemma 2, Phi-3 and Qwen2.5.

What is unusual about them:
- the configuration of a Mistral that sees is nested under `text_config`, whose model type counts;
- Mistral and Phi-3 may have a window in all layers, Gemma 2 has it in every second one, from the first on;
- Ministral 3 lowers queries beyond the texts of its first training, 16,384 tokens, which no text here has;
- Phi-3 has q, k and v in one tensor, and the two halves of the feed-forward in another;
- llama.cpp has the rows of q and k of its `llama` and `mistral3` in another order, in which RoPE turns neighbouring
  channels; the gains of Gemma 2's norms whole; the scaled RoPE of LLaMA 3.1 as a tensor (`decoder_metadata`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt
from typing import Any

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean
from qwenimg.common.networks.encoders import decoder, qwen
from qwenimg.common.networks.encoders.decoder import GELU, HEAD, SILU, DecoderConfig
from qwenimg.common.networks.encoders.language_model import COMPUTED, LLAMA_CPP, check_known, from_llama_cpp
from qwenimg.common.networks.encoders.qwen import HEADS
from qwenimg.common.networks.network import Network
from qwenimg.common.numbers.scaled_rope import yarn_attention
from qwenimg.common.weights.keys import Rows, Splits

_QWEN = {row.kind: row for row in (qwen.QWEN2_5_VL, qwen.QWEN3, qwen.QWEN3_VL)}
ROPE_TENSOR = "rope_freqs.weight"
"""LLaMA 3.1's factors of RoPE's frequencies in llama.cpp's files."""
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_TOWERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
)
# Keys whose only supported values these are; also those that another key stands for
_FIXED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "use_bidirectional_attention": (False, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
}
_OF_OTHERS = ("is_llama_config", "transformers.js_config")  # keys that other programs read
_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
        *("original_max_position_embeddings", "max_position_embeddings", "truncate", "llama_4_scaling_beta"),
    ),
}  # fmt: skip
_ANY_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_WINDOW = ("sliding_attention", "full_attention")


@dataclass(frozen=True, kw_only=True)
class DecoderKind:
    """The models of one type."""

    title: str
    model_type: str
    llama_cpp: str = ""  # the architecture of its GGUF files
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that all of them have
    in_gguf: Mapping[str, Any] = field(default_factory=dict)  # those of the tensors in GGUF files
    keys: tuple[str, ...] = ()  # keys of config.json besides those of all kinds
    names: Mapping[str, str] = field(default_factory=dict)  # llama.cpp's names of layers besides those of all kinds
    tied: bool = False  # where a file does not say so
    windows: Callable[[int], bool] | None = None  # the layers with a window, where a file names none; None: none


KINDS = (
    DecoderKind(title="LLaMA", model_type="llama", llama_cpp="llama", in_gguf={"rope_pairs": True}),
    DecoderKind(
        title="Mistral", model_type="mistral", in_gguf={"rope_pairs": True}, windows=lambda layer: True
    ),
    DecoderKind(title="Ministral", model_type="ministral", windows=lambda layer: True),
    DecoderKind(
        title="Ministral 3", model_type="ministral3", llama_cpp="mistral3", in_gguf={"rope_pairs": True},
        windows=lambda layer: True,
    ),
    DecoderKind(
        title="Gemma 2",
        model_type="gemma2",
        llama_cpp="gemma2",
        fixed={"hidden_act": GELU, "post_norms": True, "centred_norms": True},
        in_gguf={"centred_norms": False},
        keys=("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
              "cache_implementation"),
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        tied=True,
        windows=lambda layer: layer % 2 == 0,
    ),
    DecoderKind(
        title="Phi-3",
        model_type="phi3",
        llama_cpp="phi3",
        keys=("resid_pdrop", "embd_pdrop", "original_max_position_embeddings"),
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        windows=lambda layer: True,
    ),
    DecoderKind(title="Qwen2.5", model_type="qwen2", llama_cpp="qwen2", fixed={"qkv_bias": True}),
)  # fmt: skip


# config.json


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` from a flat or nested config.json of one of KINDS. Raises ModelError for an
    unsupported value, and for a key that this version does not know."""
    text = data.get("text_config", data)
    if not isinstance(text, Mapping):
        raise ModelError("text_config is not an object")
    kind = kind_of(str(text.get("model_type", data.get("model_type"))))
    check_known(text, {*_SIZES, *_FIXED, *kind.keys, *_OF_OTHERS})
    for key, known in _FIXED.items():
        if text.get(key) not in known:
            raise ModelError(f"{key} is {clean(text[key], 40)}; expected {known[0]}")
    expected = kind.fixed.get("hidden_act", SILU)
    activations = [text[key] for key in ("hidden_act", "hidden_activation") if text.get(key) is not None]
    if any(one != expected and (one, expected) != ("gelu", GELU) for one in activations):
        raise ModelError(f"hidden_act {clean(activations, 60)} is not supported; expected {expected!r}")
    values: dict[str, Any] = {name: text[name] for name in _SIZES if text.get(name) is not None}
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    tied = data.get("tie_word_embeddings", text.get("tie_word_embeddings", kind.tied))
    values |= {**kind.fixed, "tie_word_embeddings": tied, **_windows(kind, text), **_rope(text)}
    return values | (_scales(text, values) if kind.model_type == "gemma2" else {})


def kind_of(model_type: str) -> DecoderKind:
    """Return the kind of a model type. Raises ModelError."""
    for kind in KINDS:
        if kind.model_type == model_type:
            return kind
    known = ", ".join([*(kind.model_type for kind in KINDS), *_QWEN])
    raise ModelError(f"model_type {clean(model_type, 40)!r} is no language model that is read; those are {known}")


def _number(table: Mapping[str, Any], key: str, default: float) -> float:
    """Return a number of a table, which is checked where it is computed with. Raises ModelError."""
    value = default if table.get(key) is None else table[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ModelError(f"{key} is {clean(value, 40)}; expected a number from 0 to 1e9")
    return float(value)


def _scales(text: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    scalar = _number(text, "query_pre_attn_scalar", 256)
    if scalar < 1:
        raise ModelError(f"query_pre_attn_scalar is {scalar}; expected at least 1")
    return {
        "query_scale": 1 / sqrt(scalar),
        "embedding_scale": sqrt(_number(values, "hidden_size", 2304)),
        "attn_logit_softcapping": _number(text, "attn_logit_softcapping", 0),
        "final_logit_softcapping": _number(text, "final_logit_softcapping", 0),
    }


def _windows(kind: DecoderKind, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window and its layers."""
    types, layers = text.get("layer_types"), text.get("num_hidden_layers")
    if types is not None and not (isinstance(types, list) and all(one in _WINDOW for one in types)):
        raise ModelError(f"layer_types is {clean(types, 60)}; expected a list of {' and '.join(_WINDOW)}")
    if types is not None and len(types) != layers:
        raise ModelError(f"layer_types has {len(types)} layers, num_hidden_layers is {clean(layers, 40)}")
    if types is not None:
        sliding = [i for i, one in enumerate(types) if one == _WINDOW[0]]
    elif kind.windows is not None and text.get("sliding_window") is not None:
        sliding = window_layers(kind, layers)
    else:
        return {}
    return {"sliding_window": text.get("sliding_window") or 0, "sliding_layers": sliding} if sliding else {}


def window_layers(kind: DecoderKind, layers: object) -> list[int]:
    """Return the layers with a window where a file names none; `layers` is checked where it is a field."""
    count = layers if isinstance(layers, int) and 0 < layers <= 1000 else 0
    return [layer for layer in range(count) if kind.windows is not None and kind.windows(layer)]


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of RoPE."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ModelError("rope_parameters is not an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", text.get("rope_theta", 1e4))
    keys = _ROPE_KEYS.get(kind) if isinstance(kind, str) else None
    if keys is None:
        raise ModelError(f"RoPE of type {clean(kind, 40)!r} is not supported; expected {', '.join(_ROPE_KEYS)}")
    unknown = [key for key in rope.keys() - {*keys, *_ANY_ROPE} if rope[key] is not None]
    if unknown or rope.get("partial_rotary_factor", 1) != 1 or rope.get("truncate", True) is not True:
        raise ModelError(f"RoPE of type {kind!r} has values that are not supported: {clean(dict(rope), 120)}")
    values: dict[str, Any] = {"rope_theta": theta, "rope_type": kind}
    if kind == "default":
        return values
    factor = _number(rope, "factor", 1)
    values |= {"rope_factor": factor, "rope_original": rope.get("original_max_position_embeddings", 0)}
    if kind == "llama3":
        low, high = _number(rope, "low_freq_factor", 1), _number(rope, "high_freq_factor", 4)
        return values | {"rope_low": low, "rope_high": high}
    if kind == "linear":
        return values
    return values | {
        "rope_low": _number(rope, "beta_slow", 1),
        "rope_high": _number(rope, "beta_fast", 32),
        "rope_attention": _number(
            rope, "attention_factor",
            yarn_attention(factor, _number(rope, "mscale", 0), _number(rope, "mscale_all_dim", 0)),
        ),
    }  # fmt: skip


def written(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the config.json of a language model of plain layers, from which `fields` reads `config` again."""
    rope: dict[str, object] = {"rope_type": config.rope_type, "rope_theta": config.rope_theta}
    if config.rope_type == "yarn":
        rope |= {
            "factor": config.rope_factor,
            "beta_slow": config.rope_low,
            "beta_fast": config.rope_high,
            "attention_factor": config.rope_attention,
            "original_max_position_embeddings": config.rope_original,
        }
    sizes = {name: getattr(config, name) for name in _SIZES}
    tied = config.tie_word_embeddings
    return {"model_type": model_type, **sizes, "tie_word_embeddings": tied, "rope_parameters": rope}


# Tensors


def rename(names: Mapping[str, str], config: DecoderConfig | None, key: str) -> str | None:
    """Return the manifest key of a file's key, of transformers, llama.cpp (by its `names`) or a program for Macs; None
    for a tensor that is not used. config: None for the names without a head."""
    if key in HEADS:
        return HEAD if config is not None and config.has_head else None
    if key == ROPE_TENSOR or key.startswith(_TOWERS) or key.endswith(COMPUTED):
        return None
    prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), "")
    return from_llama_cpp(key.removeprefix(prefix), names)


def splits(config: DecoderConfig) -> Splits:
    """Return the weights that files have in one tensor, with their rows there."""
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    heads, parts = queries + 2 * keys, dict[str, dict[str, Rows]]()
    for layer in range(config.num_hidden_layers):
        attention, feed = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        parts[f"{attention}.qkv_proj.weight"] = {
            f"{attention}.q_proj.weight": Rows(0, queries, heads),
            f"{attention}.k_proj.weight": Rows(queries, queries + keys, heads),
            f"{attention}.v_proj.weight": Rows(queries + keys, heads, heads),
        }
        parts[f"{feed}.gate_up_proj.weight"] = {
            f"{feed}.gate_proj.weight": Rows(0, 1, 2),
            f"{feed}.up_proj.weight": Rows(1, 2, 2),
        }
    return parts


def network(model_type: str) -> Network:
    """Return the network of a model type in config.json. Raises ModelError."""
    if model_type in _QWEN:
        return _QWEN[model_type]
    kind = kind_of("mistral" if model_type == "mistral3" else model_type)  # whose configuration is nested
    names = {**LLAMA_CPP, **kind.names}
    return replace(
        decoder.NETWORK,
        kind=kind.model_type,
        config=DecoderConfig,
        fields=fields,
        rename=partial(rename, names, None),
        renames=lambda config: partial(rename, names, config),
        splits=splits,
        published=lambda name: name if name == HEAD else f"model.{name}",
        architectures=frozenset({kind.llama_cpp or "llama"}),
    )
