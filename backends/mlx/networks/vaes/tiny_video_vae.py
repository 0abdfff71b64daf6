# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""The tiny VAE of Wan 2.1's latents (TAEHV) for one picture. What is unusual about it:
`qwenimg.common.networks.vaes.tiny_video_vae`.

F frames of one picture, as a batch, z channels of the latents, C channels, h w latents or pixels. Attribute paths are
checkpoint keys.
"""

from __future__ import annotations

from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.vaes import sequence
from qwenimg.backends.mlx.networks.vaes.bands import BandLayers
from qwenimg.backends.mlx.networks.vaes.vae import WIDE, VAERunner
from qwenimg.backends.mlx.ops import images
from qwenimg.common.networks.vaes.tiny_vae import LIMIT
from qwenimg.common.networks.vaes.tiny_video_vae import BLOCKS, TinyVideoVAEConfig
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


class Nothing(mlx.nn.Module):
    """A layer of the list without weights, which is computed elsewhere."""

    def __call__(self, x: Array) -> Array:
        return x


class Block(mlx.nn.Module):
    """Three convolutions in a residual, which also see the frame before."""

    def __init__(self, C: int):
        super().__init__()
        first, second, third = (ops.Conv2d(I, C, 3, padding=1) for I in (2 * C, C, C))
        self.conv = [first, ops.ReLU(), second, ops.ReLU(), third]

    def __call__(self, x: Array) -> Array:
        update = sequence.chained(self.conv, images.beside(x, images.frames_before(x)))
        return ops.eval(ops.relu(ops.residual(x, update)))


class Pool(mlx.nn.Module):
    """Makes one frame of `count`."""

    def __init__(self, C: int, count: int):
        super().__init__()
        self.count = count
        self.conv = ops.Conv2d(count * C, C, 1, bias=False)

    def __call__(self, x: Array) -> Array:
        return self.conv(images.frames_joined(x, self.count))


class Grow(mlx.nn.Module):
    """Makes `count` frames of one."""

    def __init__(self, C: int, count: int):
        super().__init__()
        self.count = count
        self.conv = ops.Conv2d(C, count * C, 1, bias=False)

    def __call__(self, x: Array) -> Array:
        return images.frames_apart(self.conv(x), self.count)


# Model


class TinyVideoVAE(mlx.nn.Module):
    def __init__(self, config: TinyVideoVAEConfig):
        super().__init__()
        self.config, C, z = config, config.width, config.latent_channels
        encoder: list[mlx.nn.Module] = [ops.Conv2d(config.in_channels, C, 3, padding=1), ops.ReLU()]
        for pool in config.pools:
            encoder += [Pool(C, pool), ops.Conv2d(C, C, 3, stride=2, padding=1, bias=False)]
            encoder += [Block(C) for _ in range(BLOCKS)]
        encoder.append(ops.Conv2d(C, z, 3, padding=1))
        self.encoder = encoder
        decoder: list[mlx.nn.Module] = [Nothing(), ops.Conv2d(z, config.widths[0], 3, padding=1), ops.ReLU()]
        for level, grow in enumerate(config.grows):
            C, following = config.widths[level : level + 2]
            decoder += [Block(C) for _ in range(BLOCKS)]
            decoder += [Nothing(), Grow(C, grow), ops.Conv2d(C, following, 3, padding=1, bias=False)]
        decoder += [ops.ReLU(), ops.Conv2d(config.widths[-1], config.in_channels, 3, padding=1)]
        self.decoder = decoder

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype in which the half that is loaded computes."""
        last: Any = self.decoder[-1]
        return last.dtype

    def encode(self, pixels: Array, rows: int = WIDE) -> Array:
        """Encode pixels [1 3 8h 8w] in -1..1 to latents [1 z h w] in the sampler's scale."""
        x = images.laid_out((pixels + 1) / 2, self.dtype)
        return sequence.run(self.encoder_parts(), x, rows, whole=images.height(pixels) <= rows)

    def encoder_parts(self) -> list[BandLayers]:
        """Return the encoder's layers as parts that run over bands. Until its first level all frames are alike, and
        computed once."""
        layers, pools = list(self.encoder), self.config.pools
        made = [BandLayers(begin=lambda x: sequence.chained(layers[:2], x), reach=1)]
        for level in range(len(pools)):
            pool, down, *blocks = layers[2 + level * (2 + BLOCKS) : 2 + (level + 1) * (2 + BLOCKS)]
            frames = prod(pools) if level == 0 else 1
            made.append(BandLayers(begin=self.pooled(pool, down, frames), reach=2, down=2))
            made += [BandLayers(begin=block, reach=3) for block in blocks]
        return [*made, BandLayers(begin=layers[-1], reach=1)]

    def pooled(self, pool: sequence.Layer, down: sequence.Layer, frames: int) -> sequence.Layer:
        """Return the layers before a level; of `frames` that are alike if that is more than one."""
        count = self.config.pools[0]

        def begin(x: Array) -> Array:
            if frames == 1:
                return sequence.chained((pool, down), x)
            return ops.repeated(sequence.chained((pool, down), ops.repeated(x, count)), frames // count)

        return begin

    def decode(self, z: Array, height: int, width: int, rows: int) -> Array:
        """Decode latents [1 z h w] in the sampler's scale to pixels [1 3 8h 8w] in -1..1, not clamped."""
        x = LIMIT * ops.tanh(images.laid_out(z, self.dtype) / LIMIT)
        return sequence.run(self.decoder_parts(), x, rows, whole=height * self.config.scale <= rows) * 2 - 1

    def decoder_parts(self) -> list[BandLayers]:
        """Return the decoder's layers as parts that run over bands. Frames grow before they are larger, which is the
        same and takes less; behind the last blocks only the last frame is computed."""
        layers, levels = list(self.decoder), len(self.config.grows)
        made = [BandLayers(begin=lambda x: sequence.chained(layers[1:3], x), reach=1)]
        for level in range(levels):
            *blocks, _, grow, conv = layers[3 + level * (BLOCKS + 3) : 3 + (level + 1) * (BLOCKS + 3)]
            made += [BandLayers(begin=block, reach=3) for block in blocks]
            made.append(BandLayers(begin=enlarged(grow, conv, level + 1 == levels), reach=1, up=2))
        return [*made, BandLayers(begin=lambda x: sequence.chained(layers[-2:], x), reach=1)]


def enlarged(grow: sequence.Layer, conv: sequence.Layer, is_last: bool) -> sequence.Layer:
    """Return the layers behind a level; of the last frame alone behind the last one."""

    def begin(x: Array) -> Array:
        grown = ops.eval(images.last_frame(grow(images.last_frame(x))) if is_last else grow(x))
        return ops.eval(conv(images.upsample(grown)))

    return begin


# Runner


class Runner(VAERunner):
    def __init__(self, config: TinyVideoVAEConfig, plan: LoadPlan, precision: Precision):
        super().__init__(lambda: TinyVideoVAE(config), plan, precision)
