"""The tiny VAE of Stable Diffusion, SDXL, SD3, FLUX.1 and FLUX.2 (AutoencoderTiny, TAESD): configuration and manifest.

What is unusual about it:
- it takes and makes latents in the sampler's scale: no factor, mean or batch norm stands between;
- it was trained to copy another VAE, so that one file of shapes fits the latents of several models, and nothing in the
  tensors says of which;
- all layers of a half are one list, in which activations and upsamplings have numbers too;
- values beyond 3 are bent towards 3 before the decoder; pixels are 0 to 1 inside;
- no layer looks beyond its neighbours, but that of FLUX.2 has a norm over the whole image in its smallest level.

Source: O. Boer Bohan, TAESD; the reference class of diffusers, which has no norms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network

CLASS_NAME = "AutoencoderTiny"
# Fields that must have this value, since the forward does nothing else
FIXED_CONFIG: Mapping[str, object] = {"act_fn": "relu", "upsample_fn": "nearest", "upsampling_scaling_factor": 2}
LIMIT = 3.0  # of latents before the decoder
POOL, POOL_GROUPS, NORM_EPS = 4, 4, 1e-5  # of the norm over an image: its channels in a block's, its groups
MOST_LAYERS = 64
REACH = {"conv": 1, "block": 3, "down": 2, "relu": 0, "up": 0}
"""The kinds of layers, and the rows that each sees above and below a band."""


@dataclass(frozen=True, kw_only=True)
class TinyVAEConfig:
    """The fields of config.json after `fields`; the defaults are those of TAESD for Stable Diffusion 1."""

    in_channels: int = field(default=3, metadata={"max": 64})
    out_channels: int = field(default=3, metadata={"max": 64})
    encoder_block_out_channels: tuple[int, ...] = (64, 64, 64, 64)
    decoder_block_out_channels: tuple[int, ...] = (64, 64, 64, 64)
    latent_channels: int = field(default=4, metadata={"max": 1024})
    num_encoder_blocks: tuple[int, ...] = (1, 3, 3, 3)
    num_decoder_blocks: tuple[int, ...] = (3, 3, 3, 1)
    scaling_factor: float = 1.0
    shift_factor: float = 0.0
    pooled: bool = field(default=False, metadata={"in_files": False})  # True: its smallest level has norms, as FLUX.2's
    patch: int = field(default=1, metadata={"in_files": False})  # of the sampler's latents: 2 for FLUX.2

    def __post_init__(self) -> None:
        if (self.in_channels, self.out_channels) != (3, 3):
            raise ModelError(f"is of pictures of {self.in_channels} and {self.out_channels} channels; expected 3")
        if not self.scaling_factor > 0:
            raise ModelError(f"scaling_factor {self.scaling_factor} must be positive")
        for half in ("encoder", "decoder"):
            widths, blocks = getattr(self, f"{half}_block_out_channels"), getattr(self, f"num_{half}_blocks")
            if len(set(widths)) != 1:
                raise ModelError(f"{half}_block_out_channels {list(widths)[:9]}: expected one width")
            if len(widths) != len(blocks) or sum(blocks) > MOST_LAYERS or len(blocks) > 8:
                raise ModelError(f"num_{half}_blocks {list(blocks)[:9]} is not of {len(widths)} levels with few blocks")
        if len(self.num_encoder_blocks) != len(self.num_decoder_blocks):
            raise ModelError("the encoder and the decoder have not as many levels")

    @property
    def scale(self) -> int:
        """The pixels per latent along each side, without patches."""
        return 1 << (len(self.num_decoder_blocks) - 1)

    @property
    def patch_channels(self) -> int:
        """The channels of the sampler's latents."""
        return self.patch**2 * self.latent_channels

    @property
    def encoder_layers(self) -> tuple[str, ...]:
        """The kinds of the encoder's layers, in their order."""
        levels = (("down" if i else "conv", *("block",) * count) for i, count in enumerate(self.num_encoder_blocks))
        return (*(layer for level in levels for layer in level), "conv")

    @property
    def decoder_layers(self) -> tuple[str, ...]:
        """The kinds of the decoder's layers, in their order."""
        levels = ((*("block",) * count, "up", "conv") for count in self.num_decoder_blocks[:-1])
        return ("conv", "relu", *(layer for level in levels for layer in level), *self._last_decoder_layers)

    @property
    def _last_decoder_layers(self) -> tuple[str, ...]:
        return (*("block",) * self.num_decoder_blocks[-1], "conv")


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `TinyVAEConfig` from a config.json. Raises ModelError for an unsupported value."""
    for key, wanted in FIXED_CONFIG.items():
        if (value := data.get(key, wanted)) != wanted:
            raise ModelError(f"{key} is {clean(repr(value), 60)}: not supported; expected {wanted!r}")
    return {key: value for key, value in data.items() if key not in FIXED_CONFIG}


def smallest(layers: tuple[str, ...]) -> range:
    """Return the places of the layers at the size of the latents: after the last `down`, or before the first `up`."""
    if "up" in layers:
        return range(layers.index("up"))
    downs = [place for place, kind in enumerate(layers) if kind == "down"]
    return range(downs[-1] + 1 if downs else 0, len(layers))


def manifest(config: TinyVAEConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers' layout."""
    z, colours = config.latent_channels, config.in_channels
    wide, narrow = config.encoder_block_out_channels[0], config.decoder_block_out_channels[0]
    encoder = _half(config.encoder_layers, colours, wide, z, pooled=config.pooled)
    decoder = _half(config.decoder_layers, z, narrow, config.out_channels, pooled=config.pooled)
    return params.merge(params.under("encoder.layers", *encoder), params.under("decoder.layers", *decoder))


def _half(layers: tuple[str, ...], inputs: int, width: int, outputs: int, *, pooled: bool) -> Iterator[Manifest]:
    """Yield the shapes of each layer that has some. A convolution that changes the size has no bias."""
    small, last = smallest(layers), len(layers) - 1
    for place, (before, kind) in enumerate(pairwise(("", *layers))):
        if kind == "block":
            yield params.under(str(place), _block(width, pooled=pooled and place in small))
        elif kind in ("conv", "down"):
            shape = outputs if place == last else width, width if place else inputs, 3, 3
            layer = params.conv(str(place), *shape)
            if kind == "down" or before == "up":
                del layer[f"{place}.bias"]
            yield layer


def _block(width: int, *, pooled: bool) -> Manifest:
    convs = [params.conv(f"conv.{i}", width, width, 3, 3) for i in (0, 2, 4)]
    if not pooled:
        return params.merge(*convs)
    pool = {"pool.0.weight": (POOL * width, width, 1, 1), "pool.3.weight": (width, POOL * width, 1, 1)}
    return params.merge(*convs, pool, params.affine("pool.1", POOL * width))


NETWORK = Network(
    name="tiny_vae",
    role="vae",
    kind=CLASS_NAME,
    config=TinyVAEConfig,
    manifest=manifest,
    fields=fields,
    ignored=frozenset({"latent_magnitude", "latent_shift", "force_upcast", "block_out_channels"}),
    traced=(
        Block(name="layer", paths=re.compile(r"(en|de)coder\.layers\.\d+"), image=True, depth=1),
        Block(name="encode", paths=re.compile(""), method="encode", image=True, within="encoder"),
        Block(name="decode", paths=re.compile(""), method="decode", image=True, within="decoder"),
    ),
    described=lambda config: dict(FIXED_CONFIG),
)
