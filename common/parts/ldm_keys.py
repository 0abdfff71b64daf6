"""Places of a VAE's and a CLIP's parameters in checkpoints with CompVis's names ("ldm"): strings only.

A map goes from the manifest's names to the file's. So missing and unknown tensors both follow from the manifest, and no
tensor is taken because a rule happens to match it.

Unusual about these files:
- the VAE numbers its decoder's levels from the last to the first, and stores attention as 1x1 convolutions;
- OpenCLIP has q, k and v in one matrix, and its projection with rows and columns exchanged;
- OpenCLIP-H comes with its 24th layer, which Stable Diffusion 2 never uses;
- stable-diffusion.cpp, when it converts, gives OpenCLIP the names of transformers, in older versions with q, k and v
  apart, and leaves the projection as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from qwenimg.common.weights.keys import Place, Rows

Places = dict[str, Place]

CLIP_H_LAYERS = 23  # layers of OpenCLIP-H that are used

# Names behind a text encoder's prefix that are not needed: buffers, and tensors for CLIP's images.
IGNORED_TEXT = frozenset(
    {
        "logit_scale",
        "model.logit_scale",
        "model.attn_mask",
        "model.text_projection",  # of OpenCLIP-H
        "text_projection",  # beside a ViT-L, whose projection no pipeline uses
        "transformer.text_projection.weight",
        "transformer.text_model.text_projection",
        "transformer.text_model.embeddings.position_ids",
        "transformer.embeddings.position_ids",
    }
)

_OPEN_CLIP = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_OPEN_CLIP_ENDS = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
    "text_projection.weight": "text_projection",
}
_FUSED = ("q_proj", "k_proj", "v_proj")  # thirds of the rows of one tensor
_LAYER = re.compile(r"encoder\.layers\.(?P<layer>\d+)\.(?P<part>.+)\.(?P<leaf>weight|bias)")
_PROJECTION = re.compile(r"(?P<attention>.+\.self_attn)\.(?P<part>[qkv]_proj)\.(?P<leaf>weight|bias)")


def clip_places(names: Iterable[str], prefix: str) -> Places:
    """Map each parameter of a CLIP in transformers' names to its tensor behind `prefix`."""
    return {name: Place(prefix + name) for name in names}


def open_clip_places(names: Iterable[str], prefix: str) -> Places:
    """Map each parameter of a CLIP in OpenCLIP's names to its place behind `prefix`."""
    return {name: (place := _open_clip(name))._replace(key=prefix + place.key) for name in names}


def converted_places(names: Iterable[str], prefix: str, fused: bool) -> Places:
    """Map each parameter of OpenCLIP's text encoder to its place where stable-diffusion.cpp gave it
    transformers' names; `fused`: with q, k and v still in one matrix."""
    return {name: (place := _converted(name, fused))._replace(key=prefix + place.key) for name in names}


def _converted(name: str, fused: bool) -> Place:
    if name == "text_projection.weight":
        return Place("text_projection", decode="transposed")
    projection = _PROJECTION.fullmatch(name) if fused else None
    if projection is None:
        return Place(name)
    key = f"{projection['attention']}.in_proj.{projection['leaf']}"
    return Place(key, _third(projection["part"]))


def _third(projection: str) -> Rows:
    index = _FUSED.index(projection)
    return Rows(index, index + 1, len(_FUSED))


def _open_clip(name: str) -> Place:
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return Place(_OPEN_CLIP_ENDS[name], decode="transposed" if name == "text_projection.weight" else None)
    block = f"transformer.resblocks.{layer['layer']}"
    projection = layer["part"].removeprefix("self_attn.")
    if projection in _FUSED:
        return Place(f"{block}.attn.in_proj_{layer['leaf']}", _third(projection))
    return Place(f"{block}.{_OPEN_CLIP[layer['part']]}.{layer['leaf']}")
