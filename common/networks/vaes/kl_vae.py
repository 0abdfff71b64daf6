"""Stable Diffusion's VAE (AutoencoderKL): configuration and manifest.

What is unusual about it:
- its group norms take their moments over the whole image, so no part of an image is decoded alone: layers run over
  bands of the image one after the other, and a norm waits for the moments of all bands;
- the downsamplers pad below and to the right only;
- SDXL's exceeds float16 in its activations (`force_upcast`), though its weights do not;
- latents are scaled by one number, and in some models shifted by another, which are part of the configuration;
- the mid block's attention comes under two sets of names.

Source: the published configurations of Stable Diffusion 1.5, 2.1, SDXL and 3, and of FLUX.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network

CLASS_NAME = "AutoencoderKL"
IGNORED_CONFIG: frozenset[str] = frozenset()
# Fields that must have this value, for each block where they are lists, since the forward does nothing else.
FIXED_CONFIG: Mapping[str, object] = {
    "act_fn": "silu",
    "down_block_types": "DownEncoderBlock2D",
    "mid_block_add_attention": True,
    "up_block_types": "UpDecoderBlock2D",
}

NORM_EPS = 1e-6

_MFLUX = (".conv_in.conv2d.", ".conv_in.conv.", ".conv_out.conv2d.", ".conv_out.conv.", ".conv_norm_out.norm.")
_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


@dataclass(frozen=True, kw_only=True)
class KLVAEConfig:
    """The fields of `vae/config.json` after `vae_fields`; the defaults are the reference class's."""

    in_channels: int = field(default=3, metadata={"max": 64})
    out_channels: int = field(default=3, metadata={"max": 64})
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = field(default=1, metadata={"max": 64})
    latent_channels: int = field(default=4, metadata={"max": 1024})
    norm_num_groups: int = 32
    sample_size: int = 32
    scaling_factor: float = 0.18215
    shift_factor: float | None = None
    force_upcast: bool = True
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True

    def __post_init__(self) -> None:
        if not self.block_out_channels:
            raise ModelError("block_out_channels is empty")
        for width in (*self.block_out_channels, *self.decoder_widths):
            if width % self.norm_num_groups:
                raise ModelError(f"norm_num_groups {self.norm_num_groups} does not divide {width} channels")
        if not self.scaling_factor > 0:
            raise ModelError(f"scaling_factor {self.scaling_factor} must be positive")

    @property
    def has_shortcuts(self) -> bool:
        return False

    @property
    def decoder_widths(self) -> tuple[int, ...]:
        """The channels of the decoder's levels, those of the image first."""
        return self.block_out_channels

    @property
    def scale(self) -> int:
        """The pixels per latent along each side."""
        return 1 << (len(self.block_out_channels) - 1)

    @property
    def down_blocks(self) -> tuple[tuple[int, int, bool], ...]:
        """The encoder's blocks: channels in, channels out, and whether a downsampler ends the block."""
        widths = self.block_out_channels
        return tuple((widths[max(i - 1, 0)], width, i + 1 < len(widths)) for i, width in enumerate(widths))

    @property
    def up_blocks(self) -> tuple[tuple[int, int, bool], ...]:
        """The decoder's blocks: channels in, channels out, and whether an upsampler ends the block."""
        widths = self.decoder_widths[::-1]
        return tuple((widths[max(i - 1, 0)], width, i + 1 < len(widths)) for i, width in enumerate(widths))


FLUX_1 = KLVAEConfig(
    block_out_channels=(128, 256, 512, 512),
    layers_per_block=2,
    latent_channels=16,
    sample_size=1024,
    scaling_factor=0.3611,
    shift_factor=0.1159,
    use_quant_conv=False,
    use_post_quant_conv=False,
)
"""The VAE of FLUX.1 and Z-Image."""
STABLE_DIFFUSION_3 = replace(FLUX_1, scaling_factor=1.5305, shift_factor=0.0609)


