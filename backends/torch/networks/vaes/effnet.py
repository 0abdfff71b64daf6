"""The encoder of Stable Cascade's prior. What is unusual about it: `qwenimg.common.networks.vaes.effnet`.

B pictures, z channels of the latents, C channels, R numbers that weigh them, h w pixels. Attribute paths are checkpoint
keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.vaes import sequence
from qwenimg.backends.torch.networks.vaes.vae import WIDE, VAERunner
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.vaes.effnet import LAST_NORM_EPS, NORM_EPS, EffnetConfig, MBConv
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


def conv(I: int, O: int, kernel: int, stride: int = 1, groups: int = 1) -> Any:
    """Return a convolution and its norm."""
    layer = ops.Conv2d(I, O, kernel, stride=stride, padding=kernel // 2, bias=False, groups=groups)
    return torch.nn.ModuleList([layer, ops.BatchNorm(O, NORM_EPS)])


def active(layers: Any, x: Tensor) -> Tensor:
    """Return SiLU of a convolution with its norm."""
    return ops.norm_silu(layers[1], layers[0](x))


class Squeeze(torch.nn.Module):
    """Weighs the channels by numbers that are made of their means over the image."""

    def __init__(self, C: int, R: int):
        super().__init__()
        self.fc1 = ops.Linear(C, R)
        self.fc2 = ops.Linear(R, C)

    def forward(self, x: Tensor) -> Tensor:
        """[B C h w] -> [B C h w]."""
        tokens = images.tokens(x)
        means = ops.at_least_float32(tokens).mean(dim=1)[:, None]
        gate = self.fc2(ops.silu(self.fc1(means)))
        return images.image(ops.sigmoid_gated(tokens, gate), x)


class Block(torch.nn.Module):
    def __init__(self, sizes: MBConv):
        super().__init__()
        I, C, O, stride, self.fused = sizes
        self.adds = stride == 1 and I == O
        layers = [conv(I, O if sizes.is_one else C, 3, stride)]
        if not self.fused:
            layers = [conv(I, C, 1), conv(C, C, 3, stride, groups=C), Squeeze(C, sizes.squeezed)]
        self.block = torch.nn.ModuleList(layers if sizes.is_one else [*layers, conv(C, O, 1)])

    def forward(self, x: Tensor) -> Tensor:
        """[B C h w] -> [B O h' w']."""
        block: Any = self.block
        y = active(block[0], x)
        if not self.fused:
            y = block[2](active(block[1], y))
        if len(block) > 1:
            layer, norm = block[-1]
            y = norm(layer(y))
        return ops.eval(ops.residual(x, y) if self.adds else y)


def stage(blocks: tuple[MBConv, ...]) -> Any:
    return torch.nn.ModuleList([Block(sizes) for sizes in blocks])


# Model


class EfficientNetEncoder(torch.nn.Module):
    def __init__(self, config: EffnetConfig):
        super().__init__()
        first, last = conv(3, config.widths[0], 3, 2), conv(config.widths[-1], config.features, 1)
        self.backbone = torch.nn.ModuleList([first, *map(stage, config.stages), last])
        layer = ops.Conv2d(config.features, config.latent_channels, 1, bias=False)
        norm = ops.BatchNorm(config.latent_channels, LAST_NORM_EPS, affine=False)
        self.mapper = torch.nn.ModuleList([layer, norm])

    def encode(self, pixels: Tensor, rows: int = WIDE) -> Tensor:
        """Encode normalized pixels [B 3 32h 32w] to latents [B z h w] in the sampler's scale, as a whole."""
        backbone: Any = self.backbone
        first, *stages, last = backbone
        x = active(first, pixels)
        for blocks in stages:
            x = sequence.chained(blocks, x)
        layer, norm = self.mapper
        return norm(layer(active(last, x)))


# Runner


class Runner(VAERunner):
    def __init__(self, config: EffnetConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        super().__init__(lambda: EfficientNetEncoder(config), plan, precision, device)
