"""Stable Diffusion's VAE. What is unusual about it: `qwenimg.common.networks.vaes.kl_vae`.

B images, C channels, L pixels as tokens, h w latents or pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.vaes import bands
from qwenimg.backends.torch.networks.vaes.bands import BandLayers, Normed, NormStep
from qwenimg.backends.torch.networks.vaes.vae import WIDE, VAERunner
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.vaes.kl_vae import NORM_EPS, KLVAEConfig
from qwenimg.common.numbers.tiles import wide_upsamplers
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
        return self.second(self.first(x, self.norm1, x), self.norm2, x)

    def first(self, x: Tensor, norm1: Normed, _: Tensor) -> Tensor:
        return self.conv1(ops.norm_silu(norm1, x))

    def second(self, update: Tensor, norm2: Normed, x: Tensor) -> Tensor:
        update = self.conv2(ops.norm_silu(norm2, update))
        return ops.residual(self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x, update)

    def part(self) -> BandLayers:
        steps = [NormStep(self.norm1, self.first), NormStep(self.norm2, self.second)]
        return BandLayers(begin=lambda x: x, reach=2, steps=steps)


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

    def part(self) -> BandLayers:
        return BandLayers(begin=self, reach=2, down=2)


class Upsample(torch.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = ops.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(images.upsample(x))

    def part(self) -> BandLayers:
        return BandLayers(begin=self, reach=1, up=2)


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

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Encode pixels [B 3 8h 8w] to [B 2z h w]; the down blocks in bands of `rows` rows where there are more."""
        x = images.laid_out(x, self.conv_in.dtype)
        x = self.down(x) if images.height(x) <= rows else bands.run(self.parts(), x, rows)
        return self.conv_out(ops.norm_silu(self.conv_norm_out, self.mid_block(x)))

    def down(self, x: Tensor) -> Tensor:
        """Run everything before the mid block: [B 3 8h 8w] -> [B C h w]."""
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return x

    def parts(self) -> list[BandLayers]:
        """Return the layers of `down` as parts that run over bands."""
        blocks: Any = self.down_blocks
        layers = [layer for block in blocks for layer in [*block.resnets, *block.downsamplers]]
        return [BandLayers(begin=self.conv_in, reach=1), *(layer.part() for layer in layers)]


class Decoder(torch.nn.Module):
    def __init__(self, config: KLVAEConfig):
        super().__init__()
        self.scale, self.wide = config.scale, wide_upsamplers(config.up_blocks)
        groups, top, bottom = config.norm_num_groups, config.decoder_widths[-1], config.decoder_widths[0]
        self.conv_in = ops.Conv2d(config.latent_channels, top, 3, padding=1)
        self.mid_block = MidBlock(top, groups)
        self.up_blocks = torch.nn.ModuleList([UpBlock(i, o, up, config) for i, o, up in config.up_blocks])
        self.conv_norm_out = ops.GroupNorm(groups, bottom, NORM_EPS)
        self.conv_out = ops.Conv2d(bottom, config.out_channels, 3, padding=1)

    def up(self, x: Tensor) -> Tensor:
        """Run everything after the mid block: [B C h w] -> [B 3 8h 8w]."""
        for block in self.up_blocks:
            x = block(x)
        return ops.eval(self.end(x, self.conv_norm_out, x))

    def end(self, x: Tensor, norm: Normed, _: Tensor) -> Tensor:
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

    def forward(self, z: Tensor, height: int, width: int, rows: int) -> Tensor:
        """Decode latents [B z h w] to pixels [B 3 8h 8w]; the up blocks in bands of `rows` rows where there are
        more."""
        x = ops.eval(self.mid_block(self.conv_in(images.laid_out(z, self.conv_in.dtype))))
        return self.up(x) if height * self.scale <= rows else bands.run(self.parts(), x, rows)


class KLVAE(torch.nn.Module):
    def __init__(self, config: KLVAEConfig):
        super().__init__()
        self.encoder = Encoder(config)
        if config.use_quant_conv:
            self.quant_conv = ops.Conv2d(2 * config.latent_channels, 2 * config.latent_channels, 1)
        if config.use_post_quant_conv:
            self.post_quant_conv = ops.Conv2d(config.latent_channels, config.latent_channels, 1)
        self.decoder = Decoder(config)

    def encode(self, pixels: Tensor, rows: int = WIDE) -> Tensor:
        """Encode pixels [B 3 8h 8w] to mean and log variance [B 2z h w]."""
        moments = self.encoder(pixels, rows)
        return self.quant_conv(moments) if hasattr(self, "quant_conv") else moments

    def decode(self, z: Tensor, height: int, width: int, rows: int) -> Tensor:
        """Decode latents [B z h w] to pixels [B 3 8h 8w], not clamped."""
        z = self.post_quant_conv(z) if hasattr(self, "post_quant_conv") else z
        return self.decoder(z, height, width, rows)


# Runner


class Runner(VAERunner):
    def __init__(self, config: KLVAEConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        super().__init__(lambda: KLVAE(config), plan, precision, device)
