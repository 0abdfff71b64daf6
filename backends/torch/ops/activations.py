"""Activations that are straight on both sides of zero."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.backends.torch.ops.functions import in_place
from qwenimg.common.runtime.observers import seen


def leaky_relu(x: Tensor, slope: float) -> Tensor:
    """Return x where it is positive, else `slope` times x. It is not read again."""
    return F.leaky_relu(x, slope, inplace=in_place(x))


def relu(x: Tensor) -> Tensor:
    """Return x where it is positive, else 0. It is not read again."""
    return F.relu(x, inplace=in_place(x))


class ReLU(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Return x where it is positive, else 0. It is not read again."""
        return relu(x)


class PReLU(torch.nn.Module):
    path = ""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return x where it is positive, else x times its channel's weight, in x's dtype."""
        return seen("prelu", self.path, F.prelu(x, self.weight.to(x.dtype)))
