"""CLIP's text encoder in files: transformers' names, which its `rename` maps, and OpenCLIP's.

Unusual about these files:
- OpenCLIP has q, k and v in one matrix, and its projection with rows and columns exchanged;
- ComfyUI's files of Stable Cascade have that projection beside transformers' names;
- OpenCLIP-H comes with its 24th layer, which Stable Diffusion 2 never uses;
- stable-diffusion.cpp, when it converts, gives OpenCLIP the names of transformers, in older versions with q, k and v
  apart, and leaves the projection as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.layout import QKV, Layers, Layout, Layouts, StoredShapes, place_of
from qwenimg.common.weights.keys import Place, Rows

HEAD_DIM = 64
USED_H = clip.OPEN_CLIP_H.num_hidden_layers
"""The layers of OpenCLIP-H that are used."""

_OPEN_CLIP: Layers = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
    **{f"self_attn.{x}_proj": Place("attn.in_proj", Rows(i, i + 1, 3)) for i, x in QKV},
}
_PROJECTION = "text_projection.weight"
_OPEN_CLIP_ENDS = {
    "embeddings.token_embedding.weight": Place("token_embedding.weight"),
    "embeddings.position_embedding.weight": Place("positional_embedding"),
    "final_layer_norm.weight": Place("ln_final.weight"),
    "final_layer_norm.bias": Place("ln_final.bias"),
    _PROJECTION: Place("text_projection", decode="transposed"),
}
_LAYER = re.compile(r"encoder\.layers\.(?P<layer>\d+)\.(?P<part>.+)\.(?P<leaf>weight|bias)")
_JOINED = re.compile(r"(?P<attention>.+\.self_attn)\.(?P<part>[qkv])_proj\.(?P<leaf>weight|bias)")
_OLDER = re.compile(r"(?P<owner>.+\.self_attn)\.(?P<letter>q|k|v|out)_proj")
_SIGN, _IN_MODEL = "embeddings.token_embedding.weight", "text_model."
_WHOLE = f"transformer.{_IN_MODEL}"
_LAST = f"layers.{USED_H}."


def _open_clip(name: str, config: CLIPConfig) -> Place:
    """Return the place of a parameter in OpenCLIP's names."""
    if (layer := _LAYER.fullmatch(name)) is None:
        return _OPEN_CLIP_ENDS[name]
    there = place_of(_OPEN_CLIP, layer["part"])
    leaf = f"{'_' if there.key.endswith('in_proj') else '.'}{layer['leaf']}"
    return there._replace(key=f"transformer.resblocks.{layer['layer']}.{there.key}{leaf}")


def _converted(name: str, config: CLIPConfig) -> Place:
    """Return the place of a parameter of OpenCLIP's in stable-diffusion.cpp's older names."""
    if name == _PROJECTION:
        return Place(f"{_IN_MODEL}text_projection", decode="transposed")
    return Place(_IN_MODEL + name)


def _joined(name: str, config: CLIPConfig) -> Place:
    """Return the place of a parameter of OpenCLIP's in stable-diffusion.cpp's names."""
    if (match := _JOINED.fullmatch(name)) is None:
        return _converted(name, config)
    index = "qkv".index(match["part"])
    return Place(f"{_IN_MODEL}{match['attention']}.in_proj.{match['leaf']}", Rows(index, index + 1, 3))


def _beside(name: str, config: CLIPConfig) -> Place:
    """Return the place of a parameter in ComfyUI's files of Stable Cascade."""
    return _OPEN_CLIP_ENDS[name] if name == _PROJECTION else Place(_WHOLE + name)


def _config(stored: StoredShapes, like: CLIPConfig) -> CLIPConfig:
    """Return the configuration for stored shapes. The activation is that of `like`, and whether there is a projection;
    all layers of `like` are expected in one of its width."""
    [width] = stored.shape("final_layer_norm.weight", 1)
    layers = len(stored.blocks("encoder.layers.0.layer_norm1.weight"))
    data: dict[str, Any] = {
        "vocab_size": stored.shape(_SIGN, 2)[0],
        "hidden_size": width,
        "intermediate_size": stored.shape("encoder.layers.0.mlp.fc1.bias", 1)[0],
        "max_position_embeddings": stored.shape("embeddings.position_embedding.weight", 2)[0],
    }
    if like.projection_dim is not None:
        rows, columns = stored.shape(_PROJECTION, 2)
        data["projection_dim"] = rows if columns == width else columns
    elif like.hidden_act == clip.OPEN_CLIP_H.hidden_act:
        layers = min(layers, USED_H)
    if width != like.hidden_size:
        data |= {"num_hidden_layers": layers, "num_attention_heads": max(1, width // HEAD_DIM)}
    return stored.config(like, **data)


def _older(path: str) -> Iterator[Place]:
    """Yield diffusers' older names of a projection, in the text model or not."""
    if match := _OLDER.fullmatch(path):
        for start in ("", _IN_MODEL):
            yield Place(f"{start}{match['owner']}.to_{match['letter']}")


LAYOUTS = Layouts(
    network=clip.NETWORK,
    title="CLIP",
    expected="CLIP text encoder: no encoder.layers or transformer.resblocks",
    rows=(
        Layout(
            names="OpenCLIP's names",
            signs=("token_embedding.weight", "transformer.resblocks.0.ln_1.weight"),
            place=_open_clip,
        ),
        Layout(
            names="stable-diffusion.cpp's names",
            signs=(_IN_MODEL + _SIGN, f"{_IN_MODEL}encoder.layers.0.self_attn.in_proj.weight"),
            place=_joined,
        ),
        Layout(
            names="stable-diffusion.cpp's names",
            signs=(_IN_MODEL + _SIGN, f"{_IN_MODEL}text_projection"),
            place=_converted,
        ),
        Layout(names="ComfyUI's names", signs=(_WHOLE + _SIGN, "text_projection"), place=_beside),
        Layout(
            names="transformers' names",
            signs=(_IN_MODEL + _SIGN, f"{_IN_MODEL}encoder.layers.0.layer_norm1.weight"),
        ),
        Layout(names="transformers' names", signs=(_SIGN, "encoder.layers.0.layer_norm1.weight")),
    ),
    config=_config,
    # Buffers, the tower for pictures, a projection that the model does not use, and OpenCLIP-H's last layer
    ignored=(
        *("logit_scale", "attn_mask", "text_projection", "embeddings.position_ids", "visual.", f"encoder.{_LAST}"),
        *(f"{_IN_MODEL}{start}" for start in ("text_projection", "embeddings.position_ids", f"encoder.{_LAST}")),
        f"{_WHOLE}embeddings.position_ids",
        f"transformer.resblocks.{USED_H}.",
    ),
    in_loras=_older,
)
