# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""A T2I-Adapter. What is unusual about it: `qwenimg.common.networks.denoisers.t2i_adapter`.

B batch, C channels, h w latents, H W pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.denoisers.unet import Changes
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.backends.mlx.ops import images
from qwenimg.common.networks.denoisers.t2i_adapter import T2IAdapterConfig
from qwenimg.common.runtime.engine import NumpyArray


class Block(mlx.nn.Module):
    def __init__(self, width: int, kernel: int):
        super().__init__()
        self.block1 = ops.Conv2d(width, width, 3, padding=1)
        self.block2 = ops.Conv2d(width, width, kernel, padding=kernel // 2)

    def __call__(self, x: Array) -> Array:
        return ops.add(self.block2(ops.leaky_relu(self.block1(x), 0.0)), x)


class Body(mlx.nn.Module):
    def __init__(self, inputs: int, outputs: int, halves: bool, config: T2IAdapterConfig):
        super().__init__()
        self.halves = halves
        width, kernel = (outputs // 4, 3) if config.is_light else (outputs, 1)
        if config.is_light or inputs != outputs:
            self.in_conv = ops.Conv2d(inputs, width, 1)
        self.resnets = [Block(width, kernel) for _ in range(config.num_res_blocks)]
        if config.is_light:
            self.out_conv = ops.Conv2d(width, outputs, 1)

    def __call__(self, x: Array) -> Array:
        """[1 in h w] -> [1 out h' w']."""
        x = ops.averaged_pairs(x) if self.halves else x
        x = self.in_conv(x) if hasattr(self, "in_conv") else x
        for block in self.resnets:
            x = block(x)
        return self.out_conv(x) if hasattr(self, "out_conv") else x


class Bodies(mlx.nn.Module):
    def __init__(self, config: T2IAdapterConfig):
        super().__init__()
        self.factor = config.downscale_factor
        if not config.is_light:
            patch = config.in_channels * config.downscale_factor**2
            self.conv_in = ops.Conv2d(patch, config.channels[0], 3, padding=1)
        self.body = [Body(*sizes, config) for sizes in config.bodies]

    def __call__(self, picture: Array) -> list[Array]:
        """Return the features of a picture [1 C H W]."""
        x = images.patches(picture, self.factor)
        x = self.conv_in(x) if hasattr(self, "conv_in") else x
        features = []
        for body in self.body:
            x = body(x)
            features.append(x)
        return features


class T2IAdapter(mlx.nn.Module):
    def __init__(self, config: T2IAdapterConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.adapter = Bodies(config)

    def __call__(self, picture: Array) -> list[Array]:
        return [ops.stream(feature, self.stream) for feature in self.adapter(picture)]


# Runner


@dataclass(frozen=True)
class Condition:
    features: list[Array]
    controlled: int  # branches of the UNet, the first ones
    branches: int


class Runner(LoadedNetwork[T2IAdapterConfig, T2IAdapter]):
    network, role = T2IAdapter, "transformer"

    @ops.computes
    def condition(self, texts: NumpyArray, extra: tuple[NumpyArray | None, int], picture: Array) -> Condition:
        """Compute the features of the pixels of a picture [1 C H W], in the order of the pipeline, once. texts: a row
        for each branch that is controlled; extra: nothing, and the branches of the UNet."""
        _, branches = extra
        pixels = images.laid_out(images.from_bchw(picture), self.table_dtype)
        return Condition(self.model(pixels), len(texts), branches)

    @ops.computes
    def predict(self, x: Array, step: NumpyArray, condition: Condition, scales: Sequence[float]) -> Changes:
        """Return the features, each times its scale."""
        features = [
            feature if scale == 1 else feature * scale
            for feature, scale in zip(condition.features, scales, strict=True)
        ]
        if condition.controlled < condition.branches:
            features = [
                ops.with_zeros(ops.repeated(feature, condition.controlled), condition.branches) for feature in features
            ]
        return Changes([], None, features)
