"""LoRA files' names for the layers of Flux.1: diffusers', those of its authors, which kohya's and ComfyUI's files have,
and XLabs'."""

from __future__ import annotations

from collections.abc import Mapping

from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.flux.texts import CLIP, T5
from qwenimg.common.families.flux.transformer_file import place
from qwenimg.common.parts.authors_names import QKV, Layers, layers, place_of
from qwenimg.common.parts.texts.text_lora_names import t5_names, text_part
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.keys import Place, Rows
from qwenimg.common.weights.loras.lora_names import DENOISER, ComponentNames, Names, component_names

_XLABS: Mapping[str, tuple[str, Layers]] = {
    "transformer_blocks": (
        "double_blocks",
        {
            **{f"attn.to_{x}": Place("qkv_lora1", Rows(i, i + 1, 3)) for i, x in QKV},
            **{f"attn.add_{x}_proj": Place("qkv_lora2", Rows(i, i + 1, 3)) for i, x in QKV},
            "attn.to_out.0": "proj_lora1",
            "attn.to_add_out": "proj_lora2",
        },
    ),
    "single_transformer_blocks": (
        "single_blocks",
        {**{f"attn.to_{x}": Place("qkv", Rows(i, i + 1, 3)) for i, x in QKV}, "proj_out": "proj"},
    ),
}


def names(checkpoint: Checkpoint) -> Names:
    """Return the names of the layers of the transformer and both text encoders."""
    parts = {name: part.plan.shapes for name, part in checkpoint.components.items()}
    clip, t5 = text_part(CLIP, parts[CLIP], "lora_te_", two=True), t5_names(T5, parts[T5], "lora_te2_", "lycoris_te2_")
    return transformer(parts["transformer"]), clip, t5


def transformer(weights: Manifest) -> ComponentNames:
    """Return the names of the layers of the transformer with these `weights`."""
    paths = [name.removesuffix(".weight") for name in weights if name.endswith(".weight") and len(weights[name]) == 2]
    places = {path: [*there, *_xlabs(path)] for path, there in layers(place, paths).items()}
    return component_names("transformer", weights, DENOISER, places=places)


def _xlabs(path: str) -> list[Place]:
    """Return XLabs' places of a layer's change by an attention's processor: one or none. In a block of one stream the
    processor has q, k and v of one module, without the feed-forward."""
    kind, _, rest = path.partition(".")
    index, _, layer = rest.partition(".")
    block, places = _XLABS.get(kind, ("", {}))
    if layer not in places:
        return []
    there = place_of(places, layer)
    return [there._replace(key=f"{block}.{index}.processor.{there.key}")]
