"""Z-Image's transformer in files: its authors' names, which ComfyUI has, diffusers', and those of MLX_z-image.

Unusual about its authors' names: q, k and v are rows of one tensor; the layers are those of Lumina-Image 2.0, whose
files differ in the width of text and in the modulation's layer, and GGUF files name that architecture.
"""

from __future__ import annotations

import re

from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.networks.denoisers.zimage_dit import PATCH, ZImageConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes, with_parts
from qwenimg.common.weights.keys import Place, Rows

_SIGN = "layers.0.adaLN_modulation.0.weight"
_EDITS = "the transformer of Z-Image-Omni or -Edit: this version makes images from text only"
_PART = re.compile(r"(?P<block>.+)\.attention\.(?P<layer>to_[qkv]|to_out\.0|norm_[qk])\.weight")


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    if (part := _PART.fullmatch(name)) is None:
        return Place(name.removesuffix(".weight") if "pad_token" in name else name)
    block, layer = part.groups()
    if layer.startswith("norm_"):
        return Place(f"{block}.attention.{layer[-1]}_norm.weight")
    if layer == "to_out.0":
        return Place(f"{block}.attention.out.weight")
    index = "qkv".index(layer[-1])
    return Place(f"{block}.attention.qkv.weight", Rows(index, index + 1, 3))


# Parts of names of the manifest, and what MLX_z-image, a port to Macs, has in their place
_PORT = {
    "t_embedder.mlp.0.": "t_embedder.linear1.",
    "t_embedder.mlp.2.": "t_embedder.linear2.",
    "cap_embedder.": "cap_embedder.layers.",
    ".attention.to_out.0.": ".attention.to_out.",
    ".adaLN_modulation.0.": ".adaLN_modulation.",
    ".adaLN_modulation.1.": ".adaLN_modulation.layers.1.",
    "_pad_token.weight": "_pad_token",
}


def _place_in_port(name: str) -> Place:
    """Return the place of a parameter in a file of MLX_z-image."""
    return Place(with_parts(name, _PORT))


def _config(stored: StoredShapes, like: ZImageConfig) -> ZImageConfig:
    """Return the configuration for stored shapes of vectors only, since matrices may be packed; the axes of RoPE are
    taken from `like`."""
    [dim] = stored.shape("layers.0.attention_norm1.weight", 1)
    [features] = stored.shape("final_layer.linear.bias", 1)
    [text] = stored.shape("cap_embedder.0.weight", 1)
    [head_dim] = stored.shape("layers.0.attention.norm_q.weight", 1)
    heads = dim // max(1, head_dim)
    return stored.config(
        like,
        in_channels=features // PATCH**2,
        dim=dim,
        n_layers=len(stored.blocks("layers.0.attention_norm1.weight")),
        n_refiner_layers=len(stored.blocks("noise_refiner.0.attention_norm1.weight")),
        n_heads=heads,
        n_kv_heads=heads,
        cap_feat_dim=text,
    )


LAYOUTS = Layouts(
    network=zimage_dit.NETWORK,
    title="Z-Image",
    rows=(
        Layout(
            names="its authors' names, as ComfyUI has it",
            signs=(_SIGN, "layers.0.attention.qkv.weight"),
            place=lambda name, config: place(name),
        ),
        Layout(names="diffusers' names", signs=(_SIGN,)),
        Layout(
            names="MLX_z-image's names",
            signs=("layers.0.adaLN_modulation.weight", "layers.0.attention.to_out.weight", "t_embedder.linear1.weight"),
            place=lambda name, config: _place_in_port(name),
        ),
    ),
    config=_config,
    ignored=("norm_final.weight",),  # left over from the class of Lumina-Image 2.0
    foreign={
        "layers.0.adaLN_modulation.1.weight": "Lumina-Image 2.0's transformer",
        "siglip_embedder.1.weight": _EDITS,
        "siglip_refiner.0.attention_norm1.weight": _EDITS,
    },
)
