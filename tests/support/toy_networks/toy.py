"""A toy denoiser: each pixel by itself, under the colour that the prompt's letters say."""

from __future__ import annotations

import torch
from support.toy_family import ToyConfig
from torch import Tensor

from qwenimg.backends.torch import load, ops
from qwenimg.common.precision.precision import Precision
from qwenimg.common.runtime.engine import NumpyArray
from qwenimg.common.weights.plan import LoadPlan


class Toy(torch.nn.Module):
    def __init__(self, config: ToyConfig, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.img_in = ops.Linear(config.channels, config.width)
        self.letters = ops.Linear(config.letters, config.width)
        self.norm_out = ops.LayerNorm(config.width, 1e-6)
        self.proj_out = ops.Linear(config.width, config.channels)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Latents [B L C] and counts of letters [B 1 letters] -> the velocity [B L C]."""
        hidden = ops.add(ops.stream(self.img_in(x), self.stream), ops.silu(self.letters(text)))
        return self.proj_out(self.norm_out(hidden))


class Runner:
    def __init__(self, config: ToyConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        self.device = device
        stream = ops.DTYPES[precision.residual_dtype("transformer")]
        self.dtype = ops.DTYPES[precision.compute_dtype("transformer")]
        self.model = load.empty(lambda: Toy(config, stream))
        load.fill(self.model, plan, device)

    @ops.computes
    def predict(self, x: Tensor, step: None, text: NumpyArray) -> Tensor:
        return ops.at_least_float32(self.model(x, ops.table(text, self.dtype, self.device)))
