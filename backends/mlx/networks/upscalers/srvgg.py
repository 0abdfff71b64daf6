# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""SRVGGNetCompact, Real-ESRGAN's compact network. What is unusual: `qwenimg.common.networks.upscalers.srvgg`.

B pictures, C features, h w pixels of the picture. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.upscalers.upscaler import UpscalerRunner
from qwenimg.backends.mlx.networks.vaes import bands
from qwenimg.backends.mlx.networks.vaes.bands import BandLayers
from qwenimg.backends.mlx.ops import images
from qwenimg.common.networks.upscalers.srvgg import SRVGGConfig
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan


class SRVGGNet(mlx.nn.Module):
    def __init__(self, config: SRVGGConfig):
        super().__init__()
        C, self.scale = config.features, config.scale
        layers: list[mlx.nn.Module] = [ops.Conv2d(config.channels, C, 3, padding=1), ops.PReLU(C)]
        for _ in range(config.convs):
            layers += [ops.Conv2d(C, C, 3, padding=1), ops.PReLU(C)]
        layers.append(ops.Conv2d(C, config.channels * config.scale**2, 3, padding=1))
        self.body = layers

    def at(self, place: int) -> BandLayers:
        """Return the convolution at `place` of the list, with the activation after it, as a part."""
        layers = [self.body[i] for i in range(place, min(place + 2, len(self.body)))]

        def begin(x: Array) -> Array:
            for layer in layers:
                x = layer(x)
            return ops.eval(x)

        return BandLayers(begin=begin, reach=1)

    def __call__(self, x: Array, rows: int) -> Array:
        """Return larger pictures of [B h w 3], values 0 to 1, in bands of `rows` rows where there are more."""
        parts = [self.at(place) for place in range(0, len(self.body), 2)]
        larger = images.unpatched(bands.run(parts, x, rows), self.scale)
        return ops.residual(images.upsample(x, self.scale), larger)


# Runner


class Runner(UpscalerRunner):
    def __init__(self, config: SRVGGConfig, plan: LoadPlan, precision: Precision):
        super().__init__(lambda: SRVGGNet(config), plan, precision)
