"""Wan's names of the tensors of a VAE with levels, as in ComfyUI's file for Qwen-Image-2.1: strings only.

Layers are numbered within a level, its sampler after its residual blocks.
"""

from __future__ import annotations

import re

ENDS = {
    "conv1": "conv_in",
    "middle.0": "mid_block.resnets.0",
    "middle.1": "mid_block.attentions.0",
    "middle.2": "mid_block.resnets.1",
    "head.0": "norm_out",
    "head.2": "conv_out",
}
"""Diffusers' names of the layers before and behind the levels, by Wan's."""
RESIDUAL = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
"""Diffusers' names of the layers of a residual block, by Wan's."""
OUTSIDE = {"conv1": "quant_conv", "conv2": "post_quant_conv"}
"""Diffusers' names of the layers outside of encoder and decoder, by Wan's."""
_KEY = re.compile(
    r"(?P<side>encoder|decoder)\.(?:(?P<way>down|up)samples\.(?P<level>\d+)\.(?:down|up)samples\.(?P<layer>\d+)|"
    r"(?P<end>conv1|middle\.[012]|head\.[02]))\.(?P<rest>.+)"
)


def rename(key: str) -> str:
    """Return diffusers' name of the tensor that Wan calls `key`; other keys unchanged."""
    first, _, leaf = key.partition(".")
    if first in OUTSIDE:
        return f"{OUTSIDE[first]}.{leaf}"
    match = _KEY.fullmatch(key)
    if match is None:
        return key
    rest = match["rest"]
    part, _, leaf = rest.rpartition(".")
    rest = f"{RESIDUAL[part]}.{leaf}" if part in RESIDUAL else rest
    if match["end"]:
        return f"{match['side']}.{ENDS[match['end']]}.{rest}"
    is_sampler = part not in RESIDUAL
    layer = f"{match['way']}sampler" if is_sampler else f"resnets.{match['layer']}"
    return f"{match['side']}.{match['way']}_blocks.{match['level']}.{layer}.{rest}"
