"""SANA's VAE (AutoencoderDC, deep compression autoencoder, f32c32): configuration and manifest.

What is unusual about it:
- a latent stands for 32 x 32 pixels; an image is encoded to its latents themselves, without mean and variance;
- the inner levels attend to the whole image with ReLU kernels and without softmax, after a 5x5 kernel on queries, keys
  and values; what a head takes for these are neighbouring channels of all three together;
- its norms are of the channels of a pixel, so that the outer levels, which do not attend, run over bands of an image;
- around each change of sides leads a shortcut: down a mean over pixels and channels, up channels that become pixels.

Source: the reference class of diffusers, and the configuration published with SANA.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network
from qwenimg.common.weights.plan import ParamUse, ParamUses

CLASS_NAME = "AutoencoderDC"
NORM_EPS = 1e-5
KERNEL = 5  # of the kernel on queries, keys and values
EXPANSION = 4  # of the feed-forward
LOCAL, ATTENDING = "ResBlock", "EfficientViTBlock"
# Fields that must have this value, for each level where they are lists, since the forward does nothing else
_FIXED: Mapping[str, object] = {
    "encoder_out_shortcut": True,
    "decoder_in_shortcut": True,
    "decoder_norm_types": "rms_norm",
    "decoder_act_fns": "silu",
    "decoder_conv_act_fn": "relu",
    "upsample_block_type": "interpolate",
}
_WIDTHS, _TYPES = (128, 256, 512, 512, 1024, 1024), (LOCAL,) * 3 + (ATTENDING,) * 3
_WAYS = ("encoder", "decoder")


@dataclass(frozen=True, kw_only=True)
class DCVAEConfig:
    """The fields of `vae/config.json` after `vae_fields`; the defaults are the published model's."""

    in_channels: int = field(default=3, metadata={"max": 64})
    latent_channels: int = field(default=32, metadata={"max": 1024})
    attention_head_dim: int = field(default=32, metadata={"max": 1024})
    encoder_block_types: tuple[str, ...] = _TYPES
    decoder_block_types: tuple[str, ...] = _TYPES
    encoder_block_out_channels: tuple[int, ...] = _WIDTHS
    decoder_block_out_channels: tuple[int, ...] = _WIDTHS
    encoder_layers_per_block: tuple[int, ...] = (2, 2, 2, 3, 3, 3)
    decoder_layers_per_block: tuple[int, ...] = (3, 3, 3, 3, 3, 3)
    scaling_factor: float = 0.41407

    def __post_init__(self) -> None:
        for way in _WAYS:
            widths = self.widths(way)
            counts = [len(getattr(self, f"{way}_{name}")) for name in ("block_types", "layers_per_block")]
            if not widths or {*counts, len(self.encoder_block_out_channels)} != {len(widths)}:
                raise ModelError(f"{way}_block_out_channels has {len(widths)} levels, other fields {counts}")
            if unknown := [one for one in self.types(way) if one not in (LOCAL, ATTENDING)]:
                raise ModelError(f"{way}_block_types has {clean(unknown[0], 40)!r}: not supported")
            if any(width % self.latent_channels for width in widths[-1:]) or min(self.layers(way)) < 1:
                raise ModelError(
                    f"{way}: {widths[-1]} channels are no multiple of {self.latent_channels} latent channels, or a "
                    "level has no layers"
                )
            attending = zip(widths, self.types(way), strict=True)
            if any(width % self.attention_head_dim for width, kind in attending if kind == ATTENDING):
                raise ModelError(f"{way}: attention_head_dim {self.attention_head_dim} does not divide all widths")
            pairs = itertools.pairwise(widths)
            if any(4 * outer % inner for outer, inner in pairs):
                raise ModelError(f"{way}_block_out_channels {list(widths)} has widths between which no shortcut leads")
        if not self.scaling_factor > 0:
            raise ModelError(f"scaling_factor {self.scaling_factor} must be positive")

    def widths(self, way: str) -> tuple[int, ...]:
        """Return the channels of the levels of the encoder or decoder, those of the image first."""
        widths: tuple[int, ...] = getattr(self, f"{way}_block_out_channels")
        return widths

    def types(self, way: str) -> tuple[str, ...]:
        """Return the kinds of the levels' layers."""
        types: tuple[str, ...] = getattr(self, f"{way}_block_types")
        return types

    def layers(self, way: str) -> tuple[int, ...]:
        """Return the number of layers of each level."""
        layers: tuple[int, ...] = getattr(self, f"{way}_layers_per_block")
        return layers

    def local(self, way: str) -> int:
        """Return how many levels, from the image's on, see no more than the pixels around one."""
        types = self.types(way)
        return next((level for level, kind in enumerate(types) if kind == ATTENDING), len(types))

    @property
    def has_shortcuts(self) -> bool:
        return True

    @property
    def scale(self) -> int:
        """The pixels per latent along each side."""
        return 1 << (len(self.decoder_block_out_channels) - 1)

    @property
    def up_blocks(self) -> tuple[tuple[int, int, bool], ...]:
        """The decoder's levels: channels in, channels out, and whether sides are doubled behind it."""
        widths = self.decoder_block_out_channels
        return tuple((widths[i], widths[i], i > 0) for i in reversed(range(len(widths))))


