"""LoRA files' names for the layers of Flux.1: diffusers', those of its authors, which kohya's and ComfyUI's files have,
and XLabs'."""

from __future__ import annotations

import re
from collections.abc import Iterator

from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.flux.transformer_file import place
from qwenimg.common.weights.keys import Place, Rows
from qwenimg.common.weights.lora_names import DENOISER, ComponentNames, component_names

_QKV = re.compile(r"attn\.(?:to_(?P<image>[qkv])|add_(?P<text>[qkv])_proj)")
_XLABS_ENDS = {"attn.to_out.0": "proj_lora1", "attn.to_add_out": "proj_lora2", "proj_out": "proj"}


def transformer(weights: Manifest) -> ComponentNames:
    """Return the names of the layers of the transformer with these `weights`."""
    paths = [name.removesuffix(".weight") for name in weights if name.endswith(".weight") and len(weights[name]) == 2]
    places = {path: [_layer(path), *_xlabs(path)] for path in paths}
    return component_names("transformer", weights, DENOISER, places=places)


def _layer(path: str) -> Place:
    """Return the place of a layer in one with its authors' name."""
    there = place(f"{path}.weight")
    return there._replace(key=there.key.removesuffix(".weight"))


def _xlabs(path: str) -> Iterator[Place]:
    """Yield XLabs' name for the change of a layer by an attention's processor. In a block of one stream it has q, k
    and v of one module, without the feed-forward."""
    kind, _, rest = path.partition(".")
    index, _, layer = rest.partition(".")
    block = {"transformer_blocks": "double_blocks", "single_transformer_blocks": "single_blocks"}.get(kind)
    if block is None:
        return
    name = _XLABS_ENDS.get(layer)
    if match := _QKV.fullmatch(layer):
        third = "qkv".index(match["image"] or match["text"])
        name = "qkv" if block == "single_blocks" else f"qkv_lora{1 if match['image'] else 2}"
        yield Place(f"{block}.{index}.processor.{name}", Rows(third, third + 1, 3))
    elif name is not None:
        yield Place(f"{block}.{index}.processor.{name}")
