"""Multiplications and additions of a UNet and of a VAE's decoder, from the shapes of their weights: those of products
and convolutions, which are nearly all.
"""

from __future__ import annotations

import re
from math import prod

from qwenimg.common.weights.plan import LoadPlan


def unet(plan: LoadPlan, levels: int, height: int, width: int) -> float:
    """Of one prediction for latents of height x width, from the shapes of the weights at each level."""
    return sum(_at(e.shape, name, _unet_pixels(name, levels, height * width)) for name, e in plan.entries.items())


def decoder(plan: LoadPlan, height: int, width: int) -> float:
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
