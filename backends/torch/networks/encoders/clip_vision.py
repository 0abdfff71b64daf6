"""CLIP's image encoder. What is unusual about it: `qwenimg.common.networks.encoders.clip_vision`.

B pictures, L patches, C hidden size, P width of the embedding. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.encoders.clip import EncoderLayer
from qwenimg.backends.torch.networks.loaded import LoadedNetwork
from qwenimg.common.networks.encoders.clip_vision import CLIPVisionConfig
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class Embeddings(torch.nn.Module):
    def __init__(self, config: CLIPVisionConfig, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.class_embedding = ops.Embedding(1, config.hidden_size)
        self.patch_embedding = ops.Linear(config.patch_values, config.hidden_size, bias=False)
        self.position_embedding = ops.Embedding(config.patches + 1, config.hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        """[B L values] -> [B 1+L C]."""
        x = ops.stream(self.patch_embedding(patches), self.stream)
        first = ops.repeated(ops.stream(self.class_embedding.weight, self.stream)[None], x.shape[0])
        return ops.add(torch.cat([first, x], dim=1), self.position_embedding.weight)


class Encoder(torch.nn.Module):
    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        self.layers = torch.nn.ModuleList([EncoderLayer(config, causal=False) for _ in range(config.num_hidden_layers)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states [B 1+L C] before the last layer and after it."""
        *layers, last = self.layers
        for layer in layers:
            x = layer(x)
        return x, last(x)


# Model


class CLIPVisionEncoder(torch.nn.Module):
    def __init__(self, config: CLIPVisionConfig, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.embeddings = Embeddings(config, stream)
        self.pre_layrnorm = ops.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.encoder = Encoder(config)
        self.post_layernorm = ops.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.visual_projection = ops.Linear(config.hidden_size, config.projection_dim, bias=False)

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Encode patches [B L values] to embeddings [B P] and the states before the last layer [B 1+L C]."""
        x = ops.stream(self.pre_layrnorm(self.embeddings(patches)), self.stream)
        states, last = self.encoder(x)
        return self.visual_projection(self.post_layernorm(last[:, 0])), states


# Runner


class Runner(LoadedNetwork[CLIPVisionConfig, CLIPVisionEncoder]):
    network, role = CLIPVisionEncoder, "text"

    @ops.computes
    def encode(self, patches: NumpyArray) -> tuple[Tensor, Tensor]:
        """Encode the patches of pictures [B L values] to embeddings [B P] and the states before the last layer
        [B 1+L C]."""
        return self.model(self.table(patches))
