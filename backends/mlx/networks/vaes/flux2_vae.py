# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Flux.2's VAE. What is unusual about it: `qwenimg.common.networks.vaes.flux2_vae`.

B images, z channels of the latents before patches, h w latents or pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.vaes.kl_vae import KLVAE
from qwenimg.backends.mlx.networks.vaes.vae import WIDE, VAERunner
from qwenimg.backends.mlx.ops import images
from qwenimg.common.networks.vaes.flux2_vae import PATCH, Flux2VAEConfig
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan


class Flux2VAE(KLVAE):
    def __init__(self, config: Flux2VAEConfig):
        super().__init__(config)
        self.bn = ops.ChannelStatistics(config.patch_channels, config.batch_norm_eps)

    def encode(self, pixels: Array, rows: int = WIDE) -> Array:
        """Encode pixels [B 16h 16w 3] to mean and log variance [B h w 8z] of latents in patches."""
        return self.bn(images.patches(super().encode(pixels, rows)))

    def decode(self, z: Array, height: int, width: int, rows: int) -> Array:
        """Decode latents in patches [B h w 4z] to pixels [B 16h 16w 3], not clamped."""
        return super().decode(images.unpatched(self.bn.inverse(z)), PATCH * height, PATCH * width, rows)


class Runner(VAERunner):
    def __init__(self, config: Flux2VAEConfig, plan: LoadPlan, precision: Precision):
        super().__init__(lambda: Flux2VAE(config), plan, precision)
