# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Qwen2.5-VL's language model as a text encoder. What is unusual about it: `qwenimg.common.networks.encoders.qwen_vl`.

B batch, S tokens, H query heads, D head dim, C hidden size. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.encoders.language_model import DecoderLayer, KeyValues, Pair
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.encoders.qwen_vl import QwenVLConfig
from qwenimg.common.numbers.rope import text_rope

# Layers


class Attention(mlx.nn.Module):
    def __init__(self, config: QwenVLConfig):
        super().__init__()
        self.head_dim = config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = ops.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = ops.Linear(config.hidden_size, keys)
        self.v_proj = ops.Linear(config.hidden_size, keys)
        self.o_proj = ops.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.attend = ops.Attend()

    def heads(self, x: Array) -> Array:
        """[B S C] -> [B S H D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def __call__(self, x: Array, rope: Pair, past: KeyValues | None = None) -> Array:
        """[B S C] -> [B S C], causal. past: of the tokens before these, to which these are added."""
        q = ops.rotate_halves(self.heads(self.q_proj(x)), *rope)
        k = ops.rotate_halves(self.heads(self.k_proj(x)), *rope)
        v = self.attend.values(self.heads(self.v_proj(x)))
        k, v = (k, v) if past is None else past.extended(k, v)
        return self.o_proj(self.attend.result(ops.attention(q, k, v, causal=True)))


# Model


class QwenTextEncoder(mlx.nn.Module):
    def __init__(self, config: QwenVLConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.embed_tokens = ops.Embedding(config.vocab_size, config.hidden_size)
        layers = [DecoderLayer(config, Attention(config)) for _ in range(config.num_hidden_layers)]
        self.layers = layers
        self.norm = ops.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, ids: Array, rope: Pair) -> Array:
        """Return the hidden states after the final norm [B S C], float32, for token ids [B S] and RoPE tables [S
        D/2]."""
        return self.run(ops.stream(self.embed_tokens(ids), self.stream), rope)

    def run(self, x: Array, rope: Pair) -> Array:
        """Run the layers on the start of the stream [B S C]."""
        for layer in self.layers:
            x = layer(x, rope)
        return self.norm(x)


# Runner


class Runner(LoadedNetwork[QwenVLConfig, QwenTextEncoder]):
    network, role = QwenTextEncoder, "text"

    @ops.computes
    def encode(self, ids: Sequence[int]) -> Array:
        """Encode the token ids of one prompt to [1 S C], evaluated."""
        table = text_rope(len(ids), self.config.head_dim, self.config.rope_theta)
        cos, sin = (ops.table(part, self.table_dtype) for part in table)
        return ops.eval(self.model(ops.placed([list(ids)]), (cos, sin)))
