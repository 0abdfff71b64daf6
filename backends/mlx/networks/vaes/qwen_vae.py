# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Qwen-Image's VAE for still images, as a 2-D network. Its peculiarities: `qwenimg.common.networks.vaes.qwen_vae`.

B images, C channels, h w latents or pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.vaes import bands
from qwenimg.backends.mlx.networks.vaes.bands import BandLayers
from qwenimg.backends.mlx.networks.vaes.vae import WIDE, VAERunner
from qwenimg.backends.mlx.ops import images
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


class ResidualBlock(mlx.nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norm1 = ops.ChannelNorm(inputs)
        self.conv1 = ops.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = ops.ChannelNorm(outputs)
        self.conv2 = ops.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.conv_shortcut = ops.Conv2d(inputs, outputs, 1)

    def __call__(self, x: Array) -> Array:
        update = ops.eval(self.conv1(ops.norm_silu(self.norm1, x)))
        update = self.conv2(ops.norm_silu(self.norm2, update))
        return ops.residual(self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x, update)

    def part(self) -> BandLayers:
        return BandLayers(begin=self, reach=2)


class AttentionBlock(mlx.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.norm = ops.ChannelNorm(channels)
        self.to_qkv = ops.Conv2d(channels, 3 * channels, 1)
        self.proj = ops.Conv2d(channels, channels, 1)

    def __call__(self, x: Array) -> Array:
        return ops.residual(x, self.proj(ops.spatial_attention(self.to_qkv(self.norm(x)))))


class MidBlock(mlx.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.attentions = [AttentionBlock(channels)]
        self.resnets = [ResidualBlock(channels, channels), ResidualBlock(channels, channels)]

    def __call__(self, x: Array) -> Array:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Downsample(mlx.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.resample = [mlx.nn.Identity(), ops.Conv2d(channels, channels, 3, stride=2)]

    def __call__(self, x: Array) -> Array:
        return self.resample[1](ops.pad_right_bottom(x))

    def part(self) -> BandLayers:
        return BandLayers(begin=self, reach=2, down=2)


class Upsample(mlx.nn.Module):
    def __init__(self, channels: int, outputs: int):
        super().__init__()
        self.resample = [mlx.nn.Identity(), ops.Conv2d(channels, outputs, 3, padding=1)]

    def __call__(self, x: Array) -> Array:
        return self.resample[1](images.upsample(x))

    def part(self) -> BandLayers:
        return BandLayers(begin=self, reach=1, up=2)


class UpBlock(mlx.nn.Module):
    def __init__(self, inputs: int, outputs: int, upsampled: bool, config: QwenVAEConfig):
        super().__init__()
        more = [ResidualBlock(outputs, outputs) for _ in range(config.num_res_blocks)]
        self.resnets = [ResidualBlock(inputs, outputs), *more]
        self.upsamplers = [Upsample(outputs, outputs // 2)] if upsampled else []

    def __call__(self, x: Array) -> Array:
        for layer in [*self.resnets, *self.upsamplers]:
            x = ops.eval(layer(x))
        return x

    def parts(self) -> list[BandLayers]:
        """Return the layers as parts that run over bands."""
        layers: Any = [*self.resnets, *self.upsamplers]
        return [layer.part() for layer in layers]


# Model


class Encoder(mlx.nn.Module):
    """An encoder with the down blocks `layers`, from `inputs` channels to twice `z_dim`. dims: its first and last
    width."""

    def __init__(self, inputs: int, dims: Sequence[int], z_dim: int, layers: Sequence[mlx.nn.Module]):
        super().__init__()
        self.conv_in = ops.Conv2d(inputs, dims[0], 3, padding=1)
        self.down_blocks = layers
        self.mid_block = MidBlock(dims[-1])
        self.norm_out = ops.ChannelNorm(dims[-1])
        self.conv_out = ops.Conv2d(dims[-1], 2 * z_dim, 3, padding=1)

    def __call__(self, x: Array, rows: int) -> Array:
        """Encode pixels [B 8h 8w 3] to [B h w 2z]; the down blocks in bands of `rows` rows where there are more."""
        x = images.laid_out(x, self.conv_in.dtype)
        x = self.down(x) if images.height(x) <= rows else bands.run(self.parts(), x, rows)
        return self.conv_out(ops.norm_silu(self.norm_out, self.mid_block(x)))

    def down(self, x: Array) -> Array:
        """Run everything before the mid block: [B 8h 8w 3] -> [B h w C]."""
        x = self.conv_in(x)
        for layer in self.down_blocks:
            x = ops.eval(layer(x))
        return x

    def parts(self) -> list[BandLayers]:
        """Return the layers of `down` as parts that run over bands."""
        layers: Any = self.down_blocks
        return [BandLayers(begin=self.conv_in, reach=1), *(layer.part() for layer in layers)]


class Decoder(mlx.nn.Module):
    """A decoder with the up blocks `layers`, from `z_dim` channels to `outputs`. dims: its first and last width;
    scale: the pixels per latent along each side."""

    def __init__(self, z_dim: int, dims: Sequence[int], outputs: int, layers: Sequence[mlx.nn.Module], scale: int):
        super().__init__()
        self.scale = scale
        self.conv_in = ops.Conv2d(z_dim, dims[0], 3, padding=1)
        self.mid_block = MidBlock(dims[0])
        self.up_blocks = layers
        self.norm_out = ops.ChannelNorm(dims[-1])
        self.conv_out = ops.Conv2d(dims[-1], outputs, 3, padding=1)

    def up(self, x: Array) -> Array:
        """Run everything after the mid block: [B h w C] -> [B 8h 8w 3]."""
        for block in self.up_blocks:
            x = block(x)
        return ops.eval(self.end(x))

    def end(self, x: Array) -> Array:
        return self.conv_out(ops.norm_silu(self.norm_out, x))

    def parts(self) -> list[BandLayers]:
        """Return the layers of `up` as parts that run over bands."""
        blocks: Any = self.up_blocks
        return [*(part for block in blocks for part in block.parts()), BandLayers(begin=self.end, reach=1)]

    def __call__(self, z: Array, height: int, width: int, rows: int) -> Array:
        """Decode latents [B h w z] to pixels [B 8h 8w 3]; the up blocks in bands of `rows` rows where there are
        more."""
        x = ops.eval(self.mid_block(self.conv_in(images.laid_out(z, self.conv_in.dtype))))
        return self.up(x) if height * self.scale <= rows else bands.run(self.parts(), x, rows)


class QwenVAE(mlx.nn.Module):
    """A VAE of two halves for latents of `z_dim` channels."""

    def __init__(self, z_dim: int, encoder: Encoder, decoder: Decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.quant_conv = ops.Conv2d(2 * z_dim, 2 * z_dim, 1)
        self.post_quant_conv = ops.Conv2d(z_dim, z_dim, 1)

    def encode(self, pixels: Array, rows: int = WIDE) -> Array:
        """Encode pixels [B 8h 8w 3] to mean and log variance [B h w 2z]."""
        return self.quant_conv(self.encoder(pixels, rows))

    def decode(self, z: Array, height: int, width: int, rows: int) -> Array:
        """Decode latents [B h w z] to pixels [B 8h 8w 3], not clamped."""
        return self.decoder(self.post_quant_conv(z), height, width, rows)


def built(config: QwenVAEConfig) -> QwenVAE:
    """Build the VAE of a configuration."""
    z, down, up = config.z_dim, config.down_layers, config.up_blocks
    downs = [Downsample(o) if kind == "down" else ResidualBlock(i, o) for kind, i, o in down]
    ups = [UpBlock(i, o, upsampled, config) for i, o, upsampled in up]
    encoder = Encoder(config.input_channels, config.encoder_dims, z, downs)
    return QwenVAE(z, encoder, Decoder(z, config.decoder_dims, config.input_channels, ups, config.scale))


# Runner


class Runner(VAERunner):
    def __init__(self, config: QwenVAEConfig, plan: LoadPlan, precision: Precision):
        super().__init__(lambda: built(config), plan, precision)
