"""Qwen-Image-2.1's VAE. What is unusual about it: `qwenimg.common.networks.vaes.qwen21_vae`.

B images, C channels, h w latents or pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.vaes.bands import BandLayers
from qwenimg.backends.torch.networks.vaes.qwen_vae import Decoder, Downsample, Encoder, QwenVAE, ResidualBlock, Upsample
from qwenimg.backends.torch.networks.vaes.vae import VAERunner
from qwenimg.common.networks.vaes.qwen21_vae import Qwen21VAEConfig, ResidualLevel
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


class LevelBlock(torch.nn.Module):
    """The residual blocks of a level, which has a shortcut around all of it."""

    def __init__(self, level: ResidualLevel, blocks: int):
        super().__init__()
        self.level, self.blocks = level, blocks
        more = [ResidualBlock(level.outputs, level.outputs) for _ in range(blocks - 1)]
        self.resnets = torch.nn.ModuleList([ResidualBlock(level.inputs, level.outputs), *more])

    def residuals(self, x: Tensor) -> Tensor:
        for block in self.resnets:
            x = ops.eval(block(x))
        return x


class DownBlock(LevelBlock):
    def __init__(self, level: ResidualLevel, blocks: int):
        super().__init__(level, blocks)
        if level.resampled:
            self.downsampler = Downsample(level.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B C 2h 2w] -> [B C' h w], or at the last level [B C h w] -> [B C' h w]."""
        update = self.residuals(x)
        if not self.level.resampled:
            return ops.residual(x, update)
        return ops.residual(ops.averaged_patches(x, self.level.outputs, self.level.frames), self.downsampler(update))

    def part(self) -> BandLayers:
        """Return all of it as one part that runs over bands."""
        reach = 2 * self.blocks
        if not self.level.resampled:
            return BandLayers(begin=self, reach=reach)
        return BandLayers(begin=self, reach=reach + 2, down=2)


class UpBlock(LevelBlock):
    def __init__(self, level: ResidualLevel, blocks: int):
        super().__init__(level, blocks)
        self.spread = level.spread if level.resampled else ()
        if level.resampled:
            self.upsampler = Upsample(level.outputs, level.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B C h w] -> [B C' 2h 2w], or at the last level [B C h w] -> [B C' h w]."""
        update = self.residuals(x)
        if not self.level.resampled:
            return update
        update = ops.eval(self.upsampler(update))
        return ops.residual(ops.spread_channels(x, self.spread), update)

    def parts(self) -> list[BandLayers]:
        """Return all of it as one part that runs over bands."""
        reach = 2 * self.blocks
        if not self.level.resampled:
            return [BandLayers(begin=self, reach=reach)]
        return [BandLayers(begin=self, reach=reach + 1, up=2)]


def _built(config: Qwen21VAEConfig) -> QwenVAE:
    z, blocks = config.z_dim, config.num_res_blocks
    downs = [DownBlock(level, blocks) for level in config.down_levels]
    ups = [UpBlock(level, blocks + 1) for level in config.up_levels]
    encoder = Encoder(config.in_channels, config.encoder_dims, z, downs)
    return QwenVAE(z, encoder, Decoder(z, config.decoder_dims, config.out_channels, ups, config.scale))


# Runner


class Runner(VAERunner):
    def __init__(self, config: Qwen21VAEConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        super().__init__(lambda: _built(config), plan, precision, device)
