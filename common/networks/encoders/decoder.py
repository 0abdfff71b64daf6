"""A language model, as a text encoder and as a writer: configuration, manifest, positions. One network for Qwen2.5,
Qwen3, their language models with vision towers (`qwen`), LLaMA, Mistral, Gemma 2 and Phi-3.

What is unusual about some of them, each a field of the configuration:
- biases of q, k and v; an RMSNorm of each head of q and k; heads whose width is not the stream's by their number;
- fewer key than query heads, as in all of them;
- scores of attention that tanh keeps within a bound, and of tokens too; windows in which tokens see each other;
- norms whose gain is stored minus one, and norms behind attention and feed-forward besides those before them;
- RoPE in halves or in neighbouring pairs, scaled for long texts, or by the three axes of pictures;
- the states that condition an image are those after the final norm, or after some layers, side by side; then later
  layers, norm and head are in the files and not loaded. Writing takes all layers, the norm and the head, which is a
  matrix of its own or the table of embeddings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.causal_form import CausalForm
from qwenimg.common.networks.network import Network
from qwenimg.common.numbers import rope, scaled_rope
from qwenimg.common.numbers.scaled_rope import RopeScaling
from qwenimg.common.weights.plan import ParamUses, stored_uses

HEAD = "lm_head.weight"
SILU, GELU = "silu", "gelu_pytorch_tanh"
_OURS = {"in_files": False}  # not a key of config.json, or one of another meaning
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A language model and its use. Names are those of config.json where it has one."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = field(metadata={"max": 1000})
    num_attention_heads: int = field(metadata={"max": 1024})
    num_key_value_heads: int = field(metadata={"max": 1024})
    head_dim: int = field(default=0, metadata={"min": 0, "max": 1024})  # 0: hidden_size / num_attention_heads
    vocab_size: int = field(metadata={"max": 2**20})
    rms_norm_eps: float = 1e-6
    hidden_act: str = field(default=SILU, metadata=_OURS)
    tie_word_embeddings: bool = field(default=False, metadata=_OURS)
    # Layers
    qkv_bias: bool = field(default=False, metadata=_OURS)
    qk_norm: bool = field(default=False, metadata=_OURS)
    centred_norms: bool = field(default=False, metadata=_OURS)  # gains are stored minus one
    post_norms: bool = field(default=False, metadata=_OURS)  # behind attention and feed-forward too
    embedding_scale: float = field(default=1.0, metadata=_OURS)
    # Attention
    query_scale: float = field(default=0.0, metadata=_OURS)  # the factor of scores; 0: 1 / sqrt(head_dim)
    sliding_window: int = field(default=0, metadata=_OURS | {"min": 0, "max": 2**20})  # tokens, the present one too
    sliding_layers: tuple[int, ...] = field(default=(), metadata=_OURS | {"min": 0})  # those with the window
    attn_logit_softcapping: float = field(default=0.0, metadata=_OURS)  # 0: none
    final_logit_softcapping: float = field(default=0.0, metadata=_OURS)
    # RoPE
    rope_theta: float = 1e4
    rope_type: str = field(default="default", metadata=_OURS)
    rope_factor: float = field(default=1.0, metadata=_OURS)
    rope_original: int = field(default=0, metadata=_OURS | {"min": 0, "max": 2**24})  # tokens of a text in training
    rope_low: float = field(default=1.0, metadata=_OURS)  # low_freq_factor, or beta_slow
    rope_high: float = field(default=1.0, metadata=_OURS)  # high_freq_factor, or beta_fast
    rope_attention: float = field(default=1.0, metadata=_OURS)  # the factor of the tables
    rope_pairs: bool = field(default=False, metadata=_OURS)  # neighbouring channels, as llama.cpp's LLaMA has them
    mrope_section: tuple[int, ...] = field(default=(), metadata=_OURS)  # (): one axis
    mrope_interleaved: bool = field(default=False, metadata=_OURS)
    # Use. taps: the layers behind which states are taken, also from the end (-1: the last); (): after the final norm.
    # pad_position: that of every pad; None: they are counted on. pads_first: pads stand before a text and see no token;
    # else they stand behind it and see all of it
    taps: tuple[int, ...] = field(default=(), metadata=_OURS | {"min": -1000, "max": 1000})
    pad_position: int | None = field(default=None, metadata=_OURS)
    pads_first: bool = field(default=False, metadata=_OURS)
    writes: bool = field(default=False, metadata=_OURS)  # the head too, and all that it needs
    # generation_config.json
    repetition_penalty: float = field(default=1.0, metadata=_OURS)
    eos_token_id: tuple[int, ...] = field(default=(), metadata=_OURS | {"min": 0, "max": 2**20})  # (): the tokenizer's

    def __post_init__(self) -> None:
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise ModelError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: RoPE turns pairs of channels")
        if not self.rms_norm_eps > 0 or not self.rope_theta > 1:
            raise ModelError(f"rms_norm_eps {self.rms_norm_eps} or rope_theta {self.rope_theta} is out of range")
        self._check_layers()
        self._check_rope()
        if not 0 < self.repetition_penalty < math.inf:
            raise ModelError(f"repetition_penalty {self.repetition_penalty} is out of range")

    def _check_layers(self) -> None:
        if self.hidden_act not in (SILU, GELU):
            raise ModelError(f"hidden_act {self.hidden_act!r} is not supported; expected {SILU!r} or {GELU!r}")
        layers, caps = self.num_hidden_layers, (self.attn_logit_softcapping, self.final_logit_softcapping)
        if max(self.taps, default=0) >= layers or min(self.depths, default=1) < 1:
            raise ModelError(
                f"num_hidden_layers {layers} is too small: states behind layer {max(map(abs, self.taps))} of more "
                "layers condition an image"
            )
        if self.sliding_layers and (not self.sliding_window or max(self.sliding_layers) >= layers):
            raise ModelError(f"sliding_window {self.sliding_window} of layers {list(self.sliding_layers)} of {layers}")
        if min(caps) < 0 or self.query_scale < 0 or not self.embedding_scale > 0:
            raise ModelError(f"soft caps {caps}, query_scale {self.query_scale} or embedding_scale is out of range")

    def _check_rope(self) -> None:
        if self.rope_type not in scaled_rope.KINDS:
            kinds = ", ".join(map(repr, scaled_rope.KINDS))
            raise ModelError(f"RoPE of type {self.rope_type!r} is not supported; expected {kinds}")
        bounds = self.rope_low, self.rope_high
        if not (self.rope_factor >= 1 and self.rope_attention > 0 and min(bounds) > 0):
            raise ModelError(f"RoPE's factor {self.rope_factor}, attention factor or bounds {bounds} are out of range")
        if self.rope_type in ("llama3", "yarn") and not (self.rope_original and self.rope_low < self.rope_high):
            raise ModelError(
                f"RoPE of type {self.rope_type!r} needs the tokens of its training, and its low bound {self.rope_low} "
                f"below the high one {self.rope_high}"
            )

    @property
    def depths(self) -> tuple[int, ...]:
        """The layers behind which states are taken, from 1."""
        return tuple(tap if tap > 0 else self.num_hidden_layers + 1 + tap for tap in self.taps)

    @property
    def used_layers(self) -> int:
        """The layers that are computed."""
        return self.num_hidden_layers if self.writes else max(self.depths, default=self.num_hidden_layers)

    @property
    def is_normed(self) -> bool:
        """True if the final norm is used."""
        return self.writes or not self.taps

    @property
    def has_head(self) -> bool:
        """True if a head of its own is used."""
        return self.writes and not self.tie_word_embeddings

    @property
    def state_size(self) -> int:
        """The channels of a token's states."""
        return self.hidden_size * max(1, len(self.taps))

    def form(self, layer: int) -> CausalForm:
        """Return the form of the attention of a layer, from 0."""
        window = self.sliding_window if layer in self.sliding_layers else 0
        return CausalForm(self.query_scale or None, window, self.attn_logit_softcapping)


