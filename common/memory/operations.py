"""Multiply-adds of a UNet and of a VAE's decoder, from the shapes of their weights. Only products and convolutions are
counted: they are nearly all."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import NamedTuple

from qwenimg.common.base.found_once import found_once
from qwenimg.common.weights.plan import LoadPlan


class _Counts(NamedTuple):
    """The operations for each pixel of the latents, and for each pair of pixels."""

    pixels: float
    pairs: float

    def at(self, pixels: int) -> float:
        return self.pixels * pixels + self.pairs * float(pixels) ** 2


def unet(plan: LoadPlan, levels: int, height: int, width: int) -> float:
    """Return the operations of one prediction for latents of height x width. `levels`: the UNet's number of levels."""
    return _unet(plan, levels).at(height * width)


def decoder(plan: LoadPlan, height: int, width: int) -> float:
    """Return the operations of decoding latents of height x width."""
    return _decoder(plan).at(height * width)


@found_once
def _unet(plan: LoadPlan, levels: int) -> _Counts:
    return _counts({name: entry.shape for name, entry in plan.entries.items()}, lambda name: _unet_pixels(name, levels))


@found_once
def _decoder(plan: LoadPlan) -> _Counts:
    names = {name: e.shape for name, e in plan.entries.items() if name.startswith("decoder.")}
    widest = names["decoder.conv_in.weight"][0]
    counts = _counts(names, _decoder_pixels)
    return counts._replace(pairs=counts.pairs + 4.0 * widest)  # the mid block's attention


def _counts(shapes: dict[str, tuple[int, ...]], pixels: Callable[[str], float]) -> _Counts:
    """Return the operations of weights of these shapes. `pixels`: the number of positions per pixel at which a weight
    is used. The scores of a self-attention are counted with its query."""
    matrices = [(name, shape, pixels(name)) for name, shape in shapes.items() if len(shape) > 1]
    queries = [(shape, share) for name, shape, share in matrices if name.endswith("attn1.to_q.weight")]
    return _Counts(
        sum(2.0 * share * prod(shape) for _, shape, share in matrices),
        sum(4.0 * share**2 * shape[0] for shape, share in queries),
    )


def _unet_pixels(name: str, levels: int) -> float:
    if match := re.match(r"(down|up)_blocks\.(\d+)\.", name):
        level = int(match[2]) if match[1] == "down" else levels - 1 - int(match[2])
        return 0.25**level
    return 0.25 ** (levels - 1) if name.startswith("mid_block.") else float(name.startswith("conv_"))


def _decoder_pixels(name: str) -> float:
    """Return the positions per pixel of a weight. An upsampler's convolution runs at the size above its block's."""
    match = re.match(r"decoder\.up_blocks\.(\d+)\.(\w+)", name)
    if not match:
        return float("conv_in" in name or "mid_block" in name)
    return 4.0 ** (int(match[1]) + match[2].startswith("upsampler"))
