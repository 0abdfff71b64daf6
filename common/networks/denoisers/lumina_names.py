"""Lumina-Image 2.0's transformer in files: its authors' names, which ComfyUI and GGUF files have, and diffusers'.

Unusual about its authors' names: q, k and v are rows of one tensor, of which k and v have fewer; Z-Image's are the
same but for the number in `adaLN_modulation`, and GGUF files of both name one architecture.
"""

from __future__ import annotations

from typing import Any

from qwenimg.common.networks.denoisers import lumina_dit, zimage_names
from qwenimg.common.networks.denoisers.lumina_dit import LuminaConfig
from qwenimg.common.networks.denoisers.zimage_dit import PATCH
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes, with_parts
from qwenimg.common.weights.keys import ALL, Place, Rows

_SIGN = "layers.0.adaLN_modulation.1.weight"
# Parts of names of the manifest, and what the authors have in their place where it is not what Z-Image's have
_AUTHORS = {
    "t_embedder.linear_1.": "t_embedder.mlp.0.",
    "t_embedder.linear_2.": "t_embedder.mlp.2.",
    ".adaLN_modulation.0.": ".adaLN_modulation.1.",
}


def place(name: str, config: LuminaConfig) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    found = zimage_names.place(with_parts(name, _AUTHORS))
    if found.rows == ALL:
        return found
    queries, keys = config.n_heads, config.n_kv_heads
    ends = (0, queries, queries + keys, queries + 2 * keys)
    return Place(found.key, Rows(ends[found.rows.begin], ends[found.rows.end], ends[3]))


def _config(stored: StoredShapes, like: LuminaConfig) -> LuminaConfig:
    """Return the configuration for stored shapes, of vectors and rows, since the columns of matrices may be packed; the
    axes of RoPE are taken from `like`, and the heads of keys follow from the rows of q, k and v."""
    [dim] = stored.shape("layers.0.attention_norm1.weight", 1)
    [features] = stored.shape("final_layer.linear.bias", 1)
    [text] = stored.shape("cap_embedder.0.weight", 1)
    [head_dim] = stored.shape("layers.0.attention.norm_q.weight", 1)
    keys, _ = stored.shape("layers.0.attention.to_k.weight", 2)
    if stored.stored_name("layers.0.attention.to_k.weight").endswith(".qkv.weight"):
        keys = (keys - dim) // 2
    hidden, _ = stored.shape("layers.0.feed_forward.w1.weight", 2)
    data: dict[str, Any] = {
        "in_channels": features // PATCH**2,
        "out_channels": None,
        "dim": dim,
        "n_layers": len(stored.blocks("layers.0.attention_norm1.weight")),
        "n_refiner_layers": len(stored.blocks("noise_refiner.0.attention_norm1.weight")),
        "n_heads": dim // max(1, head_dim),
        "n_kv_heads": keys // max(1, head_dim),
        "cap_feat_dim": text,
    }
    config = stored.config(like, **data)
    if config.hidden == hidden:
        return config
    ratio = {"multiple_of": 1, "ffn_dim_multiplier": (hidden + 0.5) / (4 * dim)}  # whose product is rounded down
    return stored.config(config, **ratio)


LAYOUTS = Layouts(
    network=lumina_dit.NETWORK,
    title="Lumina-Image 2.0",
    rows=(
        Layout(
            names="its authors' names, as ComfyUI has it",
            signs=(_SIGN, "layers.0.attention.qkv.weight"),
            lacks=("clip_text_pooled_proj.0.weight",),  # of NewBie-Image, which is wider and reads CLIP too
            place=place,
        ),
        Layout(names="diffusers' names", signs=("layers.0.norm1.linear.weight", "layers.0.attn.to_q.weight")),
    ),
    config=_config,
    ignored=("norm_final.weight",),
    foreign={
        "clip_text_pooled_proj.0.weight": "NewBie-Image's transformer, which this version does not draw with",
        "layers.0.adaLN_modulation.0.weight": "Z-Image's transformer",
    },
)
