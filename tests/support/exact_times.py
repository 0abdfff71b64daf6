"""What tests of several rooms share of `test_float64_twin`."""

from __future__ import annotations

import math

import torch


class ExactTimes(torch.nn.Module):
    """The sinusoids of float32 times, in float64: cosines, then sines."""

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        exponents = torch.arange(128, dtype=torch.float64) / 128
        angles = 1000.0 * timestep.float().double()[:, None] * torch.exp(-math.log(10000.0) * exponents)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)
