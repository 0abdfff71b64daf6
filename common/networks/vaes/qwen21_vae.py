"""Qwen-Image-2.1's VAE (AutoencoderKLQwenImage21): configuration and manifest.

What is unusual about it, besides the blocks that it shares with Qwen-Image's (`qwen_vae`):
- its kernels are stored without an axis of time, and its `time_conv`s are of no use either;
- pixels have four channels, the last of which is alpha; a latent stands for 16 x 16 pixels;
- each level has a shortcut around all of it. Down, it is a mean over pixels, channels and two frames, of which the
  first is zeros; up, channels become the pixels of a patch, those of the last frame;
- an upsampler keeps the channels; the decoder is wider than the encoder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import qwen_vae, wan_names
from qwenimg.common.networks.vaes.qwen_vae import gain, mid, residual

CLASS_NAME = "AutoencoderKLQwenImage21"
SIGN = "decoder.up_blocks.0.upsampler.resample.1.weight"
"""A tensor that no other VAE has."""
_PREFIXES = ("vae.", "first_stage_model.")

_MEAN: tuple[float, ...] = (0.5126, 0.7721, -0.0631, 1.3506, -0.7855, -2.1025, -0.3458, 1.3722)
_MEAN += (1.8873, -1.7177, -0.6510, 0.2732, 0.7562, -0.6163, -1.0277, 3.8363)
_MEAN += (2.0210, 0.0472, 0.9320, 2.0087, 2.4954, -0.1391, -1.4249, 1.8464)
_MEAN += (-0.5236, 1.2826, 3.7046, -1.3035, 2.7286, -1.4518, -1.9036, -1.9955)
_MEAN += (-0.0342, -1.0265, -0.7636, 3.0555, 0.0746, -3.0751, -0.1076, 1.7376)
_MEAN += (-1.0914, -1.9435, -0.2784, -1.3680, 0.4809, -0.4433, 0.3764, 0.5729)
_MEAN += (-2.0595, 1.0960, -1.3260, -2.0211, -5.0179, 0.5275, 4.0162, 1.8505)
_MEAN += (0.3026, 1.9373, 1.4937, 0.2632, 0.5547, -1.7121, -0.1562, 0.0304)
_STD: tuple[float, ...] = (3.2001, 3.2936, 3.4321, 3.0091, 3.1061, 4.0379, 4.0705, 3.7910)
_STD += (3.0785, 3.6500, 3.9308, 3.0904, 2.8778, 3.7675, 3.7320, 5.0756)
_STD += (3.2864, 4.0397, 3.1317, 4.0443, 2.9249, 3.9454, 3.0988, 4.2489)
_STD += (3.4896, 3.8513, 3.9323, 3.4719, 3.7498, 4.2830, 3.5694, 4.2467)
_STD += (3.9037, 3.2947, 5.0770, 3.5075, 3.2700, 3.4767, 2.8063, 5.1125)
_STD += (3.5327, 4.7833, 3.1286, 4.1819, 3.8527, 3.8312, 3.5605, 4.3875)
_STD += (3.9624, 4.0168, 3.5643, 4.0550, 5.5614, 4.2963, 4.4080, 3.4959)
_STD += (3.8747, 3.7608, 3.5735, 3.1490, 3.7662, 3.6746, 3.4563, 3.8161)


@dataclass(frozen=True, kw_only=True)
class ResidualLevel:
    """One level of the encoder or the decoder."""

    inputs: int
    outputs: int
    resampled: bool  # whether its sides are halved, or doubled
    frames: int  # of a video, for its shortcut

    @property
    def neighbours(self) -> int:
        """The values that become one where sides are halved: a patch of 2 x 2 pixels, in all frames."""
        return 4 * self.frames

    @property
    def spread(self) -> tuple[int, ...]:
        """The input channel of the decoder's shortcut for each output channel and pixel of a patch. The order is
        (channel, frame, row, column); only the last of the `frames` is used."""
        repeats = self.neighbours * self.outputs // self.inputs
        firsts = ((output * self.frames + self.frames - 1) * 4 for output in range(self.outputs))
        return tuple((first + pixel) // repeats for first in firsts for pixel in range(4))


@dataclass(frozen=True, kw_only=True)
class Qwen21VAEConfig:
    """The fields of `vae/config.json`; the defaults are the published model's."""

    base_dim: int = field(default=96, metadata={"max": 4096})
    decoder_base_dim: int | None = field(default=144, metadata={"max": 4096})
    z_dim: int = field(default=64, metadata={"max": 1024})
    dim_mult: tuple[int, ...] = (1, 2, 4, 8, 8)
    num_res_blocks: int = field(default=2, metadata={"max": 64})
    attn_scales: tuple[float, ...] = ()
    temperal_downsample: tuple[bool, ...] = (False, True, True, True)
    latents_mean: tuple[float, ...] = _MEAN
    latents_std: tuple[float, ...] = _STD
    is_residual: bool = True
    in_channels: int = field(default=4, metadata={"max": 64})
    out_channels: int = field(default=4, metadata={"max": 64})
    patch_size: int | None = None

    def __post_init__(self) -> None:
        expected = {"attn_scales": (), "is_residual": True, "patch_size": None, "in_channels": 4, "out_channels": 4}
        for name, value in expected.items():
            if (given := getattr(self, name)) != value:
                raise ModelError(f"{name} is {given}: not supported; expected {value}")
        qwen_vae.check_sizes(self, max(self.base_dim, self.width))
        self._check_shortcuts()

    def _check_shortcuts(self) -> None:
        """Raise ModelError for widths between which no shortcut leads."""
        *down, last = self.down_levels
        pairs = [(level.neighbours * level.inputs, level.outputs) for level in down]
        pairs += [(level.neighbours * level.outputs, level.inputs) for level in self.up_levels[:-1]]
        if any(many % few for many, few in pairs) or last.inputs != last.outputs:
            raise ModelError(
                f"dim_mult {list(self.dim_mult)} has widths between which no shortcut leads; the last two must be equal"
            )

    @property
    def width(self) -> int:
        """The decoder's `base_dim`."""
        return self.decoder_base_dim or self.base_dim

    @property
    def has_shortcuts(self) -> bool:
        return True

    @property
    def scale(self) -> int:
        """The pixels per latent along each side."""
        return 1 << (len(self.dim_mult) - 1)

    @property
    def encoder_dims(self) -> tuple[int, ...]:
        return (self.base_dim, *(self.base_dim * mult for mult in self.dim_mult))

    @property
    def decoder_dims(self) -> tuple[int, ...]:
        widths = tuple(self.width * mult for mult in reversed(self.dim_mult))
        return (widths[0], *widths)

    @property
    def down_levels(self) -> tuple[ResidualLevel, ...]:
        return self._levels(self.encoder_dims, self.temperal_downsample)

    @property
    def up_levels(self) -> tuple[ResidualLevel, ...]:
        return self._levels(self.decoder_dims, self.temperal_downsample[::-1])

    @property
    def up_blocks(self) -> tuple[tuple[int, int, bool], ...]:
        """The decoder's up blocks: channels in, channels out, and whether an upsampler ends the block."""
        return tuple((level.inputs, level.outputs, level.resampled) for level in self.up_levels)

    def _levels(self, dims: tuple[int, ...], in_time: tuple[bool, ...]) -> tuple[ResidualLevel, ...]:
        last = len(self.dim_mult) - 1
        frames = [2 if halved else 1 for halved in in_time]
        return tuple(
            ResidualLevel(inputs=dims[i], outputs=dims[i + 1], resampled=i < last, frames=frames[i] if i < last else 1)
            for i in range(last + 1)
        )


