# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""The encoder of Stable Cascade's prior. What is unusual about it: `qwenimg.common.networks.vaes.effnet`.

B pictures, z channels of the latents, C channels, R numbers that weigh them, h w pixels. Attribute paths are checkpoint
keys.
"""

from __future__ import annotations

from typing import Any

import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.vaes import sequence
from qwenimg.backends.mlx.networks.vaes.vae import WIDE, VAERunner
from qwenimg.backends.mlx.ops import images
from qwenimg.common.networks.vaes.effnet import LAST_NORM_EPS, NORM_EPS, EffnetConfig, MBConv
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


def conv(I: int, O: int, kernel: int, stride: int = 1, groups: int = 1) -> Any:
    """Return a convolution and its norm."""
    layer = ops.Conv2d(I, O, kernel, stride=stride, padding=kernel // 2, bias=False, groups=groups)
    return [layer, ops.BatchNorm(O, NORM_EPS)]


def active(layers: Any, x: Array) -> Array:
    """Return SiLU of a convolution with its norm."""
    return ops.norm_silu(layers[1], layers[0](x))


class Squeeze(mlx.nn.Module):
    """Weighs the channels by numbers that are made of their means over the image."""

    def __init__(self, C: int, R: int):
        super().__init__()
        self.fc1 = ops.Linear(C, R)
        self.fc2 = ops.Linear(R, C)

    def __call__(self, x: Array) -> Array:
        """[B h w C] -> [B h w C]."""
        tokens = images.tokens(x)
        means = ops.at_least_float32(tokens).mean(axis=1)[:, None]
        gate = self.fc2(ops.silu(self.fc1(means)))
        return images.image(ops.sigmoid_gated(tokens, gate), x)


class Block(mlx.nn.Module):
    def __init__(self, sizes: MBConv):
        super().__init__()
        I, C, O, stride, self.fused = sizes
        self.adds = stride == 1 and I == O
        layers = [conv(I, O if sizes.is_one else C, 3, stride)]
        if not self.fused:
            layers = [conv(I, C, 1), conv(C, C, 3, stride, groups=C), Squeeze(C, sizes.squeezed)]
        self.block = layers if sizes.is_one else [*layers, conv(C, O, 1)]

    def __call__(self, x: Array) -> Array:
        """[B h w C] -> [B h' w' O]."""
        block: Any = self.block
        y = active(block[0], x)
        if not self.fused:
            y = block[2](active(block[1], y))
        if len(block) > 1:
            layer, norm = block[-1]
            y = norm(layer(y))
        return ops.eval(ops.residual(x, y) if self.adds else y)


def stage(blocks: tuple[MBConv, ...]) -> Any:
    return [Block(sizes) for sizes in blocks]


# Model


class EfficientNetEncoder(mlx.nn.Module):
    def __init__(self, config: EffnetConfig):
        super().__init__()
        first, last = conv(3, config.widths[0], 3, 2), conv(config.widths[-1], config.features, 1)
        self.backbone = [first, *map(stage, config.stages), last]
        layer = ops.Conv2d(config.features, config.latent_channels, 1, bias=False)
        norm = ops.BatchNorm(config.latent_channels, LAST_NORM_EPS, affine=False)
        self.mapper = [layer, norm]

    def encode(self, pixels: Array, rows: int = WIDE) -> Array:
        """Encode normalized pixels [B 32h 32w 3] to latents [B h w z] in the sampler's scale, as a whole."""
        backbone: Any = self.backbone
        first, *stages, last = backbone
        x = active(first, pixels)
        for blocks in stages:
            x = sequence.chained(blocks, x)
        layer, norm = self.mapper
        return norm(layer(active(last, x)))


# Runner


class Runner(VAERunner):
    def __init__(self, config: EffnetConfig, plan: LoadPlan, precision: Precision):
        super().__init__(lambda: EfficientNetEncoder(config), plan, precision)
