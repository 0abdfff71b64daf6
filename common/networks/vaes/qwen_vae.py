"""Qwen-Image's VAE (AutoencoderKLQwenImage, Wan's video VAE): configuration, manifest, and the 2-D network inside it.

What is unusual about it:
- it is a causal video VAE. A still image is one frame, before which every causal convolution sees zeros: only the
  last temporal tap of each kernel counts, and the `time_conv`s never run. So a 2-D network is loaded and run, with
  about a third of the stored parameters;
- its norm divides by the length over channels at each pixel: no statistics over space, so everything but the mid
  block's attention is local, and runs over bands of an image as it does over the whole;
- an upsampler halves the channels, so the next block starts narrower than the last one ended;
- latents are standardised with a mean and deviation per channel, which are part of the configuration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import qwen_vae_names
from qwenimg.common.weights.plan import ParamUse, ParamUses

CLASS_NAME = "AutoencoderKLQwenImage"
IGNORED_CONFIG = frozenset({"dropout"})
SIGN = "decoder.mid_block.resnets.0.norm1.gamma"

_MEAN: tuple[float, ...] = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
_MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
_STD: tuple[float, ...] = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
_STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)


@dataclass(frozen=True, kw_only=True)
class QwenVAEConfig:
    """The fields of `vae/config.json`; the defaults are the published model's."""

    base_dim: int = field(default=96, metadata={"max": 4096})
    z_dim: int = field(default=16, metadata={"max": 1024})
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = field(default=2, metadata={"max": 64})
    attn_scales: tuple[float, ...] = ()
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    input_channels: int = field(default=3, metadata={"max": 64})
    latents_mean: tuple[float, ...] = _MEAN
    latents_std: tuple[float, ...] = _STD

    def __post_init__(self) -> None:
        if self.attn_scales:
            raise ModelError(f"attn_scales {list(self.attn_scales)}: attention outside the mid block is not supported")
        check_sizes(self, self.base_dim)
        if any(self.base_dim * mult % 2 for mult in self.dim_mult[1:]):
            raise ModelError("every width that is upsampled must be even, since the upsampler halves it")

    @property
    def has_shortcuts(self) -> bool:
        return False

    @property
    def scale(self) -> int:
        """The pixels per latent along each side."""
        return 1 << (len(self.dim_mult) - 1)

    @property
    def encoder_dims(self) -> tuple[int, ...]:
        return (self.base_dim, *(self.base_dim * mult for mult in self.dim_mult))

    @property
    def decoder_dims(self) -> tuple[int, ...]:
        widths = tuple(self.base_dim * mult for mult in reversed(self.dim_mult))
        return (widths[0], *widths)

    @property
    def up_blocks(self) -> tuple[tuple[int, int, bool], ...]:
        """The decoder's up blocks: channels in, channels out, and whether an upsampler ends the block."""
        dims, last = self.decoder_dims, len(self.dim_mult) - 1
        return tuple((dims[i] // 2 if i else dims[i], dims[i + 1], i != last) for i in range(last + 1))

    @property
    def down_layers(self) -> tuple[tuple[str, int, int], ...]:
        """The encoder's flat list of layers: ("residual" or "down", channels in, channels out)."""
        layers: list[tuple[str, int, int]] = []
        for i, (inputs, outputs) in enumerate(zip(self.encoder_dims[:-1], self.encoder_dims[1:], strict=True)):
            layers += [("residual", inputs if j == 0 else outputs, outputs) for j in range(self.num_res_blocks)]
            if i != len(self.dim_mult) - 1:
                layers.append(("down", outputs, outputs))
        return tuple(layers)


def check_sizes(config: Any, widest: int) -> None:
    """Raise ModelError for a configuration of this VAE, or of Qwen-Image-2.1's, whose sizes do not go together. widest:
    the larger `base_dim` of encoder and decoder."""
    if len(config.temperal_downsample) != len(config.dim_mult) - 1:
        raise ModelError(
            f"temperal_downsample has {len(config.temperal_downsample)} entries, "
            f"dim_mult {len(config.dim_mult)}: expected one fewer"
        )
    if {len(config.latents_mean), len(config.latents_std)} != {config.z_dim}:
        raise ModelError(f"latents_mean and latents_std must have z_dim = {config.z_dim} entries")
    if any(not deviation > 0 for deviation in config.latents_std):
        raise ModelError("latents_std must be positive")
    if any(widest * mult > 65536 for mult in config.dim_mult):
        raise ModelError(f"base_dim {config.base_dim} times dim_mult {list(config.dim_mult)} is wider than 65536")


def manifest(config: QwenVAEConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint as it is stored, temporal taps and `time_conv`s included."""
    z = config.z_dim
    return params.merge(
        params.under("encoder", _encoder(config)),
        params.conv("quant_conv", 2 * z, 2 * z, 1, 1, 1),
        params.conv("post_quant_conv", z, z, 1, 1, 1),
        params.under("decoder", _decoder(config)),
    )


def uses(stored: Manifest) -> ParamUses:
    """Return the tensors of `stored` that a still image needs, in the shapes of the 2-D network: [O, I, t, h, w] -> [O,
    I, h, w] (the last temporal tap), gains [C, 1, 1(, 1)] -> [C], and no `time_conv`."""
    return {key: _still(key, shape) for key, shape in stored.items() if ".time_conv." not in key}


def _still(key: str, shape: Shape) -> ParamUse:
    if key.endswith(".gamma"):
        return ParamUse(shape[:1])
    return ParamUse((*shape[:2], *shape[3:]), "last_tap") if len(shape) == 5 else ParamUse(shape)


def gain(name: str, width: int, axes: int = 3) -> Manifest:
    """Return the shape of a norm's gain."""
    return {f"{name}.gamma": (width, *(1,) * axes)}


def residual(inputs: int, outputs: int) -> Manifest:
    """Return the shapes of a residual block."""
    return params.merge(
        gain("norm1", inputs),
        params.conv("conv1", outputs, inputs, 3, 3, 3),
        gain("norm2", outputs),
        params.conv("conv2", outputs, outputs, 3, 3, 3),
        params.conv("conv_shortcut", outputs, inputs, 1, 1, 1) if inputs != outputs else {},
    )


def mid(width: int) -> Manifest:
    """Return the shapes of a mid block."""
    attention = params.merge(
        gain("norm", width, axes=2),
        params.conv("to_qkv", 3 * width, width, 1, 1),
        params.conv("proj", width, width, 1, 1),
    )
    return params.repeat("resnets", 2, residual(width, width)) | params.under("attentions.0", attention)


def _encoder(config: QwenVAEConfig) -> Manifest:
    parts = [params.conv("conv_in", config.base_dim, config.input_channels, 3, 3, 3)]
    downs = iter(config.temperal_downsample)
    for index, (kind, inputs, outputs) in enumerate(config.down_layers):
        layer = residual(inputs, outputs)
        if kind == "down":
            layer = params.conv("resample.1", outputs, outputs, 3, 3)
            layer |= params.conv("time_conv", outputs, outputs, 3, 1, 1) if next(downs) else {}
        parts.append(params.under(f"down_blocks.{index}", layer))
    top = config.encoder_dims[-1]
    parts += [
        params.under("mid_block", mid(top)),
        gain("norm_out", top),
        params.conv("conv_out", 2 * config.z_dim, top, 3, 3, 3),
    ]
    return params.merge(*parts)


def _decoder(config: QwenVAEConfig) -> Manifest:
    top, last = config.decoder_dims[0], config.decoder_dims[-1]
    parts = [params.conv("conv_in", top, config.z_dim, 3, 3, 3), params.under("mid_block", mid(top))]
    temporal = config.temperal_downsample[::-1]
    for index, (inputs, outputs, upsampled) in enumerate(config.up_blocks):
        resnets = [residual(inputs if j == 0 else outputs, outputs) for j in range(config.num_res_blocks + 1)]
        block = params.merge(*(params.under(f"resnets.{j}", part) for j, part in enumerate(resnets)))
        if upsampled:
            up = params.conv("resample.1", outputs // 2, outputs, 3, 3)
            up |= params.conv("time_conv", 2 * outputs, outputs, 3, 1, 1) if temporal[index] else {}
            block |= params.under("upsamplers.0", up)
        parts.append(params.under(f"up_blocks.{index}", block))
    parts += [gain("norm_out", last), params.conv("conv_out", config.input_channels, last, 3, 3, 3)]
    return params.merge(*parts)


NETWORK = Network(
    name="qwen_vae",
    role="vae",
    kind=CLASS_NAME,
    config=QwenVAEConfig,
    manifest=manifest,
    used=lambda config, stored: uses(stored),
    ignored=IGNORED_CONFIG,
    renames=lambda config: qwen_vae_names.renaming(manifest(config), config.num_res_blocks + 1),
    channels_last=".conv3d.",
    traced=(
        Block(
            name="resnet",
            paths=re.compile(r".*\.resnets\.\d+|encoder\.down_blocks\.\d+"),
            image=True,
            streams=1,
            depth=1,
        ),
        Block(name="attention", paths=re.compile(r".*\.attentions\.\d+"), image=True, streams=1, depth=1),
        Block(name="sampler", paths=re.compile(r".*\.upsamplers\.\d+"), image=True),
        Block(name="end", paths=re.compile(r".*\.(conv_in|norm_out|conv_out)|(post_)?quant_conv"), image=True),
        Block(name="encode", paths=re.compile(""), method="encode", image=True, within="encoder"),
        Block(name="decode", paths=re.compile(""), method="decode", image=True, within="decoder"),
    ),
)
