"""SANA's VAE on an engine: latents without mean and variance, and the memory of its levels, each of which takes a
number of images of its channels: whole, or a band of them beside the images before and behind it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from qwenimg.common.memory.memory import MAX_VALUES
from qwenimg.common.networks.vaes.dc_vae import DCVAEConfig
from qwenimg.common.parts import vae
from qwenimg.common.parts.vae import LARGE, Float32, VAEHalves
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.weights.plan import LoadPlan

ATTENDING = 28  # images of its channels that a layer with attention and its feed-forward have at most
_INPUTS = 0.73  # of a workspace's copies of a convolution's input, those that these take: measured on both backends
READ = 14  # rows that are read beside a band, by the part with the widest view
_PIXELS = 18  # bytes of a value of the picture while it becomes 8 bits, as of any VAE


class DCHalves(VAEHalves):
    """The halves of SANA's VAE."""

    config: DCVAEConfig

    def _mean_and_deviation(self, encoded: Float32) -> tuple[Float32, Float32]:
        return encoded, np.zeros_like(encoded)

    def _encoding(self, height: int, width: int, rows: int | None) -> int:
        return self._peak("encoder", height, width, rows)

    def _decoding(self, shape: tuple[int, int], rows: int | None) -> int:
        height, width = (side * self.config.scale for side in shape)
        return self._peak("decoder", height, width, rows)

    def _required(self, shape: tuple[int, int]) -> int:
        return self._decoding(shape, None)

    def _operations(self, rows: int, columns: int) -> float:
        return operations(self.component.plan, self.config, rows, columns)

    def _is_whole(self, shape: tuple[int, int]) -> bool:
        largest = max(width / 4**level for level, width in enumerate(self.config.widths("decoder")))
        tiled = self.runtime.choice.wishes.tiled and max(shape) * self.config.scale > 8 * LARGE
        return not tiled and prod(shape) * self.config.scale**2 * largest < MAX_VALUES

    def _peak(self, way: str, height: int, width: int, rows: int | None) -> int:
        """Return the bytes of activations for an image of height x width pixels, in bands of `rows` unless that is
        None."""
        picture = 3 * height * width
        levels = max(self._levels(way, height, width, rows)) * self.itemsize
        return int(max(levels + 2 * picture * 4, picture * _PIXELS))

    def _levels(self, way: str, height: int, width: int, rows: int | None) -> Iterator[float]:
        """Yield the number of values that each level has in memory at its peak."""
        workspace, local, widths = self.engine.workspace, self.config.local(way), self.config.widths(way)
        inputs = _INPUTS * workspace.inputs(self.itemsize)
        for level, (channels, inner) in enumerate(zip(widths, (*widths[1:], 0), strict=True)):
            high, wide = height / 2**level, width / 2**level
            # beside a convolution, its layer's input; where it doubles the sides, that is a quarter, of more channels
            doubling = (inputs + 0.25) * inner / channels if way == "decoder" else 0
            convolved = max(1 + inputs, doubling) + workspace.conv_outputs
            images = convolved if level < local else ATTENDING
            if rows is None or high <= rows:
                yield images * channels * high * wide
                continue
            kept = 0 if self.engine.facts.own_memory and level < local else 2 * channels * high * wide
            yield kept + images * channels * wide * min(high, rows + READ)


def operations(plan: LoadPlan, config: DCVAEConfig, rows: int, columns: int) -> float:
    """Return the operations of decoding latents of rows x columns: two for each weight and pixel of its level."""
    total, last = 0.0, len(config.widths("decoder")) - 1
    for name, entry in plan.entries.items():
        if not name.startswith("decoder.") or len(entry.shape) < 2:
            continue
        _, kind, level, *_ = name.split(".")
        inside = int(level) if kind == "up_blocks" else 0 if kind == "conv_out" else last
        total += 2.0 * prod(entry.shape) * 4 ** (last - inside)
    return total * rows * columns


def halves(residents: Residents, component: Component) -> DCHalves:
    """Return the halves of SANA's VAE, whose latents have one scale."""
    config: DCVAEConfig = component.config
    return DCHalves(
        residents, component, config.widths("encoder")[0], vae.scaled(config.scaling_factor, 0.0), samples=False
    )
