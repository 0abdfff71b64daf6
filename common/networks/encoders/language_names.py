"""The language models of Qwen, Ministral 3, Mistral Small 3 and Gemma 2, in files: names of transformers, llama.cpp,
and of programs for Macs.

Unusual about them: each row's `rename` maps all these names one by one, behind any prefix; Qwen3-VL's language
model has the names of Qwen3, so its vision tower, its longer prefix or the architecture of a GGUF file tells it. Of
Mistral's, whose names all models of their form have, llama.cpp's files have the rows of q and k in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qwenimg.common.base.safe_files import bad
from qwenimg.common.networks.encoders import decoder, decoder_kinds, qwen
from qwenimg.common.networks.encoders.decoder import DecoderConfig
from qwenimg.common.networks.encoders.language_model import LLAMA_CPP
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.weights.keys import Place

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
    data: dict[str, Any] = {
        "vocab_size": stored.shape("embed_tokens.weight", 2)[0],
        "hidden_size": width,
        "intermediate_size": stored.shape("layers.0.mlp.gate_proj.weight", 2)[0],
        "num_hidden_layers": like.num_hidden_layers if width == like.hidden_size else layers,
        "num_attention_heads": _heads(stored, "q", head_dim),
        "num_key_value_heads": _heads(stored, "k", head_dim),
    }
    return stored.config(like, **data, **({"head_dim": head_dim} if _NORM in stored else {}))


def _heads(stored: StoredShapes, part: str, head_dim: int) -> int:
    rows, _ = stored.shape(f"layers.0.self_attn.{part}_proj.weight", 2)
    if not head_dim or rows % head_dim:
        cure = "give it with its configuration by --text-encoder FOLDER"
        raise bad(stored.path, f"has a text encoder of {rows} rows for its heads, no multiple of {head_dim}: {cure}")
    return rows // head_dim


QWEN3 = Layouts(
    network=qwen.QWEN3,
    title="Qwen3",
    rows=(
        Layout(names=_TRANSFORMERS, signs=(_NORM,)),
        Layout(names=_LLAMA_CPP, signs=(_NAMED_NORM,)),
    ),
    config=_config,
)
QWEN2_5_VL = Layouts(
    network=qwen.QWEN2_5_VL,
    title="Qwen2.5-VL",
    rows=(
        Layout(names="mflux's names", signs=(*(qwen.MFLUX + sign for sign in _BIAS),)),
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
    network=qwen.QWEN3_VL,
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


_OURS = {ours: theirs for theirs, ours in LLAMA_CPP.items()} | {"lm_head": "output"}
_OTHERS = ("self_attn.q_norm.weight", "self_attn.k_proj.bias", "pre_feedforward_layernorm.weight")


def _llama_cpp(name: str, names: Mapping[str, str] = _OURS) -> Place:
    """Return the place of a parameter in a file of llama.cpp. names: its own, by those of the manifest."""
    owner, _, leaf = name.rpartition(".")
    layer, _, part = owner.partition("s.")[2].partition(".") if owner.startswith("layers.") else ("", "", owner)
    return Place(f"{f'blk.{layer}.' if layer else ''}{names[part]}.{leaf}")


def _paired(stored: StoredShapes, like: Any) -> Any:
    """Return the configuration, for the order of rows of the file's program."""
    return replace(_config(stored, like), rope_pairs=stored.stored_name("norm.weight") == "output_norm.weight")


MINISTRAL_3 = Layouts(
    network=replace(
        decoder.NETWORK,
        kind="mistral3",  # around the configuration of the language model
        fields=decoder_kinds.fields,
        rename=lambda key: decoder_kinds.rename(LLAMA_CPP, None, key),
        renames=lambda config: lambda key: decoder_kinds.rename(LLAMA_CPP, config, key),
        published=lambda name: f"language_model.model.{name}",
        described=lambda config: {"text_config": decoder_kinds.written(config, "ministral3")},
        architectures=frozenset({"mistral3"}),
    ),
    title="Ministral 3",
    rows=(
        Layout(
            names=_LLAMA_CPP,
            signs=("blk.0.attn_q.weight", "blk.0.ffn_gate.weight", "token_embd.weight"),
            lacks=("blk.0.attn_q_norm.weight", "blk.0.attn_k.bias"),
            is_named=True,
            place=lambda name, config: _llama_cpp(name),
        ),
        Layout(
            names=_TRANSFORMERS,
            signs=("layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight"),
            lacks=(*(f"layers.0.{name}" for name in _OTHERS),),
        ),
    ),
    config=_paired,
    ignored=("tekken_model",),  # the vocabulary, in ComfyUI's files
)
MISTRAL_SMALL_3 = replace(
    MINISTRAL_3,
    network=replace(
        MINISTRAL_3.network,
        described=lambda config: {"text_config": decoder_kinds.written(config, "mistral")},
        architectures=frozenset({"llama", "mistral3"}),  # llama.cpp writes the former for Mistral's older models
    ),
    title="Mistral Small 3",
    ignored=(*MINISTRAL_3.ignored, "output."),  # llama.cpp's head, which an image does not take
)


_GEMMA = {
    **LLAMA_CPP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_OURS = {ours: theirs for theirs, ours in _GEMMA.items()}


def _gemma(stored: StoredShapes, like: DecoderConfig) -> DecoderConfig:
    """Return the configuration, with the scale of its width, the windows of its layers, and the gains of the file's
    program."""
    made: DecoderConfig = _config(stored, replace(like, sliding_layers=()))
    return replace(
        made,
        embedding_scale=made.hidden_size**0.5,
        sliding_layers=tuple(range(0, made.num_hidden_layers, 2)),
        centred_norms=stored.stored_name("norm.weight") != "output_norm.weight",
    )


GEMMA_2 = Layouts(
    network=replace(
        decoder.NETWORK,
        kind="gemma2",
        fields=decoder_kinds.fields,
        rename=lambda key: decoder_kinds.rename(_GEMMA, None, key),
        renames=lambda config: lambda key: decoder_kinds.rename(_GEMMA, config, key),
        published=lambda name: f"model.{name}",
        described=lambda config: {
            **decoder_kinds.written(config, "gemma2"),
            "hidden_activation": config.hidden_act,
            "query_pre_attn_scalar": round(config.query_scale**-2),
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
            "sliding_window": config.sliding_window,
        },
        architectures=frozenset({"gemma2"}),
    ),
    title="Gemma 2",
    rows=(
        Layout(
            names=_LLAMA_CPP,
            signs=("blk.0.post_ffw_norm.weight", "token_embd.weight"),
            is_named=True,
            place=lambda name, config: _llama_cpp(name, _GEMMA_OURS),
        ),
        Layout(
            names=_TRANSFORMERS,
            signs=("layers.0.pre_feedforward_layernorm.weight",),
            lacks=("layers.0.self_attn.q_norm.weight",),  # of Gemma 3
        ),
    ),
    config=_gemma,
    ignored=("spiece_model",),  # the vocabulary, in ComfyUI's files
)
