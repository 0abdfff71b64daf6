"""SANA's VAE. What is unusual about it: `qwenimg.common.networks.vaes.dc_vae`.

B images, C channels, L pixels as tokens, D head dim, h w latents or pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.mbconv import GatedConv
from qwenimg.backends.torch.networks.vaes import bands
from qwenimg.backends.torch.networks.vaes.bands import BandLayers
from qwenimg.backends.torch.networks.vaes.vae import WIDE, VAERunner
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.vaes.dc_vae import ATTENDING, EXPANSION, KERNEL, NORM_EPS, DCVAEConfig
from qwenimg.common.numbers.tiles import Tile, tiles
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

# Layers


class ResidualBlock(torch.nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = ops.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = ops.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = ops.PixelNorm(channels, NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return ops.residual(x, self.norm(self.conv2(ops.silu(self.conv1(x)))))


class Projection(torch.nn.Module):
    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.proj_in = ops.Conv2d(channels, channels, KERNEL, padding=KERNEL // 2, bias=False, groups=channels)
        self.proj_out = ops.Conv2d(channels, channels, 1, bias=False, groups=3 * heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj_out(self.proj_in(x))


class Attention(torch.nn.Module):
    def __init__(self, channels: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.to_q = ops.Linear(channels, channels, bias=False)
        self.to_k = ops.Linear(channels, channels, bias=False)
        self.to_v = ops.Linear(channels, channels, bias=False)
        self.to_qkv_multiscale = torch.nn.ModuleList([Projection(3 * channels, channels // head_dim)])
        self.to_out = ops.Linear(2 * channels, channels, bias=False)
        self.norm_out = ops.PixelNorm(channels, NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.result(x, ops.linear_attention(*self.projected(x)))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B L H D] of an image [B C h w]."""
        tokens, D = images.tokens(x), self.head_dim
        qkv = torch.cat((self.to_q(tokens), self.to_k(tokens), self.to_v(tokens)), dim=-1)
        near = images.tokens(self.to_qkv_multiscale[0](images.image(qkv, x)))
        heads = torch.cat((qkv, near), dim=-1).reshape(*tokens.shape[:2], -1, 3 * D)
        return heads[..., :D], heads[..., D : 2 * D], heads[..., 2 * D :]

    def result(self, x: Tensor, out: Tensor) -> Tensor:
        """Add the attention `out` [B L H*D] to an image [B C h w]."""
        return ops.residual(x, self.norm_out(images.image(self.to_out(out), x)))

    def banded(self, x: Tensor, rows: int) -> Tensor:
        """Return the same in bands of `rows` rows: once for the sums over all keys, and once for the queries."""
        spans = tiles(images.height(x), rows, KERNEL // 2)
        _, k, v = self.band(x, spans[0])
        sums, dtype = ops.eval(ops.linear_sums(k, v)), v.dtype
        for span in spans[1:]:
            _, k, v = self.band(x, span)
            sums = ops.eval(ops.add(sums, ops.linear_sums(k, v)))
        made = []
        for span in spans:
            q, _, _ = self.band(x, span)
            kept = images.window(x, slice(span.keep_start, span.keep_stop), slice(None))
            made.append(ops.eval(self.result(kept, ops.linear_result(q, sums, dtype))))
        return images.rows_joined(made)

    def band(self, x: Tensor, span: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a band's own rows."""
        read = images.window(x, slice(span.read_start, span.read_stop), slice(None))
        q, k, v = self.projected(read)
        width = q.shape[1] // images.height(read)
        own = slice((span.keep_start - span.read_start) * width, (span.keep_stop - span.read_start) * width)
        return q[:, own], k[:, own], v[:, own]


class FeedForward(GatedConv):
    def __init__(self, channels: int):
        super().__init__(channels, EXPANSION * channels)
        self.norm = ops.PixelNorm(channels, NORM_EPS)


class EfficientViTBlock(torch.nn.Module):
    def __init__(self, channels: int, head_dim: int):
        super().__init__()
        self.attn = Attention(channels, head_dim)
        self.conv_out = FeedForward(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.fed(ops.eval(self.attn(x)))

    def fed(self, x: Tensor) -> Tensor:
        """Add the feed-forward, which sees the pixels around one."""
        update = images.image(self.conv_out(images.tokens(x), images.plane(x)), x)
        return ops.residual(x, self.conv_out.norm(update))

    def banded(self, x: Tensor, rows: int) -> Tensor:
        """Return the same in bands of `rows` rows."""
        return bands.run([BandLayers(begin=self.fed, reach=1)], self.attn.banded(x, rows), rows)


class Downsample(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.outputs = outputs
        self.conv = ops.Conv2d(inputs, outputs, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B C 2h 2w] -> [B C' h w]."""
        return ops.residual(ops.averaged_patches(x, self.outputs, 1), self.conv(x))


class Upsample(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.spread = tuple(channel * inputs // (4 * outputs) for channel in range(4 * outputs))
        self.conv = ops.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B C h w] -> [B C' 2h 2w]."""
        update = ops.eval(self.conv(images.upsample(x)))  # first, since it takes the most memory
        return ops.residual(ops.spread_channels(x, self.spread), update)


def blocks(config: DCVAEConfig, way: str, level: int) -> list[Any]:
    """Return the layers of a level without the change of its sides."""
    width, count = config.widths(way)[level], config.layers(way)[level]
    if config.types(way)[level] == ATTENDING:
        return [EfficientViTBlock(width, config.attention_head_dim) for _ in range(count)]
    return [ResidualBlock(width) for _ in range(count)]


def run(level: Any, x: Tensor) -> Tensor:
    """Run the layers of a level on x [B C h w]."""
    for layer in level:
        x = ops.eval(layer(x))
    return x


def run_whole(level: Any, x: Tensor, rows: int) -> Tensor:
    """Run the layers of a level that attends on x [B C h w], in bands of `rows` rows where there are more."""
    for layer in level:
        in_bands = hasattr(layer, "banded") and images.height(x) > rows
        x = ops.eval(layer.banded(x, rows) if in_bands else layer(x))
    return x


# Model


class Encoder(torch.nn.Module):
    def __init__(self, config: DCVAEConfig):
        super().__init__()
        self.z, self.local, widths = config.latent_channels, config.local("encoder"), config.widths("encoder")
        self.conv_in = ops.Conv2d(config.in_channels, widths[0], 3, padding=1)
        levels = []
        for level, width in enumerate(widths):
            down = [Downsample(width, widths[level + 1])] if level + 1 < len(widths) else []
            layers = [*blocks(config, "encoder", level), *down]
            levels.append(torch.nn.ModuleList(layers))
        self.down_blocks = torch.nn.ModuleList(levels)
        self.conv_out = ops.Conv2d(widths[-1], self.z, 3, padding=1)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Encode pixels [B 3 32h 32w] to [B z h w]; the outer levels in bands of `rows` rows where there are more."""
        x = images.laid_out(x, self.conv_in.dtype)
        x = self.down(x) if images.height(x) <= rows else bands.run(self.parts(), x, rows)
        for level in self.down_blocks[self.local :]:
            x = run_whole(level, x, rows)
        return ops.residual(ops.averaged_channels(x, self.z), self.conv_out(x))

    def down(self, x: Tensor) -> Tensor:
        """Run everything before the first level that attends."""
        x = self.conv_in(x)
        for level in self.down_blocks[: self.local]:
            x = run(level, x)
        return x

    def parts(self) -> list[BandLayers]:
        """Return the layers of `down` as parts that run over bands, each level as one."""
        levels: Any = self.down_blocks
        parts = [BandLayers(begin=self.conv_in, reach=2)]  # even, for what halves rows behind it
        for level, layers in enumerate(levels[: self.local]):
            halves = 2 if level + 1 < len(levels) else 1
            parts.append(BandLayers(begin=partial(run, layers), reach=2 * len(layers), down=halves))
        return [parts[1].after(parts[0]), *parts[2:]] if self.local else parts


class Decoder(torch.nn.Module):
    def __init__(self, config: DCVAEConfig):
        super().__init__()
        self.scale, self.local, widths = config.scale, config.local("decoder"), config.widths("decoder")
        self.repeats = widths[-1] // config.latent_channels
        self.conv_in = ops.Conv2d(config.latent_channels, widths[-1], 3, padding=1)
        levels = []
        for level, width in enumerate(widths):
            up = [Upsample(widths[level + 1], width)] if level + 1 < len(widths) else []
            layers = [*up, *blocks(config, "decoder", level)]
            levels.append(torch.nn.ModuleList(layers))
        self.up_blocks = torch.nn.ModuleList(levels)
        self.norm_out = ops.PixelNorm(widths[0], NORM_EPS)
        self.conv_out = ops.Conv2d(widths[0], config.in_channels, 3, padding=1)

    def forward(self, z: Tensor, height: int, width: int, rows: int) -> Tensor:
        """Decode latents [B z h w] to pixels [B 3 32h 32w]; the outer levels in bands of `rows` rows where there are
        more."""
        levels: Any = self.up_blocks
        x = ops.add(self.conv_in(images.laid_out(z, self.conv_in.dtype)), ops.repeated_channels(z, self.repeats))
        for level in reversed(range(self.local, len(levels))):
            x = run_whole(levels[level], x, rows)
        return self.up(x) if height * self.scale <= rows else bands.run(self.parts(), x, rows)

    def up(self, x: Tensor) -> Tensor:
        """Run everything behind the last level that attends."""
        for level in reversed(range(self.local)):
            x = run(self.up_blocks[level], x)
        return ops.eval(self.end(x))

    def end(self, x: Tensor) -> Tensor:
        return self.conv_out(ops.relu(self.norm_out(x)))

    def parts(self) -> list[BandLayers]:
        """Return the layers of `up` as parts that run over bands, each level as one, and the last with the end."""
        levels: Any = self.up_blocks
        parts = []
        for level in reversed(range(self.local)):
            layers = levels[level]
            if level + 1 < len(levels):
                parts.append(BandLayers(begin=partial(run, layers), reach=len(layers), up=2))
            else:
                parts.append(BandLayers(begin=partial(run, layers), reach=2 * len(layers)))
        end = BandLayers(begin=self.end, reach=1)
        return [*parts[:-1], end.after(parts[-1])] if parts else [end]


class DCVAE(torch.nn.Module):
    def __init__(self, config: DCVAEConfig):
        super().__init__()
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def encode(self, pixels: Tensor, rows: int = WIDE) -> Tensor:
        """Encode pixels [B 3 32h 32w] to latents [B z h w]."""
        return self.encoder(pixels, rows)

    def decode(self, z: Tensor, height: int, width: int, rows: int) -> Tensor:
        """Decode latents [B z h w] to pixels [B 3 32h 32w], not clamped."""
        return self.decoder(z, height, width, rows)


# Runner


class Runner(VAERunner):
    def __init__(self, config: DCVAEConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        super().__init__(lambda: DCVAE(config), plan, precision, device)
