# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Ovis-Image's transformer: Flux.1's, with gated feed-forwards. What is unusual about it:
`qwenimg.common.networks.denoisers.ovis_dit`.

B batch, L image tokens, S text tokens, C width of the streams. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.denoisers import flux_dit
from qwenimg.backends.mlx.networks.denoisers.diffusion_transformer import (
    FeedForward,
    FeedForwardIn,
    Rope,
)
from qwenimg.backends.mlx.networks.denoisers.flux_dit import (
    FluxTransformer,
    SingleTransformerBlock,
    TransformerBlock,
)
from qwenimg.common.networks.denoisers import ovis_dit
from qwenimg.common.networks.denoisers.flux_conditioning import Grid
from qwenimg.common.networks.denoisers.flux_dit import NORM_EPS, FluxConfig

# Layers


class GatedIn(FeedForwardIn):
    """The values times SiLU of their gate: the second half of `hidden` channels."""

    def __call__(self, x: Array) -> Array:
        """[B L C] -> [B L hidden/2]."""
        return gated(self.proj(x))


class GatedFeedForward(FeedForward):
    def __init__(self, dim: int, hidden: int):
        super().__init__(dim, hidden)
        out = ops.Linear(hidden // 2, dim)
        self.net = [GatedIn(dim, hidden), mlx.nn.Identity(), out]


def gated(y: Array) -> Array:
    """Return the values times SiLU of the gate behind them: [B L hidden] -> [B L hidden/2]."""
    half = y.shape[-1] // 2
    return ops.swiglu(y[..., half:], y[..., :half])


# Blocks


class DoubleBlock(TransformerBlock):
    """A block with weights of its own for each stream."""

    def __init__(self, config: FluxConfig):
        super().__init__(config)
        self.ff = GatedFeedForward(config.dim, config.hidden)
        self.ff_context = GatedFeedForward(config.dim, config.hidden)


class SingleBlock(SingleTransformerBlock):
    """A block with the same weights for both streams: attention and feed-forward side by side."""

    def __init__(self, config: FluxConfig):
        super().__init__(config)
        self.proj_out = ops.Linear(config.dim + config.hidden // 2, config.dim)

    def hidden(self, x: Array) -> Array:
        """Return the feed-forward's gated values: [B L C] -> [B L hidden/2]."""
        return gated(self.proj_mlp(x))


# Model


class OvisTransformer(FluxTransformer):
    double_block, single_block = DoubleBlock, SingleBlock

    def __init__(self, config: FluxConfig, stream: mx.Dtype):
        super().__init__(config, stream)
        self.context_embedder_norm = ops.RMSNorm(config.joint_attention_dim, NORM_EPS)

    def context(self, text: Array) -> Array:
        """Return the start of the text stream [B S C] for text states [B S 2048]; the same in every step."""
        return ops.stream(self.context_embedder(self.context_embedder_norm(text)), self.stream)


class Runner(flux_dit.Runner):
    network = OvisTransformer

    def tables(self, grids: Sequence[Grid], length: int) -> Rope:
        """Return the tables of RoPE [L 1 D/2 2] of an image of `grids`, and of `length` text tokens."""
        img, txt = map(self.rope, ovis_dit.image_and_text_rope(self.config, grids, length))
        return img, txt