Config = TypeVar("Config", bound=DecoderConfig)


def with_writing(config: Config, data: Mapping[str, Any]) -> Config:
    """Return `config` with what a generation_config.json says, and transformers' defaults for what it does not. Raises
    ModelError."""
    penalty, stops = data.get("repetition_penalty"), data.get("eos_token_id")
    penalty = 1.0 if penalty is None else penalty
    ids = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if isinstance(penalty, bool) or not isinstance(penalty, (int, float)):
        raise ModelError(f"repetition_penalty is {clean(penalty, 40)!r}; expected a number")
    if not all(type(one) is int for one in ids):
        raise ModelError(f"eos_token_id is {clean(stops, 40)}; expected one id or a list of ids")
    return replace(config, repetition_penalty=float(penalty), eos_token_id=tuple(ids))


def manifest(config: DecoderConfig) -> Manifest:
    """Return the shape of every tensor, by its key after the file's prefix; without the head if it is not used."""
    width, inner = config.hidden_size, config.intermediate_size
    extra = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if config.post_norms else ()
    layer = params.merge(
        params.norm("input_layernorm", width),
        params.under("self_attn", _attention(config)),
        params.norm("post_attention_layernorm", width),
        *(params.norm(name, width) for name in extra),
        params.linear("mlp.gate_proj", inner, width, bias=False),
        params.linear("mlp.up_proj", inner, width, bias=False),
        params.linear("mlp.down_proj", width, inner, bias=False),
    )
    return params.merge(
        {"embed_tokens.weight": (config.vocab_size, width)},
        params.repeat("layers", config.num_hidden_layers, layer),
        params.norm("norm", width),
        {HEAD: (config.vocab_size, width)} if config.has_head else {},
    )


