"""Multiplications and additions of a UNet and of a VAE's decoder, from the shapes of their weights: those of products
and convolutions, which are nearly all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import NamedTuple

from qwenimg.common.base.found_once import found_once
from qwenimg.common.weights.plan import LoadPlan


class _Counts(NamedTuple):
    """Operations for each pixel of the latents, and for each pair of them."""

    pixels: float
    pairs: float

    def at(self, pixels: int) -> float:
        return self.pixels * pixels + self.pairs * float(pixels) ** 2


def unet(plan: LoadPlan, levels: int, height: int, width: int) -> float:
    """Of one prediction for latents of height x width, from the shapes of the weights at each level."""
    return _unet(plan, levels).at(height * width)


def decoder(plan: LoadPlan, height: int, width: int) -> float:
    """Of decoding latents of height x width."""
    return _decoder(plan).at(height * width)


@found_once
def _unet(plan: LoadPlan, levels: int) -> _Counts:
    return _counts({name: entry.shape for name, entry in plan.entries.items()}, lambda name: _unet_pixels(name, levels))


@found_once
def _decoder(plan: LoadPlan) -> _Counts:
    names = {name: e.shape for name, e in plan.entries.items() if name.startswith("decoder.")}
    widest = names["decoder.conv_in.weight"][0]
    found = _counts(names, _decoder_pixels)
    return found._replace(pairs=found.pairs + 4.0 * widest)  # the mid block's attention


def _counts(shapes: dict[str, tuple[int, ...]], pixels: Callable[[str], float]) -> _Counts:
    """Of weights that are each used at so many positions to a pixel; a self-attention's query stands for its scores
    too."""
    matrices = [(name, shape, pixels(name)) for name, shape in shapes.items() if len(shape) > 1]
    queries = [(shape, share) for name, shape, share in matrices if name.endswith("attn1.to_q.weight")]
    return _Counts(
        sum(2.0 * share * prod(shape) for _, shape, share in matrices),
        sum(4.0 * share**2 * shape[0] for shape, share in queries),
    )


def _unet_pixels(name: str, levels: int) -> float:
    if found := re.match(r"(down|up)_blocks\.(\d+)\.", name):
        level = int(found[2]) if found[1] == "down" else levels - 1 - int(found[2])
        return 0.25**level
    return 0.25 ** (levels - 1) if name.startswith("mid_block.") else float(name.startswith("conv_"))


def _decoder_pixels(name: str) -> float:
    """An upsampler's convolution runs at the size above its block's."""
    found = re.match(r"decoder\.up_blocks\.(\d+)\.(\w+)", name)
    if not found:
        return float("conv_in" in name or "mid_block" in name)
    return 4.0 ** (int(found[1]) + (found[2] == "upsamplers"))
