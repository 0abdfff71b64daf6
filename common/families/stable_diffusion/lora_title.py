"""The models that a LoRA, a UNet or a ControlNet fits, by the width of the text states that its layers take."""

from __future__ import annotations

import re
from collections.abc import Mapping

from qwenimg.common.formats.stored import Header
from qwenimg.common.weights.loras.lora_keys import Module

_CROSS = re.compile(r".*attn2[._](processor[._])?to_k")
_KEYS = re.compile(r".*\.attn2\.to_k\.weight")
_WIDTHS = {768: "Stable Diffusion 1.x", 1024: "Stable Diffusion 2.x", 2048: "SDXL", 1280: "the refiner of SDXL"}


def title(modules: Mapping[str, Module]) -> str:
    """Return the title of the models that a LoRA with these modules fits, by the width of the text states that its
    layers take."""
    for name, module in modules.items():
        if _CROSS.fullmatch(name) and "down" in module.parts:
            width = module.parts["down"].shape[1]
            return _WIDTHS.get(width, f"a UNet with text states of {width} channels")
    return "Stable Diffusion"


def title_of_network(header: Header) -> str:
    """Return the title of the models whose text states a UNet or a ControlNet with this header takes; "" if no layer
    shows their width."""
    shapes = (stored.shape for name, stored in header.tensors.items() if _KEYS.fullmatch(name))
    return next((_WIDTHS.get(shape[1], "") for shape in shapes if len(shape) == 2), "")
