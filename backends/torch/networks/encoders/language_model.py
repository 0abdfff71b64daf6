"""Layers that language models share.

B batch, S tokens, C hidden size. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.common.networks.encoders.qwen3 import Qwen3Config
from qwenimg.common.networks.encoders.qwen_vl import QwenVLConfig
from qwenimg.common.networks.encoders.vision_tower import PicturePlace

Pair = tuple[Tensor, Tensor]


class KeyValues:
    """The keys and values of the tokens so far, of one attention."""

    def __init__(self) -> None:
        self.pair: Pair | None = None

    def extended(self, k: Tensor, v: Tensor) -> Pair:
        """Append the next tokens' k and v [B S H D]; return all tokens' k and v in v's dtype."""
        keys, values = self.pair or (k[:, :0], v[:, :0])
        self.pair = ops.joined(keys, k, v.dtype), ops.joined(values, v, v.dtype)
        return self.pair


class MLP(torch.nn.Module):
    def __init__(self, config: Qwen3Config | QwenVLConfig):
        super().__init__()
        self.gate_proj = ops.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = ops.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = ops.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(torch.nn.Module):
    """A layer with the `attention` of its model."""

    def __init__(self, config: Qwen3Config | QwenVLConfig, attention: torch.nn.Module):
        super().__init__()
        self.input_layernorm = ops.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = ops.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: Pair, *more: int | KeyValues) -> Tensor:
        """[B S C] -> [B S C]. `more`: what the attention takes besides: the number of pads at the end, or the tokens
        so far."""
        x = ops.residual(x, self.self_attn(self.input_layernorm(x), rope, *more))
        return ops.residual(x, self.mlp(self.post_attention_layernorm(x)))


def with_slots(text: Tensor, places: Sequence[PicturePlace], slots: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the start of the stream [1 S C] for embedded ids [1 S C] in `dtype`, with the slots [1 slots C] of each
    picture at its place."""
    parts, token = [], 0
    for place, picture in zip(places, slots, strict=True):
        parts += [text[:, token : place.start], ops.stream(picture, dtype)]
        token = place.start + picture.shape[1]
    return torch.cat([*parts, text[:, token:]], dim=1)
