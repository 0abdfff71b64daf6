"""The compact network of Real-ESRGAN (SRVGGNetCompact): configuration and manifest.

What is unusual about it:
- its files come without a configuration: the shapes of the tensors are the configuration;
- all layers are at the picture's own size; the last makes the pixels of a larger one as channels, which are added to
  the picture with each pixel repeated;
- its layers are one list, in which a convolution and the slopes of its activation (PReLU) take turns.

Source: X. Wang et al., "Real-ESRGAN", 2021 (realesr-general-x4v3, realesr-animevideov3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isqrt

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network

MOST_SCALE = 16
_LAYER = re.compile(r"body\.\d{1,6}\.(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class SRVGGConfig:
    channels: int = 3  # of the picture, in and out
    features: int = 64
    convs: int = 16  # convolutions between the first and the last
    scale: int = 4

    def __post_init__(self) -> None:
        if self.channels != 3:
            raise ModelError(f"is for pictures of {self.channels} channels; networks for RGB, 3 channels, are read")
        if not 1 <= self.scale <= MOST_SCALE:
            raise ModelError(f"enlarges {self.scale} times; at most {MOST_SCALE} are supported")


def manifest(config: SRVGGConfig) -> Manifest:
    """Return the shape of every tensor, by its key."""
    C, last = config.features, 2 * (config.convs + 1)
    layers = [params.conv(f"body.{2 * i}", C, C if i else config.channels, 3, 3) for i in range(config.convs + 1)]
    slopes = [params.norm(f"body.{2 * i + 1}", C) for i in range(config.convs + 1)]
    return params.merge(*layers, *slopes, params.conv(f"body.{last}", config.channels * config.scale**2, C, 3, 3))


def names(keys: Iterable[str]) -> dict[str, str]:
    """Return the keys that are of such a network; they are the manifest's names."""
    return {key: key for key in keys if _LAYER.fullmatch(key)}


def config_of(shapes: Mapping[str, Shape]) -> SRVGGConfig | None:
    """Return the configuration of a network whose tensors have these shapes; None if they are of no such network.
    Raises ModelError for one that is not supported."""
    layers = [int(name.split(".")[1]) for name in shapes]
    last = max(layers, default=0)
    first, slopes, end = (shapes.get(f"body.{place}.weight") for place in (0, 1, last))
    if first is None or end is None or last < 2 or {len(first), len(end)} != {4}:
        return None
    if slopes is None:
        raise ModelError("has no slopes of its activations (PReLU): its activation is another one, which is not read")
    if last > len(shapes):
        return None
    channels = first[1]
    scale = isqrt(end[0] // max(channels, 1))
    if channels * scale**2 != end[0]:
        raise ModelError(f"takes {channels} channels and makes {end[0]}: not supported")
    return SRVGGConfig(channels=channels, features=first[0], convs=last // 2 - 1, scale=scale)


NETWORK = Network(
    name="srvgg",
    role="vae",  # its precision is the VAE's: its values become pixels
    kind="SRVGGNetCompact",
    config=SRVGGConfig,
    manifest=manifest,
)
