"""RRDBNet, the network of ESRGAN. What is unusual about it: `qwenimg.common.networks.upscalers.rrdbnet`.

B pictures, C features, h w pixels of the picture. Attribute paths are BasicSR's keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.upscalers.upscaler import UpscalerRunner
from qwenimg.backends.torch.networks.vaes import bands
from qwenimg.backends.torch.networks.vaes.bands import BandLayers
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.upscalers.rrdbnet import CONVS, REACH, REACH_OF_END, RESIDUAL, SLOPE, RRDBNetConfig
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


class DenseBlock(torch.nn.Module):
    """Convolutions that each see the results of all before."""

    def __init__(self, features: int, growth: int):
        super().__init__()
        self.conv1 = ops.Conv2d(features, growth, 3, padding=1)
        self.conv2 = ops.Conv2d(features + growth, growth, 3, padding=1)
        self.conv3 = ops.Conv2d(features + 2 * growth, growth, 3, padding=1)
        self.conv4 = ops.Conv2d(features + 3 * growth, growth, 3, padding=1)
        self.conv5 = ops.Conv2d(features + (CONVS - 1) * growth, features, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        seen = x
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            seen = ops.eval(images.beside(seen, ops.leaky_relu(conv(seen), SLOPE)))
        return ops.damped(x, self.conv5(seen), RESIDUAL)


class Block(torch.nn.Module):
    """Three dense blocks in a residual (RRDB)."""

    def __init__(self, features: int, growth: int):
        super().__init__()
        self.rdb1 = DenseBlock(features, growth)
        self.rdb2 = DenseBlock(features, growth)
        self.rdb3 = DenseBlock(features, growth)

    def forward(self, x: Tensor) -> Tensor:
        return ops.eval(ops.damped(x, self.rdb3(self.rdb2(self.rdb1(x))), RESIDUAL))


# Model


class RRDBNet(torch.nn.Module):
    def __init__(self, config: RRDBNetConfig):
        super().__init__()
        C = config.features
        self.patch, self.enlarged = config.patch, config.enlarged
        self.conv_first = ops.Conv2d(config.channels * config.patch**2, C, 3, padding=1)
        self.body = torch.nn.ModuleList([Block(C, config.growth) for _ in range(config.blocks)])
        self.conv_body = ops.Conv2d(C, C, 3, padding=1)
        for i in range(config.enlarged):
            setattr(self, f"conv_up{i + 1}", ops.Conv2d(C, C, 3, padding=1))
        self.conv_hr = ops.Conv2d(C, C, 3, padding=1)
        self.conv_last = ops.Conv2d(C, config.channels, 3, padding=1)

    def end(self, x: Tensor) -> Tensor:
        """Run everything after the blocks: features [B C h w] -> a picture of the result's size."""
        for i in range(self.enlarged):
            x = ops.eval(ops.leaky_relu(getattr(self, f"conv_up{i + 1}")(images.upsample(x)), SLOPE))
        x = ops.eval(ops.leaky_relu(self.conv_hr(x), SLOPE))
        return ops.eval(self.conv_last(x))

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return larger pictures of [B 3 h w], values 0 to 1, in bands of `rows` rows where there are more."""
        x = images.patches(x, self.patch)
        x = bands.run([BandLayers(begin=self.conv_first, reach=1)], x, rows)
        blocks = [BandLayers(begin=block, reach=REACH) for block in self.body]
        body = bands.run([*blocks, BandLayers(begin=self.conv_body, reach=1)], x, rows)
        x = ops.eval(ops.residual(x, body))
        return bands.run([BandLayers(begin=self.end, reach=REACH_OF_END, up=2**self.enlarged)], x, rows)


# Runner


class Runner(UpscalerRunner):
    def __init__(self, config: RRDBNetConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        super().__init__(lambda: RRDBNet(config), plan, precision, device)
