"""Stable Diffusion's VAE. What is unusual about it: `qwenimg.common.networks.kl_vae`.

B images, C channels, L pixels as tokens, h w latents or pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.vae import VAE
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.kl_vae import NORM_EPS, OVERLAP, KLVAEConfig
from qwenimg.common.numbers.tiles import Fade, fades
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


class ResidualBlock(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, groups: int):
        super().__init__()
        self.norm1 = ops.GroupNorm(groups, inputs, NORM_EPS)
        self.conv1 = ops.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = ops.GroupNorm(groups, outputs, NORM_EPS)
        self.conv2 = ops.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.conv_shortcut = ops.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        update = self.conv1(ops.norm_silu(self.norm1, x))
        update = self.conv2(ops.norm_silu(self.norm2, update))
        return ops.residual(self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x, update)


class AttentionBlock(torch.nn.Module):
    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.group_norm = ops.GroupNorm(groups, channels, NORM_EPS)
        self.to_q = ops.Linear(channels, channels)
        self.to_k = ops.Linear(channels, channels)
        self.to_v = ops.Linear(channels, channels)
        self.to_out = torch.nn.ModuleList([ops.Linear(channels, channels)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = images.tokens(self.group_norm(x))
        tokens = ops.single_head_attention(self.to_q(tokens), self.to_k(tokens), self.to_v(tokens))
        return ops.residual(x, images.image(self.to_out[0](tokens), x))


class MidBlock(torch.nn.Module):
    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.attentions = torch.nn.ModuleList([AttentionBlock(channels, groups)])
        resnets = [ResidualBlock(channels, channels, groups), ResidualBlock(channels, channels, groups)]
        self.resnets = torch.nn.ModuleList(resnets)

    def forward(self, x: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Downsample(torch.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = ops.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(ops.pad_right_bottom(x))


class Upsample(torch.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = ops.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(images.upsample(x))


class DownBlock(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, downsampled: bool, config: KLVAEConfig):
        super().__init__()
        groups = config.norm_num_groups
        more = [ResidualBlock(outputs, outputs, groups) for _ in range(config.layers_per_block - 1)]
        self.resnets = torch.nn.ModuleList([ResidualBlock(inputs, outputs, groups), *more])
        self.downsamplers = torch.nn.ModuleList([Downsample(outputs)] if downsampled else [])

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.resnets, *self.downsamplers]:
            x = ops.eval(layer(x))
        return x


class UpBlock(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, upsampled: bool, config: KLVAEConfig):
        super().__init__()
        groups = config.norm_num_groups
        more = [ResidualBlock(outputs, outputs, groups) for _ in range(config.layers_per_block)]
        self.resnets = torch.nn.ModuleList([ResidualBlock(inputs, outputs, groups), *more])
        self.upsamplers = torch.nn.ModuleList([Upsample(outputs)] if upsampled else [])

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.resnets, *self.upsamplers]:
            x = ops.eval(layer(x))
        return x


# Model


class Encoder(torch.nn.Module):
    def __init__(self, config: KLVAEConfig):
        super().__init__()
        groups, top = config.norm_num_groups, config.block_out_channels[-1]
        self.conv_in = ops.Conv2d(config.in_channels, config.block_out_channels[0], 3, padding=1)
        self.down_blocks = torch.nn.ModuleList([DownBlock(i, o, down, config) for i, o, down in config.down_blocks])
        self.mid_block = MidBlock(top, groups)
        self.conv_norm_out = ops.GroupNorm(groups, top, NORM_EPS)
        self.conv_out = ops.Conv2d(top, 2 * config.latent_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels [B 3 8h 8w] -> [B 2z h w]."""
        x = self.conv_in(images.laid_out(x, self.conv_in.dtype))
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(ops.norm_silu(self.conv_norm_out, self.mid_block(x)))


class Decoder(torch.nn.Module):
    def __init__(self, config: KLVAEConfig):
        super().__init__()
        self.scale, self.channels = config.scale, config.out_channels
        groups, top, bottom = config.norm_num_groups, config.block_out_channels[-1], config.block_out_channels[0]
        self.conv_in = ops.Conv2d(config.latent_channels, top, 3, padding=1)
        self.mid_block = MidBlock(top, groups)
        self.up_blocks = torch.nn.ModuleList([UpBlock(i, o, up, config) for i, o, up in config.up_blocks])
        self.conv_norm_out = ops.GroupNorm(groups, bottom, NORM_EPS)
        self.conv_out = ops.Conv2d(bottom, config.out_channels, 3, padding=1)

    def up(self, x: Tensor) -> Tensor:
        """Everything behind the mid block: [B C h w] -> [B 3 8h 8w]."""
        for block in self.up_blocks:
            x = block(x)
        return ops.eval(self.conv_out(ops.norm_silu(self.conv_norm_out, x)))

    def forward(self, z: Tensor, height: int, width: int, tile: int) -> Tensor:
        """Latents [B z h w] -> pixels [B 3 8h 8w]; the up blocks in tiles of at most `tile` latents a side."""
        x = ops.eval(self.mid_block(self.conv_in(images.laid_out(z, self.conv_in.dtype))))
        if height <= tile and width <= tile:
            return self.up(x)
        pixels = images.blank(x, self.channels, height * self.scale, width * self.scale)
        across = fades(width, tile, OVERLAP, self.scale)
        for row in fades(height, tile, OVERLAP, self.scale):
            for column in across:
                top, left = row.read_start * self.scale, column.read_start * self.scale
                pixels = ops.eval(images.add_at(pixels, self.tile(x, row, column), top, left))
        return pixels

    def tile(self, x: Tensor, row: Fade, column: Fade) -> Tensor:
        """The pixels of one tile, times its weights."""
        part = self.up(
            images.window(x, slice(row.read_start, row.read_stop), slice(column.read_start, column.read_stop))
        )
        return ops.faded(part, row.weights, column.weights)


class KLVAE(torch.nn.Module):
    def __init__(self, config: KLVAEConfig):
        super().__init__()
        self.encoder = Encoder(config)
        if config.use_quant_conv:
            self.quant_conv = ops.Conv2d(2 * config.latent_channels, 2 * config.latent_channels, 1)
        if config.use_post_quant_conv:
            self.post_quant_conv = ops.Conv2d(config.latent_channels, config.latent_channels, 1)
        self.decoder = Decoder(config)

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B 3 8h 8w] -> mean and log variance [B 2z h w]."""
        moments = self.encoder(pixels)
        return self.quant_conv(moments) if hasattr(self, "quant_conv") else moments

    def decode(self, z: Tensor, height: int, width: int, tile: int) -> Tensor:
        """Latents [B z h w] -> pixels [B 3 8h 8w], not clamped."""
        z = self.post_quant_conv(z) if hasattr(self, "post_quant_conv") else z
        return self.decoder(z, height, width, tile)


# Component


class Component(VAE):
    def __init__(self, config: KLVAEConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        super().__init__(lambda: KLVAE(config), plan, precision, device)
