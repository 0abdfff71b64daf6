"""SRVGGNetCompact, Real-ESRGAN's compact network. What is unusual: `qwenimg.common.networks.upscalers.srvgg`.

B pictures, C features, h w pixels of the picture. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.upscalers.upscaler import UpscalerRunner
from qwenimg.backends.torch.networks.vaes import bands
from qwenimg.backends.torch.networks.vaes.bands import BandLayers
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.upscalers.srvgg import SRVGGConfig
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan


class SRVGGNet(torch.nn.Module):
    def __init__(self, config: SRVGGConfig):
        super().__init__()
        C, self.scale = config.features, config.scale
        layers: list[torch.nn.Module] = [ops.Conv2d(config.channels, C, 3, padding=1), ops.PReLU(C)]
        for _ in range(config.convs):
            layers += [ops.Conv2d(C, C, 3, padding=1), ops.PReLU(C)]
        layers.append(ops.Conv2d(C, config.channels * config.scale**2, 3, padding=1))
        self.body = torch.nn.ModuleList(layers)

    def at(self, place: int) -> BandLayers:
        """Return the convolution at `place` of the list, with the activation after it, as a part."""
        layers = [self.body[i] for i in range(place, min(place + 2, len(self.body)))]

        def begin(x: Tensor) -> Tensor:
            for layer in layers:
                x = layer(x)
            return ops.eval(x)

        return BandLayers(begin=begin, reach=1)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return larger pictures of [B 3 h w], values 0 to 1, in bands of `rows` rows where there are more."""
        parts = [self.at(place) for place in range(0, len(self.body), 2)]
        larger = images.unpatched(bands.run(parts, x, rows), self.scale)
        return ops.residual(images.upsample(x, self.scale), larger)


# Runner


class Runner(UpscalerRunner):
    def __init__(self, config: SRVGGConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        super().__init__(lambda: SRVGGNet(config), plan, precision, device)