def vae_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `KLVAEConfig` from a config.json. Raises ModelError for an unsupported value."""
    for key, wanted in FIXED_CONFIG.items():
        value = data.get(key, wanted)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if item != wanted:
                expected = str(wanted).lower() if isinstance(wanted, bool) else repr(wanted)
                raise ModelError(f"{key} is {clean(repr(item), 60)}: not supported; expected {expected}")
    return {key: value for key, value in data.items() if key not in FIXED_CONFIG}


def manifest(config: KLVAEConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers' present layout (see `rename`)."""
    z, top, widths = config.latent_channels, config.block_out_channels[-1], config.decoder_widths
    encoder = [params.conv("conv_in", config.block_out_channels[0], config.in_channels, 3, 3)]
    encoder += _blocks("down", config.down_blocks, config.layers_per_block)
    encoder += [params.under("mid_block", _mid(top)), params.affine("conv_norm_out", top)]
    encoder.append(params.conv("conv_out", 2 * z, top, 3, 3))
    decoder = [params.conv("conv_in", widths[-1], z, 3, 3)]
    decoder += _blocks("up", config.up_blocks, config.layers_per_block + 1)
    decoder += [params.under("mid_block", _mid(widths[-1])), params.affine("conv_norm_out", widths[0])]
    decoder.append(params.conv("conv_out", config.out_channels, widths[0], 3, 3))
    return params.merge(
        params.under("encoder", *encoder),
        params.conv("quant_conv", 2 * z, 2 * z, 1, 1) if config.use_quant_conv else {},
        params.conv("post_quant_conv", z, z, 1, 1) if config.use_post_quant_conv else {},
        params.under("decoder", *decoder),
    )


def rename(key: str) -> str:
    """Return the manifest key of a file's key: older files have query, key, value, proj_attn for the attention, and
    mflux's some layers within another."""
    for inner in _MFLUX:
        key = key.replace(inner, f"{inner.rpartition('.')[0].rpartition('.')[0]}.")
    parent, _, leaf = key.rpartition(".")
    above, _, name = parent.rpartition(".")
    old = above.endswith("mid_block.attentions.0") and name in _OLD_NAMES
    return f"{above}.{_OLD_NAMES[name]}.{leaf}" if old else key


def _blocks(way: str, blocks: tuple[tuple[int, int, bool], ...], count: int) -> list[Manifest]:
    parts = []
    for i, (inputs, outputs, resampled) in enumerate(blocks):
        resnets = [_resnet(outputs if j else inputs, outputs) for j in range(count)]
        block = params.merge(*(params.under(f"resnets.{j}", part) for j, part in enumerate(resnets)))
        if resampled:
            block |= params.conv(f"{way}samplers.0.conv", outputs, outputs, 3, 3)
        parts.append(params.under(f"{way}_blocks.{i}", block))
    return parts


def _resnet(inputs: int, outputs: int) -> Manifest:
    return params.merge(
        params.affine("norm1", inputs),
        params.conv("conv1", outputs, inputs, 3, 3),
        params.affine("norm2", outputs),
        params.conv("conv2", outputs, outputs, 3, 3),
        params.conv("conv_shortcut", outputs, inputs, 1, 1) if inputs != outputs else {},
    )


def _mid(width: int) -> Manifest:
    attention = params.merge(
        params.affine("group_norm", width),
        *(params.linear(name, width, width) for name in ("to_q", "to_k", "to_v", "to_out.0")),
    )
    return params.repeat("resnets", 2, _resnet(width, width)) | params.under("attentions.0", attention)


def _block_types(config: KLVAEConfig) -> dict[str, object]:
    """Return config.json's types of all blocks."""
    kinds = ("down_block_types", "up_block_types")
    return {name: [FIXED_CONFIG[name]] * len(config.block_out_channels) for name in kinds}


NETWORK = Network(
    name="kl_vae",
    role="vae",
    kind=CLASS_NAME,
    config=KLVAEConfig,
    manifest=manifest,
    fields=vae_fields,
    ignored=IGNORED_CONFIG,
    rename=rename,
    channels_last=".conv_in.conv",
    traced=(
        Block(name="resnet", paths=re.compile(r".*\.resnets\.\d+"), image=True, streams=1, depth=1),
        Block(name="attention", paths=re.compile(r".*\.attentions\.\d+"), image=True, streams=1, depth=1),
        Block(name="sampler", paths=re.compile(r".*\.(down|up)samplers\.\d+"), image=True),
        Block(name="end", paths=re.compile(r".*\.(conv_in|conv_norm_out|conv_out)|(post_)?quant_conv"), image=True),
        Block(name="encode", paths=re.compile(""), method="encode", image=True, within="encoder"),
        Block(name="decode", paths=re.compile(""), method="decode", image=True, within="decoder"),
    ),
    described=_block_types,
)
