# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""T5's encoder. What is unusual about it: `qwenimg.common.networks.encoders.t5`.

B batch, S tokens, H heads, D head dim, C width of the stream. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.encoders import t5
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


class Attention(mlx.nn.Module):
    def __init__(self, config: T5Config, has_table: bool):
        super().__init__()
        self.head_dim = config.d_kv
        self.q = ops.Linear(config.d_model, config.inner_dim, bias=False)
        self.k = ops.Linear(config.d_model, config.inner_dim, bias=False)
        self.v = ops.Linear(config.d_model, config.inner_dim, bias=False)
        self.o = ops.Linear(config.inner_dim, config.d_model, bias=False)
        if has_table:
            self.relative_attention_bias = ops.Embedding(config.relative_attention_num_buckets, config.num_heads)
        self.attend = ops.Attend()

    def heads(self, x: Array) -> Array:
        """[B S H*D] -> [B S H D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def __call__(self, x: Array, bias: Array) -> Array:
        """[B S C] -> [B S C], with a bias [1 H S K] of the scores, for the first K tokens."""
        q, seen = self.heads(self.q(x)), x[:, : bias.shape[-1]]
        k, v = self.heads(self.k(seen)), self.heads(self.v(seen))
        return self.o(self.attend.result(ops.biased_attention(q, k, self.attend.values(v), bias)))


class FeedForward(mlx.nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.wi_0 = ops.Linear(config.d_model, config.d_ff, bias=False)
        self.wi_1 = ops.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = ops.Linear(config.d_ff, config.d_model, bias=False)

    def __call__(self, x: Array) -> Array:
        return self.wo(ops.gated_gelu(self.wi_0(x), self.wi_1(x), self.wo.dtype))


class AttentionLayer(mlx.nn.Module):
    def __init__(self, config: T5Config, has_table: bool):
        super().__init__()
        self.layer_norm = ops.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.SelfAttention = Attention(config, has_table)

    def __call__(self, x: Array, bias: Array) -> Array:
        return ops.residual(x, self.SelfAttention(self.layer_norm(x), bias))


class FeedForwardLayer(mlx.nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.layer_norm = ops.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.DenseReluDense = FeedForward(config)

    def __call__(self, x: Array) -> Array:
        return ops.residual(x, self.DenseReluDense(self.layer_norm(x)))


class EncoderBlock(mlx.nn.Module):
    def __init__(self, config: T5Config, has_table: bool):
        super().__init__()
        self.layer = [AttentionLayer(config, has_table), FeedForwardLayer(config)]

    def __call__(self, x: Array, bias: Array) -> Array:
        """[B S C] -> [B S C], with a bias [1 H S K] of the scores."""
        attention, feed_forward = self.layer
        return feed_forward(attention(x, bias))


class Encoder(mlx.nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        tables = 1 if config.shares_bias else config.num_layers
        self.block = [EncoderBlock(config, i < tables) for i in range(config.num_layers)]
        self.final_layer_norm = ops.RMSNorm(config.d_model, config.layer_norm_epsilon)

    def __call__(self, x: Array, buckets: Array) -> Array:
        """[B S C] -> [B S C], float32, for the buckets of distances [S K] to the tokens that are seen."""
        blocks: Sequence[Any] = list(self.block)
        for block in blocks:
            attention = block.layer[0].SelfAttention
            if hasattr(attention, "relative_attention_bias"):
                bias = ops.score_bias(attention.relative_attention_bias(buckets))
            x = block(x, bias)
        return self.final_layer_norm(x)


# Model


class T5Encoder(mlx.nn.Module):
    def __init__(self, config: T5Config, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.shared = ops.Embedding(config.vocab_size, config.d_model)
        self.encoder = Encoder(config)

    def __call__(self, ids: Array, buckets: Array) -> Array:
        """Encode token ids [B S] to states [B S C], float32, for the buckets of distances [S K]."""
        return self.encoder(ops.stream(self.shared(ids), self.stream), buckets)


# Runner


class Runner(LoadedNetwork[T5Config, T5Encoder]):
    network, role = T5Encoder, "text"

    def __init__(self, config: T5Config, plan: LoadPlan, precision: Precision):
        super().__init__(config, plan, t5.policy(precision))

    @ops.computes
    def encode(self, ids: Sequence[int], pads: int = 0) -> Array:
        """Encode the token ids of one prompt to [1 S C], evaluated. No token sees the last `pads`."""
        buckets = ops.placed(t5.buckets(self.config, len(ids))[:, : len(ids) - pads].copy())
        return ops.eval(self.model(ops.placed([list(ids)]), buckets))
