"""The language models of Qwen in files: transformers' names, llama.cpp's, and those of programs for Macs.

Unusual about them: each network's `rename` maps all these names one by one, behind any prefix; Qwen3-VL's language
model has the names of Qwen3, so its vision tower, its longer prefix or the architecture of a GGUF file tells it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.base.safe_files import bad
from qwenimg.common.networks.encoders import qwen3, qwen3_vl, qwen_vl
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes

_NORM, _NAMED_NORM = "layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"
_BIAS = ("layers.0.self_attn.k_proj.bias", "layers.0.input_layernorm.weight")
_TOWER = "visual.patch_embed.proj.weight"
_TRANSFORMERS, _LLAMA_CPP, _PORT = "transformers' names", "llama.cpp's names", "mlx-vlm's names"


def _config(stored: StoredShapes, like: Any) -> Any:
    """Return the configuration for stored shapes, of vectors and rows, since the columns of matrices may be packed. The
    width of a head is that of `like` in a model without norms of q and k, and all layers of `like` are expected in one
    of its width."""
    [width] = stored.shape("layers.0.input_layernorm.weight", 1)
    head_dim = stored.shape(_NORM, 1)[0] if _NORM in stored else like.head_dim
    layers = len(stored.blocks("layers.0.input_layernorm.weight"))
    data: dict[str, Any] = asdict(like) | {
        "vocab_size": stored.shape("embed_tokens.weight", 2)[0],
        "hidden_size": width,
        "intermediate_size": stored.shape("layers.0.mlp.gate_proj.weight", 2)[0],
        "num_hidden_layers": like.num_hidden_layers if width == like.hidden_size else layers,
        "num_attention_heads": _heads(stored, "q", head_dim),
        "num_key_value_heads": _heads(stored, "k", head_dim),
    }
    return parse(type(like), data | ({"head_dim": head_dim} if _NORM in stored else {}), source=stored.path)


def _heads(stored: StoredShapes, part: str, head_dim: int) -> int:
    rows, _ = stored.shape(f"layers.0.self_attn.{part}_proj.weight", 2)
    if not head_dim or rows % head_dim:
        cure = "give it with its configuration by --text-encoder FOLDER"
        raise bad(stored.path, f"has a text encoder of {rows} rows for its heads, no multiple of {head_dim}: {cure}")
    return rows // head_dim


QWEN3 = Layouts(
    network=qwen3.NETWORK,
    title="Qwen3",
    rows=(
        Layout(names=_TRANSFORMERS, signs=(_NORM,)),
        Layout(names=_LLAMA_CPP, signs=(_NAMED_NORM,)),
    ),
    config=_config,
)
QWEN2_5_VL = Layouts(
    network=qwen_vl.NETWORK,
    title="Qwen2.5-VL",
    rows=(
        Layout(names="mflux's names", signs=(*(qwen_vl.MFLUX + sign for sign in _BIAS),)),
        Layout(names=_PORT, signs=(*(f"language_model.model.{sign}" for sign in _BIAS),)),
        Layout(names=_TRANSFORMERS, signs=_BIAS),
        Layout(names=_LLAMA_CPP, signs=("blk.0.attn_k.bias",)),
    ),
    config=_config,
    foreign={
        "v.patch_embd.weight": "a vision tower alone: give its language model too, as a second --text-encoder FILE"
    },
)
QWEN3_VL = Layouts(
    network=qwen3_vl.NETWORK,
    title="Qwen3-VL",
    rows=(
        Layout(names=_PORT, signs=(f"language_model.model.{_NORM}",)),
        Layout(names=_TRANSFORMERS, signs=(f"language_model.{_NORM}",)),
        Layout(names=_TRANSFORMERS, signs=(f"model.{_NORM}", _TOWER)),
        Layout(names=_TRANSFORMERS, signs=(_NORM, _TOWER)),
        Layout(names=_LLAMA_CPP, signs=(_NAMED_NORM,), is_named=True),
    ),
    config=_config,
)
