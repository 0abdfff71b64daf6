# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""BERT's encoder. What is unusual about it: `qwenimg.common.networks.encoders.bert`.

B batch, S tokens, H heads, D head dim, C hidden size. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.encoders.bert import BertConfig

# Layers


class Embeddings(mlx.nn.Module):
    def __init__(self, config: BertConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.word_embeddings = ops.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = ops.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = ops.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = ops.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(self, ids: Array) -> Array:
        """[B S] -> [B S C]."""
        x = ops.stream(self.word_embeddings(ids), self.stream)
        x = ops.add(x, self.token_type_embeddings.weight[:1])
        x = ops.add(x, self.position_embeddings.weight[: ids.shape[1]])
        return ops.stream(self.LayerNorm(x), self.stream)


class SelfAttention(mlx.nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.query = ops.Linear(config.hidden_size, config.hidden_size)
        self.key = ops.Linear(config.hidden_size, config.hidden_size)
        self.value = ops.Linear(config.hidden_size, config.hidden_size)
        self.attend = ops.Attend()

    def heads(self, x: Array) -> Array:
        """[B S C] -> [B S H D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def __call__(self, x: Array) -> Array:
        """[B S C] -> [B S C]."""
        v = self.attend.values(self.heads(self.value(x)))
        return self.attend.result(ops.attention(self.heads(self.query(x)), self.heads(self.key(x)), v))


class Output(mlx.nn.Module):
    def __init__(self, config: BertConfig, width: int, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.dense = ops.Linear(width, config.hidden_size)
        self.LayerNorm = ops.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(self, x: Array, update: Array) -> Array:
        """Return the norm of x [B S C] plus the layer of `update` [B S width]."""
        return ops.stream(self.LayerNorm(ops.residual(x, self.dense(update))), self.stream)


class Attention(mlx.nn.Module):
    def __init__(self, config: BertConfig, stream: mx.Dtype):
        super().__init__()
        self.self = SelfAttention(config)
        self.output = Output(config, config.hidden_size, stream)

    def __call__(self, x: Array) -> Array:
        return self.output(x, self.self(x))


class Intermediate(mlx.nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = ops.Linear(config.hidden_size, config.intermediate_size)

    def __call__(self, x: Array) -> Array:
        return ops.gelu_erf(self.dense(x))


class Layer(mlx.nn.Module):
    def __init__(self, config: BertConfig, stream: mx.Dtype):
        super().__init__()
        self.attention = Attention(config, stream)
        self.intermediate = Intermediate(config)
        self.output = Output(config, config.intermediate_size, stream)

    def __call__(self, x: Array) -> Array:
        """[B S C] -> [B S C]."""
        x = self.attention(x)
        return self.output(x, self.intermediate(x))


class Encoder(mlx.nn.Module):
    def __init__(self, config: BertConfig, stream: mx.Dtype):
        super().__init__()
        self.layer = [Layer(config, stream) for _ in range(config.num_hidden_layers)]

    def __call__(self, x: Array) -> Array:
        for layer in self.layer:
            x = layer(x)
        return x


# Model


class BertEncoder(mlx.nn.Module):
    def __init__(self, config: BertConfig, stream: mx.Dtype):
        super().__init__()
        self.embeddings = Embeddings(config, stream)
        self.encoder = Encoder(config, stream)

    def __call__(self, ids: Array) -> Array:
        """Encode token ids [B S] to states [B S C]."""
        return self.encoder(self.embeddings(ids))


# Runner


class Runner(LoadedNetwork[BertConfig, BertEncoder]):
    network, role = BertEncoder, "text"

    @ops.computes
    def encode(self, ids: Sequence[int]) -> Array:
        """Encode the token ids of one prompt to [1 S C], evaluated."""
        return ops.eval(self.model(ops.placed([list(ids)])))
