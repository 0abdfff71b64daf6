"""LoRA files' names for the layers of Stable Diffusion: diffusers' names, new and old, and those of one file (sgm)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.stable_diffusion.unet_keys import unet_places
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.parts.texts.text_lora_names import text_part
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.loras.lora_keys import Module
from qwenimg.common.weights.loras.lora_names import DENOISER, ComponentNames, Names, Others, component_names

_ATTENTION = re.compile(r"(?P<owner>.+\.attn\d)\.(?P<layer>to_[qkv]|to_out)(\.0)?")

_CROSS = re.compile(r".*attn2[._](processor[._])?to_k")
_WIDTHS = {768: "Stable Diffusion 1.x", 1024: "Stable Diffusion 2.x", 2048: "SDXL", 1280: "the refiner of SDXL"}


def title(modules: Mapping[str, Module]) -> str:
    """Return the title of the models that a LoRA with these modules fits, by the width of the text states that its
    layers take."""
    for name, module in modules.items():
        if _CROSS.fullmatch(name) and "down" in module.parts:
            width = module.parts["down"].shape[1]
            return _WIDTHS.get(width, f"a UNet with text states of {width} channels")
    return "Stable Diffusion"


def names(checkpoint: Checkpoint) -> Names:
    """Return the names of the layers of the UNet and the text encoders."""
    tables = [_unet(checkpoint["unet"].config, checkpoint["unet"].plan.shapes)]
    two = len(checkpoint.texts) > 1
    tables += [text_part(name, checkpoint[name].plan.shapes, two=two) for name in checkpoint.texts]
    return tuple(tables)


def _unet(config: UNetConfig, weights: Manifest) -> ComponentNames:
    stored = [name for name in weights if name.endswith(".weight")]
    places = unet_places(stored, config, "")
    others: Others = {
        path: [places[f"{path}.weight"].key.removesuffix(".weight"), *_processor(path)] for path in _paths(stored)
    }
    return component_names("unet", weights, DENOISER, others)


def _processor(path: str) -> Iterator[str]:
    """Yield the name that diffusers wrote until 2023: `attn1.processor.to_q_lora.down.weight`."""
    if match := _ATTENTION.fullmatch(path):
        yield f"{match['owner']}.processor.{match['layer']}"


def _paths(weights: Iterable[str]) -> Iterator[str]:
    return (name.removesuffix(".weight") for name in weights if name.endswith(".weight"))
