# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""SigLIP's image encoder. What is unusual about it: `qwenimg.common.networks.encoders.siglip_vision`.

B pictures, L patches, C hidden size. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.encoders.clip import EncoderLayer
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.encoders.siglip_vision import SiglipVisionConfig
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class Embeddings(mlx.nn.Module):
    def __init__(self, config: SiglipVisionConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.patch_embedding = ops.Linear(config.patch_values, config.hidden_size)
        self.position_embedding = ops.Embedding(config.patches, config.hidden_size)

    def __call__(self, patches: Array) -> Array:
        """[B L values] -> [B L C]."""
        return ops.add(ops.stream(self.patch_embedding(patches), self.stream), self.position_embedding.weight)


class Encoder(mlx.nn.Module):
    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        self.layers = [EncoderLayer(config, causal=False) for _ in range(config.num_hidden_layers)]

    def __call__(self, x: Array) -> Array:
        """[B L C] -> [B L C]."""
        for layer in self.layers:
            x = layer(x)
        return x


# Model


class SiglipVisionEncoder(mlx.nn.Module):
    def __init__(self, config: SiglipVisionConfig, stream: mx.Dtype):
        super().__init__()
        self.embeddings = Embeddings(config, stream)
        self.encoder = Encoder(config)
        self.post_layernorm = ops.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(self, patches: Array) -> Array:
        """Encode patches [B L values] to the states after the last layer and its norm [B L C]."""
        return self.post_layernorm(self.encoder(self.embeddings(patches)))


# Runner


class Runner(LoadedNetwork[SiglipVisionConfig, SiglipVisionEncoder]):
    network, role = SiglipVisionEncoder, "text"

    @ops.computes
    def encode(self, patches: NumpyArray) -> Array:
        """Encode the patches of pictures [B L values] to states [B L C]."""
        return self.model(self.table(patches))
