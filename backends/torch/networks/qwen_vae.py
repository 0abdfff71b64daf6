"""Qwen-Image's VAE for still images, as a 2-D network. What is unusual about it: `qwenimg.common.networks.qwen_vae`.

B images, C channels, h w latents or pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.vae import VAE
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.qwen_vae import QwenVAEConfig, halo
from qwenimg.common.numbers.tiles import tiles
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


class ResidualBlock(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norm1 = ops.ChannelNorm(inputs)
        self.conv1 = ops.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = ops.ChannelNorm(outputs)
        self.conv2 = ops.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.conv_shortcut = ops.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        update = self.conv1(ops.norm_silu(self.norm1, x))
        update = self.conv2(ops.norm_silu(self.norm2, update))
        return ops.residual(self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x, update)


class AttentionBlock(torch.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.norm = ops.ChannelNorm(channels)
        self.to_qkv = ops.Conv2d(channels, 3 * channels, 1)
        self.proj = ops.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return ops.residual(x, self.proj(ops.spatial_attention(self.to_qkv(self.norm(x)))))


class MidBlock(torch.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.attentions = torch.nn.ModuleList([AttentionBlock(channels)])
        self.resnets = torch.nn.ModuleList([ResidualBlock(channels, channels), ResidualBlock(channels, channels)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Downsample(torch.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.resample = torch.nn.ModuleList([torch.nn.Identity(), ops.Conv2d(channels, channels, 3, stride=2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resample[1](ops.pad_right_bottom(x))


class Upsample(torch.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.resample = torch.nn.ModuleList([torch.nn.Identity(), ops.Conv2d(channels, channels // 2, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resample[1](images.upsample(x))


class UpBlock(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, upsampled: bool, config: QwenVAEConfig):
        super().__init__()
        more = [ResidualBlock(outputs, outputs) for _ in range(config.num_res_blocks)]
        self.resnets = torch.nn.ModuleList([ResidualBlock(inputs, outputs), *more])
        self.upsamplers = torch.nn.ModuleList([Upsample(outputs)] if upsampled else [])

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.resnets, *self.upsamplers]:
            x = ops.eval(layer(x))
        return x


# Model


class Encoder(torch.nn.Module):
    def __init__(self, config: QwenVAEConfig):
        super().__init__()
        self.conv_in = ops.Conv2d(config.input_channels, config.base_dim, 3, padding=1)
        layers = [Downsample(o) if kind == "down" else ResidualBlock(i, o) for kind, i, o in config.down_layers]
        self.down_blocks = torch.nn.ModuleList(layers)
        self.mid_block = MidBlock(config.encoder_dims[-1])
        self.norm_out = ops.ChannelNorm(config.encoder_dims[-1])
        self.conv_out = ops.Conv2d(config.encoder_dims[-1], 2 * config.z_dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels [B 3 8h 8w] -> [B 2z h w]."""
        x = self.conv_in(images.laid_out(x, self.conv_in.dtype))
        for layer in self.down_blocks:
            x = ops.eval(layer(x))
        return self.conv_out(ops.norm_silu(self.norm_out, self.mid_block(x)))


class Decoder(torch.nn.Module):
    def __init__(self, config: QwenVAEConfig):
        super().__init__()
        self.halo = halo(config)
        self.scale = config.scale
        self.conv_in = ops.Conv2d(config.z_dim, config.decoder_dims[0], 3, padding=1)
        self.mid_block = MidBlock(config.decoder_dims[0])
        self.up_blocks = torch.nn.ModuleList([UpBlock(i, o, up, config) for i, o, up in config.up_blocks])
        self.norm_out = ops.ChannelNorm(config.decoder_dims[-1])
        self.conv_out = ops.Conv2d(config.decoder_dims[-1], config.input_channels, 3, padding=1)

    def up(self, x: Tensor) -> Tensor:
        """Everything behind the mid block, which sees `halo` latents far: [B C h w] -> [B 3 8h 8w]."""
        for block in self.up_blocks:
            x = block(x)
        return ops.eval(self.conv_out(ops.norm_silu(self.norm_out, x)))

    def forward(self, z: Tensor, height: int, width: int, tile: int) -> Tensor:
        """Latents [B z h w] -> pixels [B 3 8h 8w]; the up blocks in tiles of at most `tile` latents a side."""
        x = ops.eval(self.mid_block(self.conv_in(images.laid_out(z, self.conv_in.dtype))))
        across = tiles(width, tile, self.halo)
        return images.join([[self.tile(x, row, column) for column in across] for row in tiles(height, tile, self.halo)])

    def tile(self, x: Tensor, row: tuple[int, ...], column: tuple[int, ...]) -> Tensor:
        """The pixels of one tile, read with a margin that is cut off again, so that the seams are exact."""
        top, bottom, first, last = row
        left, right, begin, end = column
        pixels = self.up(images.window(x, slice(top, bottom), slice(left, right)))
        rows = slice((first - top) * self.scale, (last - top) * self.scale)
        return images.window(pixels, rows, slice((begin - left) * self.scale, (end - left) * self.scale))


class QwenImageVAE(torch.nn.Module):
    def __init__(self, config: QwenVAEConfig):
        super().__init__()
        self.encoder = Encoder(config)
        self.quant_conv = ops.Conv2d(2 * config.z_dim, 2 * config.z_dim, 1)
        self.post_quant_conv = ops.Conv2d(config.z_dim, config.z_dim, 1)
        self.decoder = Decoder(config)

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B 3 8h 8w] -> mean and log variance [B 2z h w]."""
        return self.quant_conv(self.encoder(pixels))

    def decode(self, z: Tensor, height: int, width: int, tile: int) -> Tensor:
        """Latents [B z h w] -> pixels [B 3 8h 8w], not clamped."""
        return self.decoder(self.post_quant_conv(z), height, width, tile)


# Component


class Component(VAE):
    def __init__(self, config: QwenVAEConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        super().__init__(lambda: QwenImageVAE(config), plan, precision, device)
