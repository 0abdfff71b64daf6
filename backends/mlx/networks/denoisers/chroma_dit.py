# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Chroma's transformer: Flux.1's, with an approximator that makes its modulation. What is unusual about it:
`qwenimg.common.networks.denoisers.chroma_dit`.

T times, N vectors of modulation, C width of the streams. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.denoisers.diffusion_transformer import TimestepEmbedding
from qwenimg.backends.mlx.networks.denoisers.flux_dit import FluxTransformer, Modulation, Rows, TransformerRunner
from qwenimg.common.networks.denoisers.chroma_dit import APPROXIMATOR, RMS_EPS, ChromaConfig
from qwenimg.common.runtime.engine import NumpyArray


class Approximator(mlx.nn.Module):
    def __init__(self, config: ChromaConfig):
        super().__init__()
        inner, count = config.approximator_hidden_dim, config.approximator_layers
        self.in_proj = ops.Linear(config.approximator_num_channels, inner)
        self.layers = [TimestepEmbedding(inner, inner) for _ in range(count)]
        self.norms = [ops.RMSNorm(inner, RMS_EPS) for _ in range(count)]
        self.out_proj = ops.Linear(inner, config.dim)

    def __call__(self, features: Array) -> Array:
        """Return the vectors of modulation [N C] of one time for its features [N channels]."""
        x = self.in_proj(features)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.out_proj(x)


class ChromaTransformer(FluxTransformer):
    def __init__(self, config: ChromaConfig, stream: mx.Dtype):
        super().__init__(config, stream)
        self.distilled_guidance_layer = Approximator(config)


class Runner(TransformerRunner[ChromaConfig, ChromaTransformer]):
    network = ChromaTransformer

    @ops.computes
    def modulate(self, features: NumpyArray) -> Modulation:
        """Return the rows of every block and of the head for the features [T N channels] of times. The approximator is
        read, used and freed."""
        rows = self.table(features)
        approximator = self.model.distilled_guidance_layer
        made = self.briefly(APPROXIMATOR, lambda: mx.concatenate([approximator(one)[None] for one in rows], axis=0))
        config = self.config
        image = 3 * config.num_single_layers
        text = image + 6 * config.num_layers

        def flat(first: int, count: int) -> Array:
            return made[:, first : first + count].reshape(made.shape[0], -1)

        double = [(flat(image + 6 * i, 6), flat(text + 6 * i, 6)) for i in range(config.num_layers)]
        single = [flat(3 * i, 3) for i in range(config.num_single_layers)]
        shift, scale = flat(config.vectors - 2, 1), flat(config.vectors - 1, 1)
        return Modulation(Rows(double, single), mx.concatenate((scale, shift), axis=-1))
