"""The tiny VAE (TAESD). What is unusual about it: `qwenimg.common.networks.vaes.tiny_vae`.

B images, z channels of the latents, C channels of a half, h w latents or pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.vaes import sequence
from qwenimg.backends.torch.networks.vaes.bands import BandLayers
from qwenimg.backends.torch.networks.vaes.vae import WIDE, VAERunner
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.vaes.tiny_vae import LIMIT, NORM_EPS, POOL, POOL_GROUPS, REACH, TinyVAEConfig, smallest
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


class Block(torch.nn.Module):
    """Three convolutions in a residual, behind a gate over the whole image if it is `pooled`."""

    def __init__(self, C: int, pooled: bool):
        super().__init__()
        first, second, third = (ops.Conv2d(C, C, 3, padding=1) for _ in range(3))
        self.conv = torch.nn.ModuleList([first, ops.ReLU(), second, ops.ReLU(), third])
        self.pooled = pooled
        if pooled:
            wider, narrower = ops.Conv2d(C, POOL * C, 1, bias=False), ops.Conv2d(POOL * C, C, 1, bias=False)
            norm = ops.GroupNorm(POOL_GROUPS, POOL * C, NORM_EPS)
            self.pool = torch.nn.ModuleList([wider, norm, ops.ReLU(), narrower])

    def forward(self, x: Tensor) -> Tensor:
        if self.pooled:
            x = ops.residual(x, sequence.chained(self.pool, x))
        return ops.eval(ops.relu(ops.residual(x, sequence.chained(self.conv, x))))


class Upsample(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return images.upsample(x)


# Model


class Half(torch.nn.Module):
    """The encoder or the decoder: its layers, those at the size of the latents without bands."""

    def __init__(self, kinds: tuple[str, ...], inputs: int, C: int, outputs: int, pooled: bool):
        super().__init__()
        self.kinds, self.small = kinds, smallest(kinds)
        layers: list[torch.nn.Module] = []
        for place, kind in enumerate(kinds):
            if kind == "block":
                layers.append(Block(C, pooled and place in self.small))
            elif kind in ("relu", "up"):
                layers.append(ops.ReLU() if kind == "relu" else Upsample())
            else:
                I, O = C if place else inputs, outputs if place + 1 == len(kinds) else C
                resizes = kind == "down" or (place > 0 and kinds[place - 1] == "up")
                layers.append(ops.Conv2d(I, O, 3, stride=2 if kind == "down" else 1, padding=1, bias=not resizes))
        self.layers = torch.nn.ModuleList(layers)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it computes."""
        first: Any = self.layers[0]
        return first.dtype

    def forward(self, x: Tensor, rows: int, whole: bool) -> Tensor:
        """Run all layers on x, those above the latents' size in bands of `rows` rows unless `whole`."""
        x = images.laid_out(x, self.dtype)
        first, stop = self.small.start, self.small.stop
        small = list(self.layers)[first:stop]
        if first == 0:
            x = sequence.chained(small, x)
            return sequence.run(self.parts(stop, len(self.kinds)), x, rows, whole=whole)
        return sequence.chained(small, sequence.run(self.parts(0, first), x, rows, whole=whole))

    def parts(self, first: int, stop: int) -> list[BandLayers]:
        """Return the layers from `first` to before `stop` as parts that run over bands."""
        return sequence.parts(self.kinds[first:stop], list(self.layers)[first:stop], REACH)


class TinyVAE(torch.nn.Module):
    def __init__(self, config: TinyVAEConfig):
        super().__init__()
        z, self.scale, self.patch = config.latent_channels, config.scale, config.patch
        wide, narrow = config.encoder_block_out_channels[0], config.decoder_block_out_channels[0]
        self.encoder = Half(config.encoder_layers, config.in_channels, wide, z, config.pooled)
        self.decoder = Half(config.decoder_layers, z, narrow, config.out_channels, config.pooled)

    def encode(self, pixels: Tensor, rows: int = WIDE) -> Tensor:
        """Encode pixels [B 3 8h 8w] in -1..1 to latents [B z h w] in the sampler's scale."""
        z = self.encoder((pixels + 1) / 2, rows, images.height(pixels) <= rows)
        return images.patches(z, self.patch) if self.patch > 1 else z

    def decode(self, z: Tensor, height: int, width: int, rows: int) -> Tensor:
        """Decode latents [B z h w] in the sampler's scale to pixels [B 3 8h 8w] in -1..1, not clamped."""
        z = images.unpatched(z, self.patch) if self.patch > 1 else z
        whole = height * self.patch * self.scale <= rows
        return self.decoder(LIMIT * ops.tanh(z / LIMIT), rows, whole) * 2 - 1


# Runner


class Runner(VAERunner):
    def __init__(self, config: TinyVAEConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        super().__init__(lambda: TinyVAE(config), plan, precision, device)
