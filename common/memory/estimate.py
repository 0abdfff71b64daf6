"""What a picture will take, from configurations alone: memory by stage, and operations for a measured rate.

The time is that of the products and convolutions at the rate of one product on this device, measured while other
programs run as they do: an order of magnitude, since networks reach a half to twice that rate, and loading comes on
top. The first step tells the rest better (`left`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from qwenimg.common.base.amounts import size_text
from qwenimg.common.memory.stages import Stage
from qwenimg.common.weights.plan import LoadPlan

LONG = 600  # seconds, from which on a run says how long it takes before it starts
MUCH = 2.0  # times more or less than was said, from which on the first step corrects it
SOON = 10  # seconds: what is over sooner needs no correction


@dataclass(frozen=True, kw_only=True)
class Needs:
    """`loaded`: bytes of the stages' weights that are in memory already; `steps` and `decoding`: their multiplications
    and additions."""

    stages: Sequence[Stage]
    loaded: int = 0
    steps: float
    decoding: float

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.peak)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one picture."""

    memory: int  # bytes at the peak
    seconds: float
    step: float  # seconds of one step, on average


def summary(memory: int, seconds: float) -> str:
    """`about 1.3 GB and roughly 2 min`"""
    return f"about {size_text(memory)} and {duration(seconds)}"


def duration(seconds: float) -> str:
    """`roughly 20 s`: in one unit and to one digit, or two below 20, since no more is known."""
    unit, length = next(((u, n) for u, n in (("days", 86400), ("h", 3600), ("min", 60)) if seconds >= 2 * n), ("s", 1))
    amount = max(1.0, seconds / length)
    return f"roughly {float(f'{amount:.2g}' if amount < 20 else f'{amount:.1g}'):.0f} {unit}"


def left(expected: Sequence[Estimate], step: float) -> tuple[float, bool]:
    """Seconds that are left after the first step of all, which took `step`, and whether that is worth a line: beyond
    ten minutes, or much more or less than was said."""
    ratio = step / expected[0].step
    said = sum(one.seconds for one in expected)
    rest = max(0.0, ratio * said - step)
    differs = not 1 / MUCH < ratio < MUCH and max(rest, said) > SOON
    return rest, rest > LONG or differs


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
