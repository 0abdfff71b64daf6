# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Stable Diffusion's VAE. What is unusual about it: `qwenimg.common.networks.vaes.kl_vae`.

B images, C channels, L pixels as tokens, h w latents or pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from typing import Any

import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.vaes import bands
from qwenimg.backends.mlx.networks.vaes.bands import BandLayers, Normed, NormStep
from qwenimg.backends.mlx.networks.vaes.vae import WIDE, VAERunner
from qwenimg.backends.mlx.ops import images
from qwenimg.common.networks.vaes.kl_vae import NORM_EPS, KLVAEConfig
from qwenimg.common.numbers.tiles import wide_upsamplers
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
        return self.second(self.first(x, self.norm1, x), self.norm2, x)

    def first(self, x: Array, norm1: Normed, _: Array) -> Array:
        return self.conv1(ops.norm_silu(norm1, x))

    def second(self, update: Array, norm2: Normed, x: Array) -> Array:
        update = self.conv2(ops.norm_silu(norm2, update))
        return ops.residual(self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x, update)

    def part(self) -> BandLayers:
        steps = [NormStep(self.norm1, self.first), NormStep(self.norm2, self.second)]
        return BandLayers(begin=lambda x: x, reach=2, steps=steps)


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

    def part(self) -> BandLayers:
        return BandLayers(begin=self, reach=2, down=2)


class Upsample(mlx.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = ops.Conv2d(channels, channels, 3, padding=1)

    def __call__(self, x: Array) -> Array:
        return self.conv(images.upsample(x))

    def part(self) -> BandLayers:
        return BandLayers(begin=self, reach=1, up=2)


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

    def __call__(self, x: Array, rows: int) -> Array:
        """Encode pixels [B 8h 8w 3] to [B h w 2z]; the down blocks in bands of `rows` rows where there are more."""
        x = images.laid_out(x, self.conv_in.dtype)
        x = self.down(x) if images.height(x) <= rows else bands.run(self.parts(), x, rows)
        return self.conv_out(ops.norm_silu(self.conv_norm_out, self.mid_block(x)))

    def down(self, x: Array) -> Array:
        """Run everything before the mid block: [B 8h 8w 3] -> [B h w C]."""
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return x

    def parts(self) -> list[BandLayers]:
        """Return the layers of `down` as parts that run over bands."""
        blocks: Any = self.down_blocks
        layers = [layer for block in blocks for layer in [*block.resnets, *block.downsamplers]]
        return [BandLayers(begin=self.conv_in, reach=1), *(layer.part() for layer in layers)]


class Decoder(mlx.nn.Module):
    def __init__(self, config: KLVAEConfig):
        super().__init__()
        self.scale, self.wide = config.scale, wide_upsamplers(config.up_blocks)
        groups, top, bottom = config.norm_num_groups, config.decoder_widths[-1], config.decoder_widths[0]
        self.conv_in = ops.Conv2d(config.latent_channels, top, 3, padding=1)
        self.mid_block = MidBlock(top, groups)
        self.up_blocks = [UpBlock(i, o, up, config) for i, o, up in config.up_blocks]
        self.conv_norm_out = ops.GroupNorm(groups, bottom, NORM_EPS)
        self.conv_out = ops.Conv2d(bottom, config.out_channels, 3, padding=1)

    def up(self, x: Array) -> Array:
        """Run everything after the mid block: [B h w C] -> [B 8h 8w 3]."""
        for block in self.up_blocks:
            x = block(x)
        return ops.eval(self.end(x, self.conv_norm_out, x))

    def end(self, x: Array, norm: Normed, _: Array) -> Array:
        return self.conv_out(ops.norm_silu(norm, x))

    def parts(self) -> list[BandLayers]:
        """Return the layers of `up` as parts that run over bands; a wide upsampler is one part with the layer after
        it."""
        parts: list[BandLayers] = []
        blocks: Any = self.up_blocks
        for block, before_wide in zip(blocks, [False, *self.wide], strict=True):
            first, *more = [layer.part() for layer in [*block.resnets, *block.upsamplers]]
            parts += [first.after(parts.pop()) if before_wide else first, *more]
        return [*parts, BandLayers(begin=lambda x: x, reach=1, steps=[NormStep(self.conv_norm_out, self.end)])]

    def __call__(self, z: Array, height: int, width: int, rows: int) -> Array:
        """Decode latents [B h w z] to pixels [B 8h 8w 3]; the up blocks in bands of `rows` rows where there are
        more."""
        x = ops.eval(self.mid_block(self.conv_in(images.laid_out(z, self.conv_in.dtype))))
        return self.up(x) if height * self.scale <= rows else bands.run(self.parts(), x, rows)


class KLVAE(mlx.nn.Module):
    def __init__(self, config: KLVAEConfig):
        super().__init__()
        self.encoder = Encoder(config)
        if config.use_quant_conv:
            self.quant_conv = ops.Conv2d(2 * config.latent_channels, 2 * config.latent_channels, 1)
        if config.use_post_quant_conv:
            self.post_quant_conv = ops.Conv2d(config.latent_channels, config.latent_channels, 1)
        self.decoder = Decoder(config)

    def encode(self, pixels: Array, rows: int = WIDE) -> Array:
        """Encode pixels [B 8h 8w 3] to mean and log variance [B h w 2z]."""
        moments = self.encoder(pixels, rows)
        return self.quant_conv(moments) if hasattr(self, "quant_conv") else moments

    def decode(self, z: Array, height: int, width: int, rows: int) -> Array:
        """Decode latents [B h w z] to pixels [B 8h 8w 3], not clamped."""
        z = self.post_quant_conv(z) if hasattr(self, "post_quant_conv") else z
        return self.decoder(z, height, width, rows)


# Runner


class Runner(VAERunner):
    def __init__(self, config: KLVAEConfig, plan: LoadPlan, precision: Precision):
        super().__init__(lambda: KLVAE(config), plan, precision)