def _attention(config: DecoderConfig) -> Manifest:
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    norms = ("q_norm", "k_norm") if config.qk_norm else ()
    return params.merge(
        params.linear("q_proj", queries, config.hidden_size, bias=config.qkv_bias),
        params.linear("k_proj", keys, config.hidden_size, bias=config.qkv_bias),
        params.linear("v_proj", keys, config.hidden_size, bias=config.qkv_bias),
        params.linear("o_proj", config.hidden_size, queries, bias=False),
        *(params.norm(name, config.head_dim) for name in norms),
    )


def used(config: DecoderConfig, stored: Manifest) -> ParamUses:
    """Return the tensors of the layers that are computed, and the final norm if it is."""
    numbers = {key: int(match[1]) for key in stored if (match := _LAYER.match(key))}
    return stored_uses(
        {
            key: shape
            for key, shape in stored.items()
            if numbers.get(key, 0) < config.used_layers and (config.is_normed or not key.startswith("norm."))
        }
    )


# Positions


def text_table(
    config: DecoderConfig, length: int, places: Sequence[tuple[int, int, int]] = (), pads: int = 0
) -> rope.Table:
    """Return (cos, sin) [S, D/2] for a prompt of `length` ids with pictures at `places` (first id, rows, columns). Its
    last `pads` ids are pads: with pictures, they all stand at 0."""
    positions = rope.picture_positions(length, places)
    pad = 0 if places else config.pad_position
    if pad is not None:
        positions[length - pads :] = pad
    return table_at(config, positions)


def table_at(config: DecoderConfig, positions: NDArray[np.int64]) -> rope.Table:
    """Return (cos, sin) [S, D/2] at `positions` (time, row, column) [S 3]."""
    scaling = RopeScaling(
        config.rope_type,
        config.rope_factor,
        config.rope_original,
        config.rope_low,
        config.rope_high,
        config.rope_attention,
    )
    angles = positions[:, _axes(config)] * scaled_rope.frequencies(config.rope_theta, config.head_dim, scaling)
    return np.cos(angles) * scaling.attention, np.sin(angles) * scaling.attention


def _axes(config: DecoderConfig) -> list[int]:
    """Return the axis of each angle."""
    sections = config.mrope_section
    if not sections:
        return [0] * (config.head_dim // 2)
    return rope.interleaved_axes(sections) if config.mrope_interleaved else rope.section_axes(sections)


NETWORK = Network(
    name="decoder",
    role="text",
    kind="",  # of each model its own
    key="model_type",
    config=DecoderConfig,
    manifest=manifest,
    used=used,
    blocks=re.compile(r"layers\.\d+\..*_proj\.weight"),
    streamable=re.compile(r"(layers\.\d+)\."),
    tables=frozenset({"embed_tokens.weight"}),
    traced=(
        Block(name="layer", paths=re.compile(r"layers\.\d+"), streams=1, depth=1),
        Block(name="model", paths=re.compile("")),
    ),
)
"""The row without the names and configurations of a model's files."""
