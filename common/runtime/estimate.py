"""What a picture will take, from configurations alone: memory by stage, and operations for a measured rate.

The time is that of the products and convolutions at the rate of one large product on this device: reading from
disk and everything that is not a product comes on top.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from qwenimg.common.base.amounts import size_text
from qwenimg.common.weights.plan import LoadPlan

LONG = 600  # seconds, from which on a run says how long it takes before it starts


@dataclass(frozen=True, kw_only=True)
class Needs:
    """`memory`: free bytes that each stage needs, in order; `operations`: all multiplications and additions."""

    memory: Mapping[str, int]
    operations: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one picture."""

    memory: int  # bytes at the peak
    seconds: float


def summary(memory: int, seconds: float) -> str:
    """`about 1.3 GB and 2 min`"""
    return f"about {size_text(memory)} and {duration(seconds)}"


def duration(seconds: float) -> str:
    """In one unit, to two digits at most: it is an estimate."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{float(f'{seconds / length:.2g}'):g} {unit}"
    return f"{max(1, round(seconds))} s"


def unet_operations(plan: LoadPlan, levels: int, height: int, width: int) -> float:
    """Of one prediction for latents of height x width, from the shapes of the weights at each level."""
    return sum(_at(e.shape, name, _unet_pixels(name, levels, height * width)) for name, e in plan.entries.items())


def decoder_operations(plan: LoadPlan, height: int, width: int) -> float:
    """Of decoding latents of height x width."""
    names = {name: e.shape for name, e in plan.entries.items() if name.startswith("decoder.")}
    widest = names["decoder.conv_in.weight"][0]
    attention = 4.0 * (height * width) ** 2 * widest  # the mid block's
    return attention + sum(_at(s, n, _decoder_pixels(n, height * width)) for n, s in names.items())


def _at(shape: tuple[int, ...], name: str, pixels: float) -> float:
    """Of one weight that is used at `pixels` positions; a self-attention's query stands for its scores too."""
    if len(shape) < 2:
        return 0.0
    products = 2.0 * pixels * prod(shape)
    return products + (4.0 * pixels**2 * shape[0] if name.endswith("attn1.to_q.weight") else 0.0)


def _unet_pixels(name: str, levels: int, pixels: int) -> float:
    if found := re.match(r"(down|up)_blocks\.(\d+)\.", name):
        level = int(found[2]) if found[1] == "down" else levels - 1 - int(found[2])
        return pixels / 4.0**level
    return pixels / 4.0 ** (levels - 1) if name.startswith("mid_block.") else pixels if name.startswith("conv_") else 0


def _decoder_pixels(name: str, latents: int) -> float:
    """An upsampler's convolution runs at the size above its block's."""
    found = re.match(r"decoder\.up_blocks\.(\d+)\.(\w+)", name)
    if not found:
        return latents if "conv_in" in name or "mid_block" in name else 0
    return latents * 4.0 ** (int(found[1]) + (found[2] == "upsamplers"))