def manifest(config: Qwen21VAEConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint as it is stored, `time_conv`s included."""
    z = config.z_dim
    shapes = params.merge(
        params.under("encoder", _encoder(config)),
        params.conv("quant_conv", 2 * z, 2 * z, 1, 1),
        params.conv("post_quant_conv", z, z, 1, 1),
        params.under("decoder", _decoder(config)),
    )
    return {name: (*shape[:2], *shape[3:]) if len(shape) == 5 else shape for name, shape in shapes.items()}


def rename(key: str) -> str:
    """Return the manifest key of a file's key, in diffusers' names or in Wan's."""
    return wan_names.rename(next((key.removeprefix(prefix) for prefix in _PREFIXES if key.startswith(prefix)), key))


def _encoder(config: Qwen21VAEConfig) -> Manifest:
    dims = config.encoder_dims
    return params.merge(
        params.conv("conv_in", dims[0], config.in_channels, 3, 3),
        *(
            params.under(f"down_blocks.{i}", _level(level, config.num_res_blocks, "downsampler", 1))
            for i, level in enumerate(config.down_levels)
        ),
        params.under("mid_block", mid(dims[-1])),
        gain("norm_out", dims[-1]),
        params.conv("conv_out", 2 * config.z_dim, dims[-1], 3, 3),
    )


def _decoder(config: Qwen21VAEConfig) -> Manifest:
    dims = config.decoder_dims
    return params.merge(
        params.conv("conv_in", dims[0], config.z_dim, 3, 3),
        params.under("mid_block", mid(dims[0])),
        *(
            params.under(f"up_blocks.{i}", _level(level, config.num_res_blocks + 1, "upsampler", 2))
            for i, level in enumerate(config.up_levels)
        ),
        gain("norm_out", dims[-1]),
        params.conv("conv_out", config.out_channels, dims[-1], 3, 3),
    )


def _level(level: ResidualLevel, blocks: int, sampler: str, in_time: int) -> Manifest:
    """Return the shapes of one level with `blocks` residual blocks; `in_time`: the widths of its layer over time."""
    width = level.outputs
    parts = [params.under(f"resnets.{i}", residual(width if i else level.inputs, width)) for i in range(blocks)]
    if level.resampled:
        parts.append(params.conv(f"{sampler}.resample.1", width, width, 3, 3))
    if level.frames > 1:
        parts.append(params.conv(f"{sampler}.time_conv", in_time * width, width, 1, 1))
    return params.merge(*parts)


NETWORK = Network(
    name="qwen21_vae",
    role="vae",
    kind=CLASS_NAME,
    config=Qwen21VAEConfig,
    manifest=manifest,
    used=lambda config, stored: qwen_vae.uses(stored),
    rename=rename,
    ignored=qwen_vae.IGNORED_CONFIG | {"scale_factor_temporal", "scale_factor_spatial"},
    traced=(
        Block(name="level", paths=re.compile(r".*\.(down|up)_blocks\.\d+"), image=True, streams=1),
        Block(name="resnet", paths=re.compile(r".*\.resnets\.\d+"), image=True, streams=1, depth=1),
        Block(name="attention", paths=re.compile(r".*\.attentions\.\d+"), image=True, streams=1, depth=1),
        Block(name="end", paths=re.compile(r".*\.(conv_in|norm_out|conv_out)|(post_)?quant_conv"), image=True),
        Block(name="encode", paths=re.compile(""), method="encode", image=True, within="encoder"),
        Block(name="decode", paths=re.compile(""), method="decode", image=True, within="decoder"),
    ),
)
