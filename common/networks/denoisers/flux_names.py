"""Flux.1's transformer in files: its authors' names, and diffusers'.

Unusual about its authors' names, besides those in `flux_blocks_names`: in blocks of one stream q, k and v are rows of
one tensor, and the feed-forward's rows, four times as many, follow.
"""

from __future__ import annotations

from collections.abc import Mapping

from qwenimg.common.networks.denoisers import flux_blocks_names, flux_dit
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.layout import QKV, Layers, Layout, Layouts, StoredShapes, place_of
from qwenimg.common.weights.keys import Place, Rows

_ENDS: Layers = {
    **flux_blocks_names.ENDS,
    **{
        f"time_text_embed.{ours}_embedder.linear_{i}": f"{theirs}_in.{layer}"
        for ours, theirs in (("timestep", "time"), ("guidance", "guidance"), ("text", "vector"))
        for i, layer in ((1, "in_layer"), (2, "out_layer"))
    },
}
_DOUBLE: Layers = {
    **flux_blocks_names.DOUBLE,
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
_SINGLE: Layers = {
    **flux_blocks_names.SINGLE,
    **{f"attn.to_{x}": Place("linear1", Rows(i, i + 1, 7)) for i, x in QKV},
    "proj_mlp": Place("linear1", Rows(3, 7, 7)),
    "norm.linear": "modulation.lin",
    "proj_out": "linear2",
}


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


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    return flux_blocks_names.place(name, _ENDS, _DOUBLE, _SINGLE)


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


def _config(stored: StoredShapes, like: FluxConfig) -> FluxConfig:
    """Return the configuration for stored shapes; the axes of RoPE are taken from `like`."""
    return stored.config(
        like,
        **flux_blocks_names.sizes(stored),
        out_channels=stored.shape("proj_out.weight", 2)[0],
        pooled_projection_dim=stored.shape("time_text_embed.text_embedder.linear_1.weight", 2)[1],
        guidance_embeds="time_text_embed.guidance_embedder.linear_1.weight" in stored,
    )


LAYOUTS = Layouts(
    network=flux_dit.NETWORK,
    title="Flux.1",
    rows=(
        Layout(
            names="its authors' names",
            signs=("single_blocks.0.modulation.lin.weight", "vector_in.in_layer.weight"),
            place=lambda name, config: place(name),
        ),
        Layout(
            names="diffusers' names",
            signs=(
                "single_transformer_blocks.0.norm.linear.weight",
                "time_text_embed.text_embedder.linear_1.weight",
            ),
        ),
    ),
    config=_config,
    in_loras=_xlabs,
)
