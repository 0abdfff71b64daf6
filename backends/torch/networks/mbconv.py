"""The gated feed-forward with a depthwise convolution of SANA's transformer and of its VAE.

B batch, L tokens, C channels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.ops import images


class GatedConv(torch.nn.Module):
    """1x1 kernels are linear layers over tokens."""

    def __init__(self, channels: int, hidden: int):
        super().__init__()
        self.hidden = hidden
        self.conv_inverted = ops.Linear(channels, 2 * hidden)
        self.conv_depth = ops.Conv2d(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden)
        self.conv_point = ops.Linear(hidden, channels, bias=False)

    def forward(self, x: Tensor, plane: Tensor) -> Tensor:
        """[B L C] -> [B L C], for the tokens of an image with the sides of `plane` [h w]."""
        y = images.on_plane(ops.silu(self.conv_inverted(x)), plane)
        y = images.tokens(self.conv_depth(y))
        return self.conv_point(ops.swiglu(y[..., self.hidden :], y[..., : self.hidden]))
