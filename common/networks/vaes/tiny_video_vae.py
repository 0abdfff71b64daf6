"""The tiny VAE of Wan 2.1's latents, which are Qwen-Image's (TAEHV, taew2_1): configuration and manifest.

What is unusual about it:
- it is a video VAE: between its levels the encoder makes one frame of two, and the decoder two of one; a block sees
  the same layer's input for the frame before, zeros for the first;
- a still image is what its authors' code makes of one latent: of the four frames that the decoder makes, the last;
  before the encoder the image is four frames. So the middle levels run for two frames;
- it takes and makes latents in the sampler's scale, as TAESD does; values beyond 3 are bent towards 3 before the
  decoder; pixels are 0 to 1 inside;
- all layers of a half are one list, in which activations and upsamplings have numbers too.

Source: O. Boer Bohan, TAEHV.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network

BLOCKS = 3  # of each level
MOST_LEVELS = 8


@dataclass(frozen=True, kw_only=True)
class TinyVideoVAEConfig:
    """The sizes, which the shapes of the tensors are; the defaults are taew2_1's."""

    in_channels: int = field(default=3, metadata={"max": 1024})
    latent_channels: int = field(default=16, metadata={"max": 1024})
    width: int = field(default=64, metadata={"max": 4096})  # of the encoder
    widths: tuple[int, ...] = (256, 128, 64, 64)  # of the decoder's levels, the last without blocks
    pools: tuple[int, ...] = (2, 2, 1)  # frames that become one, before each level of the encoder
    grows: tuple[int, ...] = (1, 2, 2)  # frames that become of one, behind each level of the decoder

    def __post_init__(self) -> None:
        if self.in_channels != 3:
            raise ModelError(f"is of patches of {self.in_channels} channels, so of another video model; expected 3")
        if not 1 <= len(self.pools) == len(self.grows) == len(self.widths) - 1 <= MOST_LEVELS:
            raise ModelError("the encoder and the decoder have not as many levels")
        if not {*self.pools, *self.grows} <= {1, 2} or prod(self.pools) != prod(self.grows):
            raise ModelError(f"makes {list(self.pools)} frames one, and one {list(self.grows)}: not supported")

    @property
    def scale(self) -> int:
        """The pixels per latent along each side."""
        return 1 << len(self.pools)

    @property
    def z_dim(self) -> int:
        """The channels of the latents, by the name in the configuration of Qwen-Image's VAE."""
        return self.latent_channels

    @property
    def input_channels(self) -> int:
        """The channels of a picture, by the name in the configuration of Qwen-Image's VAE."""
        return self.in_channels

    @property
    def scaling_factor(self) -> float:
        return 1.0

    @property
    def shift_factor(self) -> float:
        return 0.0

    @property
    def patch(self) -> int:
        return 1


def manifest(config: TinyVideoVAEConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in its authors' files."""
    return params.merge(params.under("encoder", *_encoder(config)), params.under("decoder", *_decoder(config)))


def _encoder(config: TinyVideoVAEConfig) -> Iterator[Manifest]:
    width = config.width
    yield params.conv("0", width, config.in_channels, 3, 3)
    for level, pool in enumerate(config.pools):
        first = 2 + level * (2 + BLOCKS)
        yield {f"{first}.conv.weight": (width, pool * width, 1, 1), f"{first + 1}.weight": (width, width, 3, 3)}
        yield from (_block(first + 2 + i, width) for i in range(BLOCKS))
    yield params.conv(str(2 + len(config.pools) * (2 + BLOCKS)), config.latent_channels, width, 3, 3)


def _decoder(config: TinyVideoVAEConfig) -> Iterator[Manifest]:
    yield params.conv("1", config.widths[0], config.latent_channels, 3, 3)
    for level, grow in enumerate(config.grows):
        width, following = config.widths[level : level + 2]
        first = 3 + level * (BLOCKS + 3)
        yield from (_block(first + i, width) for i in range(BLOCKS))
        grown = first + BLOCKS + 1
        yield {f"{grown}.conv.weight": (grow * width, width, 1, 1), f"{grown + 1}.weight": (following, width, 3, 3)}
    yield params.conv(str(4 + len(config.grows) * (BLOCKS + 3)), config.in_channels, config.widths[-1], 3, 3)


def _block(place: int, width: int) -> Manifest:
    inputs = {0: 2 * width, 2: width, 4: width}
    return params.under(str(place), *(params.conv(f"conv.{i}", width, C, 3, 3) for i, C in inputs.items()))


NETWORK = Network(
    name="tiny_video_vae",
    role="vae",
    kind="TAEHV",
    config=TinyVideoVAEConfig,
    manifest=manifest,
    traced=(
        Block(name="layer", paths=re.compile(r"(en|de)coder\.\d+"), image=True, depth=1),
        Block(name="encode", paths=re.compile(""), method="encode", image=True, within="encoder"),
        Block(name="decode", paths=re.compile(""), method="decode", image=True, within="decoder"),
    ),
)
