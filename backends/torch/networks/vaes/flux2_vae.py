"""Flux.2's VAE. What is unusual about it: `qwenimg.common.networks.vaes.flux2_vae`.

B images, z channels of the latents before patches, h w latents or pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.vaes.kl_vae import KLVAE
from qwenimg.backends.torch.networks.vaes.vae import WIDE, VAERunner
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.vaes.flux2_vae import PATCH, Flux2VAEConfig
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan


class Flux2VAE(KLVAE):
    def __init__(self, config: Flux2VAEConfig):
        super().__init__(config)
        self.bn = ops.ChannelStatistics(config.patch_channels, config.batch_norm_eps)

    def encode(self, pixels: Tensor, rows: int = WIDE) -> Tensor:
        """Encode pixels [B 3 16h 16w] to mean and log variance [B 8z h w] of latents in patches."""
        return self.bn(images.patches(super().encode(pixels, rows)))

    def decode(self, z: Tensor, height: int, width: int, rows: int) -> Tensor:
        """Decode latents in patches [B 4z h w] to pixels [B 3 16h 16w], not clamped."""
        return super().decode(images.unpatched(self.bn.inverse(z)), PATCH * height, PATCH * width, rows)


class Runner(VAERunner):
    def __init__(self, config: Flux2VAEConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        super().__init__(lambda: Flux2VAE(config), plan, precision, device)
