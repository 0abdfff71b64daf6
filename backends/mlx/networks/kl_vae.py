# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Stable Diffusion's VAE. What is unusual about it: `qwenimg.common.networks.kl_vae`.

B images, C channels, L pixels as tokens, h w latents or pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.vae import VAE
from qwenimg.backends.mlx.ops import images
from qwenimg.common.networks.kl_vae import NORM_EPS, OVERLAP, KLVAEConfig
from qwenimg.common.numbers.tiles import Fade, fades
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


class ResidualBlock(mlx.nn.Module):
    def __init__(self, inputs: int, outputs: int, groups: int):
        super().__init__()
        self.norm1 = ops.GroupNorm(groups, inputs, NORM_EPS)
        self.conv1 = ops.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = ops.GroupNorm(groups, outputs, NORM_EPS)
        self.conv2 = ops.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.conv_shortcut = ops.Conv2d(inputs, outputs, 1)

    def __call__(self, x: Array) -> Array:
        update = self.conv1(ops.norm_silu(self.norm1, x))
        update = self.conv2(ops.norm_silu(self.norm2, update))
        return ops.residual(self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x, update)


class AttentionBlock(mlx.nn.Module):
    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.group_norm = ops.GroupNorm(groups, channels, NORM_EPS)
        self.to_q = ops.Linear(channels, channels)
        self.to_k = ops.Linear(channels, channels)
        self.to_v = ops.Linear(channels, channels)
        self.to_out = [ops.Linear(channels, channels)]

    def __call__(self, x: Array) -> Array:
        tokens = images.tokens(self.group_norm(x))
        tokens = ops.single_head_attention(self.to_q(tokens), self.to_k(tokens), self.to_v(tokens))
        return ops.residual(x, images.image(self.to_out[0](tokens), x))


class MidBlock(mlx.nn.Module):
    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.attentions = [AttentionBlock(channels, groups)]
        resnets = [ResidualBlock(channels, channels, groups), ResidualBlock(channels, channels, groups)]
        self.resnets = resnets

    def __call__(self, x: Array) -> Array:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Downsample(mlx.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = ops.Conv2d(channels, channels, 3, stride=2)

    def __call__(self, x: Array) -> Array:
        return self.conv(ops.pad_right_bottom(x))


class Upsample(mlx.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = ops.Conv2d(channels, channels, 3, padding=1)

    def __call__(self, x: Array) -> Array:
        return self.conv(images.upsample(x))


class DownBlock(mlx.nn.Module):
    def __init__(self, inputs: int, outputs: int, downsampled: bool, config: KLVAEConfig):
        super().__init__()
        groups = config.norm_num_groups
        more = [ResidualBlock(outputs, outputs, groups) for _ in range(config.layers_per_block - 1)]
        self.resnets = [ResidualBlock(inputs, outputs, groups), *more]
        self.downsamplers = [Downsample(outputs)] if downsampled else []

    def __call__(self, x: Array) -> Array:
        for layer in [*self.resnets, *self.downsamplers]:
            x = ops.eval(layer(x))
        return x


class UpBlock(mlx.nn.Module):
    def __init__(self, inputs: int, outputs: int, upsampled: bool, config: KLVAEConfig):
        super().__init__()
        groups = config.norm_num_groups
        more = [ResidualBlock(outputs, outputs, groups) for _ in range(config.layers_per_block)]
        self.resnets = [ResidualBlock(inputs, outputs, groups), *more]
        self.upsamplers = [Upsample(outputs)] if upsampled else []

    def __call__(self, x: Array) -> Array:
        for layer in [*self.resnets, *self.upsamplers]:
            x = ops.eval(layer(x))
        return x


# Model


class Encoder(mlx.nn.Module):
    def __init__(self, config: KLVAEConfig):
        super().__init__()
        groups, top = config.norm_num_groups, config.block_out_channels[-1]
        self.conv_in = ops.Conv2d(config.in_channels, config.block_out_channels[0], 3, padding=1)
        self.down_blocks = [DownBlock(i, o, down, config) for i, o, down in config.down_blocks]
        self.mid_block = MidBlock(top, groups)
        self.conv_norm_out = ops.GroupNorm(groups, top, NORM_EPS)
        self.conv_out = ops.Conv2d(top, 2 * config.latent_channels, 3, padding=1)

    def __call__(self, x: Array) -> Array:
        """Pixels [B 8h 8w 3] -> [B h w 2z]."""
        x = self.conv_in(images.laid_out(x, self.conv_in.dtype))
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(ops.norm_silu(self.conv_norm_out, self.mid_block(x)))


class Decoder(mlx.nn.Module):
    def __init__(self, config: KLVAEConfig):
        super().__init__()
        self.scale, self.channels = config.scale, config.out_channels
        groups, top, bottom = config.norm_num_groups, config.block_out_channels[-1], config.block_out_channels[0]
        self.conv_in = ops.Conv2d(config.latent_channels, top, 3, padding=1)
        self.mid_block = MidBlock(top, groups)
        self.up_blocks = [UpBlock(i, o, up, config) for i, o, up in config.up_blocks]
        self.conv_norm_out = ops.GroupNorm(groups, bottom, NORM_EPS)
        self.conv_out = ops.Conv2d(bottom, config.out_channels, 3, padding=1)

    def up(self, x: Array) -> Array:
        """Everything behind the mid block: [B h w C] -> [B 8h 8w 3]."""
        for block in self.up_blocks:
            x = block(x)
        return ops.eval(self.conv_out(ops.norm_silu(self.conv_norm_out, x)))

    def __call__(self, z: Array, height: int, width: int, tile: int) -> Array:
        """Latents [B h w z] -> pixels [B 8h 8w 3]; the up blocks in tiles of at most `tile` latents a side."""
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

    def tile(self, x: Array, row: Fade, column: Fade) -> Array:
        """The pixels of one tile, times its weights."""
        part = self.up(
            images.window(x, slice(row.read_start, row.read_stop), slice(column.read_start, column.read_stop))
        )
        return ops.faded(part, row.weights, column.weights)


class KLVAE(mlx.nn.Module):
    def __init__(self, config: KLVAEConfig):
        super().__init__()
        self.encoder = Encoder(config)
        if config.use_quant_conv:
            self.quant_conv = ops.Conv2d(2 * config.latent_channels, 2 * config.latent_channels, 1)
        if config.use_post_quant_conv:
            self.post_quant_conv = ops.Conv2d(config.latent_channels, config.latent_channels, 1)
        self.decoder = Decoder(config)

    def encode(self, pixels: Array) -> Array:
        """Pixels [B 8h 8w 3] -> mean and log variance [B h w 2z]."""
        moments = self.encoder(pixels)
        return self.quant_conv(moments) if hasattr(self, "quant_conv") else moments

    def decode(self, z: Array, height: int, width: int, tile: int) -> Array:
        """Latents [B h w z] -> pixels [B 8h 8w 3], not clamped."""
        z = self.post_quant_conv(z) if hasattr(self, "post_quant_conv") else z
        return self.decoder(z, height, width, tile)


# Component


class Component(VAE):
    def __init__(self, config: KLVAEConfig, plan: LoadPlan, precision: Precision):
        super().__init__(lambda: KLVAE(config), plan, precision)
