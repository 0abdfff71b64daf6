"""The configuration of a language model in the metadata of a GGUF file, as llama.cpp writes it.

Unusual here:

- a number in float32 stands for the shortest one with the same bits, so that 1e-5 is that of a config.json;
- the file has a head of its own if it has that tensor;
- LLaMA 3.1's scaled RoPE is a tensor with a factor for each frequency: those of the published models are known;
- Gemma 2's scale of queries is in no key: the largest model divides the width by its heads, as llama.cpp does.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import sqrt
from typing import Any

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.formats.stored import Header, TensorSlice, raw
from qwenimg.common.networks.encoders import decoder_kinds, qwen
from qwenimg.common.networks.encoders.decoder_kinds import KINDS, ROPE_TENSOR, DecoderKind, window_layers
from qwenimg.common.networks.network import Network
from qwenimg.common.numbers import scaled_rope
from qwenimg.common.numbers.scaled_rope import RopeScaling, yarn_attention

_QWEN = {"qwen2vl": qwen.QWEN2_5_VL, "qwen3": qwen.QWEN3, "qwen3vl": qwen.QWEN3_VL}
_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Keys that are read apart, or change nothing in the forward
_OTHERS = {
    *("context_length", "vocab_size", "attention.value_length", "rope.dimension_count", "attention.sliding_window"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier"),
    *("rope.scaling.finetuned", "rope.dimension_sections", "n_deepstack_layers"),
    "attention.temperature_scale",  # of queries beyond the texts of the first training
}  # fmt: skip
_LLAMA3_FACTORS, _LLAMA3_TEXT = (8.0, 32.0), 8192  # LLaMA 3.1 and 3.3, 3.2


def network_of(header: Header) -> tuple[Network, dict[str, Any]]:
    """Return the network of an open GGUF file of a language model, and the fields of its configuration. Raises
    ModelError."""
    path, name = header.file.path, header.metadata.get("general.architecture", "")
    kind = next((kind for kind in KINDS if kind.llama_cpp and kind.llama_cpp == name), None)
    if kind is None and name not in _QWEN:
        known = ", ".join(sorted([*_QWEN, *(kind.llama_cpp for kind in KINDS if kind.llama_cpp)]))
        raise bad(path, f"is a GGUF file of '{clean(name, 40)}', which is no language model that is read: {known}")
    network = decoder_kinds.network(kind.model_type) if kind else _QWEN[name]
    keys = {key.removeprefix(f"{name}."): value for key, value in header.metadata.items() if key.startswith(f"{name}.")}
    try:
        return network, _fields(header, keys, kind)
    except ModelError as error:
        raise bad(path, str(error)) from None


def _fields(header: Header, keys: Mapping[str, str], kind: DecoderKind | None) -> dict[str, Any]:
    unknown = [key for key in keys.keys() - _SIZES.keys() - _NUMBERS.keys() - _OTHERS if keys[key] not in ("", "False")]
    if unknown:
        raise ModelError(f"has the key '{clean(min(unknown), 60)}': this version does not know what it changes")
    values: dict[str, Any] = {ours: _whole(keys, theirs) for theirs, ours in _SIZES.items() if theirs in keys}
    values |= {ours: _number(keys, theirs) for theirs, ours in _NUMBERS.items() if theirs in keys}
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    if "token_embd.weight" in header.tensors:
        values["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    head_dim = values.get("head_dim") or (values.get("hidden_size") or 0) // (values.get("num_attention_heads") or 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _whole(keys, key, head_dim) != head_dim:
            raise ModelError(f"{key} is {keys[key]}, and the width of a head {head_dim}: they must be equal")
    if kind is None:
        return values
    values |= {**kind.fixed, **kind.in_gguf, **_rope(keys)}
    if (window := _whole(keys, "attention.sliding_window", 0)) and kind.windows is not None:
        values |= {"sliding_window": window, "sliding_layers": window_layers(kind, values.get("num_hidden_layers"))}
    if kind.model_type == "gemma2":
        width, heads = values.get("hidden_size") or 1, values.get("num_attention_heads") or 1
        scalar = width / heads if values.get("num_hidden_layers") == 46 else head_dim or 1  # 46: the model of 27B
        values |= {"embedding_scale": sqrt(width), "query_scale": 1 / sqrt(scalar)}
    return values | (_factors(header, values, head_dim) if ROPE_TENSOR in header.tensors else {})


def _rope(keys: Mapping[str, str]) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"RoPE of type '{clean(kind, 40)}' is not supported; expected none, linear or yarn")
    if _number(keys, "rope.scaling.attn_factor", 1) != 1:
        raise ModelError(f"rope.scaling.attn_factor is {keys['rope.scaling.attn_factor']}; expected 1")
    factor = _number(keys, "rope.scaling.factor", 1)
    values: dict[str, Any] = {"rope_type": kind, "rope_factor": factor}
    if kind == "linear":
        return values
    log = _number(keys, "rope.scaling.yarn_log_multiplier", 0)
    return values | {
        "rope_original": _whole(keys, "rope.scaling.original_context_length", 0),
        "rope_low": _number(keys, "rope.scaling.yarn_beta_slow", 1),
        "rope_high": _number(keys, "rope.scaling.yarn_beta_fast", 32),
        "rope_attention": yarn_attention(factor, 1 if log else 0, log),
    }


def _factors(header: Header, values: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the scaling of LLaMA 3.1 that a tensor with a factor for each frequency shows."""
    stored = header.tensors[ROPE_TENSOR]
    if stored.dtype != "F32" or stored.shape != (head_dim // 2,):
        shape = f"{stored.dtype} {list(stored.shape)}; expected F32 [{head_dim // 2}]"
        raise ModelError(f"tensor '{ROPE_TENSOR}' is {shape}")
    found = raw(TensorSlice(ROPE_TENSOR, header.file, *stored))
    theta = values.get("rope_theta", 1e4)
    for factor in _LLAMA3_FACTORS if theta > 1 else ():
        scaling = RopeScaling("llama3", factor, _LLAMA3_TEXT, 1.0, 4.0)
        expected = scaled_rope.frequencies(theta, head_dim) / scaled_rope.frequencies(theta, head_dim, scaling)
        if abs(found / expected - 1).max() < 1e-4:
            return {
                "rope_type": "llama3", "rope_factor": factor, "rope_original": _LLAMA3_TEXT,
                "rope_low": 1.0, "rope_high": 4.0,
            }  # fmt: skip
    raise ModelError(f"tensor '{ROPE_TENSOR}' has other factors than those of LLaMA 3.1, 3.2 and 3.3")


def _whole(keys: Mapping[str, str], key: str, default: int = 0) -> int:
    value = keys.get(key)
    if value is None:
        return default
    if not value.isdecimal() or len(value) > 9:
        raise ModelError(f"{key} is '{clean(value, 40)}'; expected a whole number")
    return int(value)


def _number(keys: Mapping[str, str], key: str, default: float = 0.0) -> float:
    """Return a number that is stored in float32, as the shortest one that has the same bits."""
    try:
        value = float(keys.get(key, default))
        exact = struct.unpack("<f", struct.pack("<f", value))[0]
    except (ValueError, OverflowError):
        value = exact = float("nan")
    if not 0 <= value < 1e12:
        raise ModelError(f"{key} is '{clean(keys.get(key, default), 40)}'; expected a number from 0 to 1e12")
    short = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((one for one in short if struct.unpack("<f", struct.pack("<f", one))[0] == exact), value)
