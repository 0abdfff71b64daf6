# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""CLIP's image encoder. What is unusual about it: `qwenimg.common.networks.encoders.clip_vision`.

B pictures, L patches, C hidden size, P width of the embedding. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.encoders.clip import MLP
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.encoders.clip_vision import CLIPVisionConfig
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class Embeddings(mlx.nn.Module):
    def __init__(self, config: CLIPVisionConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.class_embedding = ops.Embedding(1, config.hidden_size)
        self.patch_embedding = ops.Linear(config.patch_values, config.hidden_size, bias=False)
        self.position_embedding = ops.Embedding(config.patches + 1, config.hidden_size)

    def __call__(self, patches: Array) -> Array:
        """[B L values] -> [B 1+L C]."""
        x = ops.stream(self.patch_embedding(patches), self.stream)
        first = ops.repeated(ops.stream(self.class_embedding.weight, self.stream)[None], x.shape[0])
        return ops.add(mx.concatenate([first, x], axis=1), self.position_embedding.weight)


class Attention(mlx.nn.Module):
    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = ops.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = ops.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = ops.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = ops.Linear(config.hidden_size, config.hidden_size)
        self.attend = ops.Attend()

    def heads(self, x: Array) -> Array:
        """[B L C] -> [B L H D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def __call__(self, x: Array) -> Array:
        """[B L C] -> [B L C]."""
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        return self.out_proj(self.attend(q, k, self.attend.values(v)))


class EncoderLayer(mlx.nn.Module):
    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        self.layer_norm1 = ops.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = Attention(config)
        self.layer_norm2 = ops.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config)

    def __call__(self, x: Array) -> Array:
        """[B L C] -> [B L C]."""
        x = ops.residual(x, self.self_attn(self.layer_norm1(x)))
        return ops.residual(x, self.mlp(self.layer_norm2(x)))


class Encoder(mlx.nn.Module):
    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        self.layers = [EncoderLayer(config) for _ in range(config.num_hidden_layers)]

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """Return the states [B 1+L C] before the last layer and after it."""
        *layers, last = self.layers
        for layer in layers:
            x = layer(x)
        return x, last(x)


# Model


class CLIPVisionEncoder(mlx.nn.Module):
    def __init__(self, config: CLIPVisionConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.embeddings = Embeddings(config, stream)
        self.pre_layrnorm = ops.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.encoder = Encoder(config)
        self.post_layernorm = ops.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.visual_projection = ops.Linear(config.hidden_size, config.projection_dim, bias=False)

    def __call__(self, patches: Array) -> tuple[Array, Array]:
        """Encode patches [B L values] to embeddings [B P] and the states before the last layer [B 1+L C]."""
        x = ops.stream(self.pre_layrnorm(self.embeddings(patches)), self.stream)
        states, last = self.encoder(x)
        return self.visual_projection(self.post_layernorm(last[:, 0])), states


# Runner


class Runner(LoadedNetwork[CLIPVisionConfig, CLIPVisionEncoder]):
    network, role = CLIPVisionEncoder, "text"

    @ops.computes
    def encode(self, patches: NumpyArray) -> tuple[Array, Array]:
        """Encode the patches of pictures [B L values] to embeddings [B P] and the states before the last layer
        [B 1+L C]."""
        return self.model(ops.table(patches, self.table_dtype))