def vae_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `DCVAEConfig` from a config.json. Raises ModelError for an unsupported value."""
    given = dict(data)
    for key, wanted in _FIXED.items():
        value = given.pop(key, wanted)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if item != wanted:
                raise ModelError(f"{key} is {clean(repr(item), 60)}: not supported; expected {wanted!r}")
    if given.pop("downsample_block_type", "conv") == "pixel_unshuffle":
        raise ModelError("downsample_block_type is 'pixel_unshuffle': not supported; expected 'conv'")
    for way in _WAYS:
        widths = given.get(f"{way}_block_out_channels", _WIDTHS)
        types = given.get(f"{way}_block_types", _TYPES)
        types = [types] * len(widths) if isinstance(types, str) else types
        given[f"{way}_block_types"] = types
        kernels = given.pop(f"{way}_qkv_multiscales", _multiscales(types))
        if list(map(list, kernels)) != _multiscales(types):
            raise ModelError(f"{way}_qkv_multiscales is {clean(kernels, 60)}: not supported; expected [{KERNEL}]")
    return given


def _multiscales(types: Sequence[str]) -> list[list[int]]:
    return [[KERNEL] if kind == ATTENDING else [] for kind in types]


def manifest(config: DCVAEConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    z, first, last = config.latent_channels, config.widths("encoder")[0], config.widths("encoder")[-1]
    top, bottom = config.widths("decoder")[-1], config.widths("decoder")[0]
    encoder = params.merge(
        params.conv("conv_in", first, config.in_channels, 3, 3),
        *_levels(config, "encoder"),
        params.conv("conv_out", z, last, 3, 3),
    )
    decoder = params.merge(
        params.conv("conv_in", top, z, 3, 3),
        *_levels(config, "decoder"),
        params.affine("norm_out", bottom),
        params.conv("conv_out", config.in_channels, bottom, 3, 3),
    )
    return params.merge(params.under("encoder", encoder), params.under("decoder", decoder))


def _levels(config: DCVAEConfig, way: str) -> list[Manifest]:
    widths, made, last = config.widths(way), [], len(config.widths(way)) - 1
    for level, (width, kind, count) in enumerate(zip(widths, config.types(way), config.layers(way), strict=True)):
        layers = [_attending(width, config.attention_head_dim) if kind == ATTENDING else _local(width)] * count
        if level < last and way == "encoder":
            layers.append(params.conv("conv", widths[level + 1], width, 3, 3))
        elif level < last:
            layers.insert(0, params.conv("conv", width, widths[level + 1], 3, 3))
        name = f"{'down' if way == 'encoder' else 'up'}_blocks.{level}"
        made += [params.under(f"{name}.{place}", layer) for place, layer in enumerate(layers)]
    return made


def _local(width: int) -> Manifest:
    return params.merge(
        params.conv("conv1", width, width, 3, 3),
        {"conv2.weight": (width, width, 3, 3)},
        params.affine("norm", width),
    )


def _attending(width: int, head_dim: int) -> Manifest:
    hidden = EXPANSION * width
    return params.merge(
        *(params.linear(f"attn.{name}", width, width, bias=False) for name in ("to_q", "to_k", "to_v")),
        {
            "attn.to_qkv_multiscale.0.proj_in.weight": (3 * width, 1, KERNEL, KERNEL),
            "attn.to_qkv_multiscale.0.proj_out.weight": (3 * width, head_dim, 1, 1),
        },
        params.linear("attn.to_out", width, 2 * width, bias=False),
        params.affine("attn.norm_out", width),
        params.conv("conv_out.conv_inverted", 2 * hidden, width, 1, 1),
        params.conv("conv_out.conv_depth", 2 * hidden, 1, 3, 3),
        {"conv_out.conv_point.weight": (width, hidden, 1, 1)},
        params.affine("conv_out.norm", width),
    )


def uses(config: DCVAEConfig, stored: Manifest) -> ParamUses:
    """Return the use of each tensor: the feed-forward's 1x1 kernels are matrices."""
    matrices = ("conv_inverted.weight", "conv_point.weight")
    return {name: ParamUse(shape[:2] if name.endswith(matrices) else shape) for name, shape in stored.items()}


def _described(config: DCVAEConfig) -> dict[str, object]:
    """Return the keys of config.json that have one value here, and the kernels of all levels."""
    kernels = {f"{way}_qkv_multiscales": _multiscales(config.types(way)) for way in _WAYS}
    return {**_FIXED, "downsample_block_type": "conv", **kernels}


NETWORK = Network(
    name="dc_vae",
    role="vae",
    kind=CLASS_NAME,
    config=DCVAEConfig,
    manifest=manifest,
    used=uses,
    fields=vae_fields,
    traced=(
        Block(name="layer", paths=re.compile(r".*_blocks\.\d+\.\d+"), image=True, streams=1, depth=1),
        Block(name="end", paths=re.compile(r"(?:en|de)coder\.(?:conv_in|norm_out|conv_out)"), image=True),
        Block(name="encode", paths=re.compile(""), method="encode", image=True, within="encoder"),
        Block(name="decode", paths=re.compile(""), method="decode", image=True, within="decoder"),
    ),
    described=_described,
)
