"""Stable Cascade's VAE. What is unusual about it: `qwenimg.common.networks.vaes.paella_vae`.

B images, z channels of the latents, C channels, h w latents or pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.vaes import sequence
from qwenimg.backends.torch.networks.vaes.bands import BandLayers
from qwenimg.backends.torch.networks.vaes.vae import VAERunner
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.vaes.paella_vae import MODULATIONS, NORM_EPS, WIDER, PaellaConfig
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


class Block(torch.nn.Module):
    def __init__(self, C: int):
        super().__init__()
        self.gammas = ops.Embedding(1, MODULATIONS)
        self.depthwise = torch.nn.ModuleList([torch.nn.Identity(), ops.Conv2d(C, C, 3, groups=C)])
        layers = [ops.Linear(C, WIDER * C), torch.nn.Identity(), ops.Linear(WIDER * C, C)]
        self.channelwise = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """[B C h w] -> [B C h w]."""
        scale1, shift1, gate1, scale2, shift2, gate2 = ops.at_least_float32(self.gammas.weight)[0]
        y = ops.unit_norm(images.tokens(x), NORM_EPS) * (1 + scale1) + shift1
        x = ops.add(x, self.depthwise[1](images.edged(images.image(y, x))) * gate1)
        y = ops.unit_norm(images.tokens(x), NORM_EPS) * (1 + scale2) + shift2
        y = self.channelwise[2](ops.gelu_erf(self.channelwise[0](y)))
        return ops.add(x, images.image(y * gate2, x))


def per_pixel(layer: Any, x: Tensor) -> Tensor:
    """Return a linear layer of each pixel."""
    return images.image(layer(images.tokens(x)), x)


# Model


class PaellaVAE(torch.nn.Module):
    def __init__(self, config: PaellaConfig):
        super().__init__()
        self.config = config
        self.up_blocks = torch.nn.ModuleList([self.layer(kind, width) for kind, width in config.decoder])
        last = ops.Linear(config.widths[0], config.out_channels * config.up_down_scale_factor**2)
        self.out_block = torch.nn.ModuleList([last])

    def layer(self, kind: str, width: int) -> Any:
        """Return a layer of the decoder."""
        if kind == "conv":
            return torch.nn.ModuleList([ops.Linear(self.config.latent_channels, width)])
        return Block(width) if kind == "block" else ops.ConvTranspose2d(width, width // 2, 4, 2, 1)

    def decode(self, z: Tensor, height: int, width: int, rows: int) -> Tensor:
        """Decode latents [B z h w] to pixels [B 3 4h 4w] in -1..1, not clamped: in bands of `rows` rows of the latents
        where there are more."""
        blocks: Any = self.up_blocks
        first, *layers = blocks
        x = per_pixel(first[0], z)
        x = sequence.run([self.part(layer) for layer in layers], x, rows, whole=height * self.config.scale <= rows)
        pixels = images.unpatched(per_pixel(self.out_block[0], x), self.config.up_down_scale_factor)
        return pixels * 2 - 1

    def part(self, layer: Any) -> BandLayers:
        """Return a layer as a part that runs over bands."""
        return BandLayers(begin=layer, reach=1, up=1 if isinstance(layer, Block) else 2)


# Runner


class Runner(VAERunner):
    def __init__(self, config: PaellaConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        super().__init__(lambda: PaellaVAE(config), plan, precision, device)
