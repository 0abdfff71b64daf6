"""The network of ESRGAN and Real-ESRGAN (RRDBNet): configuration and manifest.

What is unusual about it:
- its files come without a configuration: the shapes of the tensors are the configuration;
- it has no norms, and convolutions of 3x3 alone: each pixel depends on those around it and on nothing else, so that
  layers run over bands of a picture with the bits of the whole;
- networks for a scale of 2 or 1 first make patches of 2x2 or 4x4 pixels channels, and enlarge as much as others;
- its tensors come under three sets of names: BasicSR's (those of the manifest), those of the first ESRGAN, and those of
  its first release, in which a position in a sequence is the name (`model.1.sub.0.RDB1.conv1.0`).

Sources: X. Wang et al., "ESRGAN", 2018, and "Real-ESRGAN", 2021.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network

DENSE = 3  # dense blocks of a block
CONVS = 5  # convolutions of a dense block
REACH = DENSE * CONVS  # pixels that a block sees beyond its own
REACH_OF_END = 2  # pixels of its input that the layers behind the blocks see, however often they enlarge
RESIDUAL = 0.2  # the factor of each update
SLOPE = 0.2  # of the leaky ReLU
MOST_SCALE = 16

_BODY = re.compile(r"(?:body|RRDB_trunk)\.(\d{1,6})\.(?:rdb|RDB)([1-3])\.conv([1-5])\.(weight|bias)")
_OLD_BODY = re.compile(r"model\.1\.sub\.(\d{1,6})\.RDB([1-3])\.conv([1-5])\.0\.(weight|bias)")
_OLD_TRUNK = re.compile(r"model\.1\.sub\.(\d{1,6})\.(weight|bias)")
_OLD_LAYER = re.compile(r"model\.(\d{1,6})\.(weight|bias)")
_LAYER = re.compile(
    r"(conv_first|conv_body|trunk_conv|conv_hr|HRconv|conv_last|(?:conv_up|upconv)([1-9]))\.(weight|bias)"
)
_RENAMED = {"trunk_conv": "conv_body", "HRconv": "conv_hr"}


@dataclass(frozen=True, kw_only=True)
class RRDBNetConfig:
    channels: int = 3  # of the picture, in and out
    features: int = 64
    growth: int = 32  # channels that each convolution of a dense block adds
    blocks: int = 23
    enlarged: int = 2  # how often the picture gets twice its sides
    patch: int = 1  # sides of the patches that are made channels first

    def __post_init__(self) -> None:
        if self.channels != 3:
            raise ModelError(f"is for pictures of {self.channels} channels; networks for RGB, 3 channels, are read")
        if self.patch not in (1, 2, 4) or not 1 <= self.scale <= MOST_SCALE:
            raise ModelError(f"enlarges {2**self.enlarged} times after patches of {self.patch}: not supported")

    @property
    def scale(self) -> int:
        """The pixels of the result for one of the picture, along each side."""
        return (1 << self.enlarged) // self.patch


def manifest(config: RRDBNetConfig) -> Manifest:
    """Return the shape of every tensor, by BasicSR's names."""
    C = config.features
    dense = params.merge(
        *(
            params.conv(f"conv{i + 1}", config.growth if i < CONVS - 1 else C, C + i * config.growth, 3, 3)
            for i in range(CONVS)
        )
    )
    block = params.merge(*(params.under(f"rdb{i + 1}", dense) for i in range(DENSE)))
    return params.merge(
        params.conv("conv_first", C, config.channels * config.patch**2, 3, 3),
        params.repeat("body", config.blocks, block),
        params.conv("conv_body", C, C, 3, 3),
        *(params.conv(f"conv_up{i + 1}", C, C, 3, 3) for i in range(config.enlarged)),
        params.conv("conv_hr", C, C, 3, 3),
        params.conv("conv_last", config.channels, C, 3, 3),
    )


def names(keys: Iterable[str]) -> dict[str, str]:
    """Return the manifest's name for each key that is of such a network, whichever its spelling."""
    keys = list(keys)
    old = [int(match[1]) for key in keys if (match := _OLD_LAYER.fullmatch(key))]
    last = max(old, default=0)
    named = {key: _name(key, last) for key in keys}
    return {key: name for key, name in named.items() if name is not None}


def _name(key: str, last: int) -> str | None:
    """Return the manifest's name of `key`, or None. last: the position of the last layer in a sequence, where it is 4
    + 3 for each time that the picture gets larger."""
    if match := _BODY.fullmatch(key) or _OLD_BODY.fullmatch(key):
        return f"body.{int(match[1])}.rdb{match[2]}.conv{match[3]}.{match[4]}"
    if match := _OLD_TRUNK.fullmatch(key):
        return f"conv_body.{match[2]}"
    if match := _LAYER.fullmatch(key):
        layer = f"conv_up{match[2]}" if match[2] else _RENAMED.get(match[1], match[1])
        return f"{layer}.{match[3]}"
    if not (match := _OLD_LAYER.fullmatch(key)):
        return None
    place, enlarged = int(match[1]), (last - 4) // 3
    layers = {0: "conv_first", last - 2: "conv_hr", last: "conv_last"}
    layers |= {3 * i: f"conv_up{i}" for i in range(1, min(enlarged, 9) + 1)}
    return f"{layers[place]}.{match[2]}" if place in layers else None


def config_of(shapes: Mapping[str, Shape]) -> RRDBNetConfig | None:
    """Return the configuration of a network whose tensors, by the manifest's names, have these shapes; None if they
    are of no such network. Raises ModelError for one that is not supported."""
    first, last, grown = (shapes.get(f"{name}.weight") for name in ("conv_first", "conv_last", "body.0.rdb1.conv1"))
    if first is None or last is None or grown is None or {len(first), len(last), len(grown)} != {4}:
        return None
    channels = last[0]
    patch = next((size for size in (1, 2, 4) if first[1] == channels * size**2), 0)
    if not patch:
        raise ModelError(f"takes {first[1]} channels and returns {channels}: not supported")
    blocks = {int(name.split(".")[1]) for name in shapes if name.startswith("body.")}
    ups = sum(name.startswith("conv_up") and name.endswith(".weight") for name in shapes)
    return RRDBNetConfig(
        channels=channels, features=first[0], growth=grown[0], blocks=len(blocks), enlarged=ups, patch=patch
    )


NETWORK = Network(
    name="rrdbnet",
    role="vae",  # its precision is the VAE's: its values become pixels
    kind="RRDBNet",
    config=RRDBNetConfig,
    manifest=manifest,
)
