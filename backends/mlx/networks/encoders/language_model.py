# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Layers that language models share.

B batch, S tokens, C hidden size. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.common.networks.encoders.qwen3 import Qwen3Config
from qwenimg.common.networks.encoders.qwen_vl import QwenVLConfig
from qwenimg.common.networks.encoders.vision_tower import PicturePlace

Pair = tuple[Array, Array]


class KeyValues:
    """The keys and values of the tokens so far, of one attention."""

    def __init__(self) -> None:
        self.pair: Pair | None = None

    def extended(self, k: Array, v: Array) -> Pair:
        """Append the next tokens' k and v [B S H D]; return all tokens' k and v in v's dtype."""
        keys, values = self.pair or (k[:, :0], v[:, :0])
        self.pair = ops.joined(keys, k, v.dtype), ops.joined(values, v, v.dtype)
        return self.pair


class MLP(mlx.nn.Module):
    def __init__(self, config: Qwen3Config | QwenVLConfig):
        super().__init__()
        self.gate_proj = ops.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = ops.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = ops.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(mlx.nn.Module):
    """A layer with the `attention` of its model."""

    def __init__(self, config: Qwen3Config | QwenVLConfig, attention: mlx.nn.Module):
        super().__init__()
        self.input_layernorm = ops.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = ops.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def __call__(self, x: Array, rope: Pair, *more: int | KeyValues) -> Array:
        """[B S C] -> [B S C]. `more`: what the attention takes besides: the number of pads at the end, or the tokens
        so far."""
        x = ops.residual(x, self.self_attn(self.input_layernorm(x), rope, *more))
        return ops.residual(x, self.mlp(self.post_attention_layernorm(x)))


def with_slots(text: Array, places: Sequence[PicturePlace], slots: Sequence[Array], dtype: mx.Dtype) -> Array:
    """Return the start of the stream [1 S C] for embedded ids [1 S C] in `dtype`, with the slots [1 slots C] of each
    picture at its place."""
    parts, token = [], 0
    for place, picture in zip(places, slots, strict=True):
        parts += [text[:, token : place.start], ops.stream(picture, dtype)]
        token = place.start + picture.shape[1]
    return mx.concatenate([*parts, text[:, token:]], axis=1)
