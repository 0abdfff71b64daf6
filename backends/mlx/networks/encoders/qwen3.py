# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Qwen3 as a text encoder. What is unusual about it: `qwenimg.common.networks.encoders.qwen3`.

B batch, S tokens, H query heads, D head dim, C hidden size. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.encoders.language_model import DecoderLayer, Pair
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.encoders.qwen3 import Qwen3Config
from qwenimg.common.numbers.rope import text_rope

# Layers


class Attention(mlx.nn.Module):
    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = ops.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = ops.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = ops.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = ops.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = ops.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = ops.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attend = ops.Attend()

    def heads(self, x: Array) -> Array:
        """[B S H*D] -> [B S H D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def __call__(self, x: Array, rope: Pair, pads: int) -> Array:
        """[B S C] -> [B S C], causal. The last `pads` tokens see all the others, and no pad."""
        q = ops.rotate_halves(self.q_norm(self.heads(self.q_proj(x))), *rope)
        k = ops.rotate_halves(self.k_norm(self.heads(self.k_proj(x))), *rope)
        v = self.attend.values(self.heads(self.v_proj(x)))
        return self.o_proj(self.attend.result(self.attended(q, k, v, x.shape[1] - pads)))

    def attended(self, q: Array, k: Array, v: Array, tokens: int) -> Array:
        """Attend from `tokens` tokens, causal, and from the pads after them: q, k, v [B S H D] -> [B S H*D]."""
        keys, values = k[:, :tokens], v[:, :tokens]
        out = ops.attention(q[:, :tokens], keys, values, causal=True)
        if tokens == q.shape[1]:
            return out
        return mx.concatenate((out, ops.attention(q[:, tokens:], keys, values)), axis=1)


# Model


class Qwen3TextEncoder(mlx.nn.Module):
    def __init__(self, config: Qwen3Config, stream: mx.Dtype):
        super().__init__()
        self.stream, self.taps = stream, config.taps or (config.used_layers,)
        self.embed_tokens = ops.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, Attention(config)) for _ in range(config.used_layers)]

    def __call__(self, ids: Array, rope: Pair, pads: int) -> Array:
        """Return the hidden states after the layers `taps`, concatenated: [B S C*taps], float32. Inputs: token ids [B
        S], the last `pads` of them pads, and RoPE tables [S D/2]."""
        x = ops.stream(self.embed_tokens(ids), self.stream)
        states = []
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x, rope, pads)
            states += [x] if number in self.taps else []
        return ops.at_least_float32(mx.concatenate(states, axis=-1))


# Runner


class Runner(LoadedNetwork[Qwen3Config, Qwen3TextEncoder]):
    network, role = Qwen3TextEncoder, "text"

    @ops.computes
    def encode(self, ids: Sequence[int], pads: int = 0) -> Array:
        """Encode the token ids of one prompt, the last `pads` of them pads: [1 S C*taps], evaluated."""
        table = text_rope(len(ids), self.config.head_dim, self.config.rope_theta)
        cos, sin = (ops.table(part, self.table_dtype) for part in table)
        return ops.eval(self.model(ops.placed([list(ids)]), (cos, sin), pads))
