"""Ovis-Image's transformer in files: its authors' names, ComfyUI's, which are Flux.1's where both have a layer, and
diffusers'.

Unusual about the first two: gate and values of a feed-forward of two streams are tensors of their own, those of one
stream are rows of one tensor with q, k and v, the values first. Its authors have `semantic_` before the two layers for
text, and every gain is a `weight`.
"""

from __future__ import annotations

from collections.abc import Iterator

from qwenimg.common.networks.denoisers import flux_blocks_names, flux_names, ovis_dit
from qwenimg.common.networks.denoisers.ovis_dit import HALVES, OvisConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.weights.keys import ALL, Place, Rows

_MLP = {"ff": "img_mlp", "ff_context": "txt_mlp"}
_SIGN = "double_blocks.0.img_mlp.up_proj.weight"
_FIRST, _SECOND = Rows(0, 2), Rows(-1, 1)
"""The place of a gated layer in each of its halves: it has two times as many rows."""


def place(name: str) -> Place:
    """Return the place of a parameter in a file with ComfyUI's names."""
    owner, _, leaf = name.rpartition(".")
    if owner == "context_embedder_norm":
        return Place("txt_norm.scale")
    if owner.endswith(".proj_mlp"):
        return flux_names.place(name)._replace(rows=Rows(3, 11, 11))
    if owner.startswith("single_") and ".attn.to_" in owner:
        there = flux_names.place(name)
        return there._replace(rows=there.rows._replace(of=11))
    block, _, layer = owner.partition(".net.")
    if not layer:
        return flux_names.place(name)
    _, index, part = block.split(".")
    half = {"0.proj": HALVES[0], "2": "down_proj"}.get(layer, layer.removeprefix("0."))
    return Place(f"double_blocks.{index}.{_MLP[part]}.{half}.{leaf}", _FIRST if layer == "0.proj" else ALL)


def authors_place(name: str) -> Place:
    """Return the place of a parameter in a file of its authors."""
    there = place(name)
    key = f"semantic_{there.key}" if there.key.startswith(("txt_in.", "txt_norm.")) else there.key
    return there._replace(key=f"{key.removesuffix('.scale')}.weight" if key.endswith(".scale") else key)


def _in_loras(path: str) -> Iterator[Place]:
    """Yield the place of the second half of a gated layer, which is a module of its own."""
    if path.endswith(".net.0.proj"):
        second = place(f"{path.removesuffix('proj')}{HALVES[1]}.weight").key
        yield Place(second.removesuffix(".weight"), _SECOND)


def _config(stored: StoredShapes, like: OvisConfig) -> OvisConfig:
    """Return the configuration for stored shapes; the axes of RoPE are taken from `like`."""
    out_channels = stored.shape("proj_out.weight", 2)[0]
    return stored.config(like, **flux_blocks_names.sizes(stored), out_channels=out_channels)


LAYOUTS = Layouts(
    network=ovis_dit.NETWORK,
    title="Ovis-Image",
    rows=(
        Layout(
            names="its authors' names",
            signs=(_SIGN, "semantic_txt_in.weight"),
            place=lambda name, config: authors_place(name),
        ),
        Layout(
            names="ComfyUI's names",
            signs=(_SIGN, "txt_in.weight"),
            place=lambda name, config: place(name),
        ),
        Layout(
            names="diffusers' names",
            signs=("context_embedder_norm.weight", "single_transformer_blocks.0.norm.linear.weight"),
        ),
    ),
    config=_config,
    in_loras=_in_loras,
)
