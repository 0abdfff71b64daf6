"""LoRA files' names for the layers of Stable Diffusion: diffusers' names, new and old, and those of one file (sgm)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.stable_diffusion.unet_keys import unet_places
from qwenimg.common.networks.unet import UNetConfig
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.lora_names import (
    DENOISER,
    TEXT,
    TEXT_1,
    TEXT_2,
    ComponentNames,
    Names,
    Others,
    component_names,
)

_ATTENTION = re.compile(r"(?P<owner>.+\.attn\d)\.(?P<layer>to_[qkv]|to_out)(\.0)?")
_PROJECTION = re.compile(r"(?P<owner>.+\.self_attn)\.(?P<letter>q|k|v|out)_proj")


def names(checkpoint: Checkpoint) -> Names:
    """Return the names of the layers of the UNet and the text encoders."""
    tables = [_unet(checkpoint["unet"].config, checkpoint["unet"].plan.shapes)]
    two = len(checkpoint.texts) > 1
    tables += [text_part(name, checkpoint[name].plan.shapes, two=two) for name in checkpoint.texts]
    return tuple(tables)


def text_part(name: str, weights: Manifest, *, two: bool) -> ComponentNames:
    """Return the table of the text encoder `name`, the only one or one of two."""
    prefixes = (TEXT_2 if name == "text_encoder_2" else TEXT_1) if two else (*TEXT_2, *TEXT)
    return component_names(name, weights, prefixes, {path: list(_clip(path)) for path in _paths(weights)})


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


def _clip(path: str) -> Iterator[str]:
    """Yield the path behind the name of the text model, and diffusers' older names of a projection."""
    yield f"text_model.{path}"
    if match := _PROJECTION.fullmatch(path):
        for prefix in ("", "text_model."):
            yield f"{prefix}{match['owner']}.to_{match['letter']}"


def _paths(weights: Iterable[str]) -> Iterator[str]:
    return (name.removesuffix(".weight") for name in weights if name.endswith(".weight"))
