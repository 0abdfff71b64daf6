# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""The gated feed-forward with a depthwise convolution of SANA's transformer and of its VAE.

B batch, L tokens, C channels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.ops import images


class GatedConv(mlx.nn.Module):
    """1x1 kernels are linear layers over tokens."""

    def __init__(self, channels: int, hidden: int):
        super().__init__()
        self.hidden = hidden
        self.conv_inverted = ops.Linear(channels, 2 * hidden)
        self.conv_depth = ops.Conv2d(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden)
        self.conv_point = ops.Linear(hidden, channels, bias=False)

    def __call__(self, x: Array, plane: Array) -> Array:
        """[B L C] -> [B L C], for the tokens of an image with the sides of `plane` [h w]."""
        y = images.on_plane(ops.silu(self.conv_inverted(x)), plane)
        y = images.tokens(self.conv_depth(y))
        return self.conv_point(ops.swiglu(y[..., self.hidden :], y[..., : self.hidden]))
