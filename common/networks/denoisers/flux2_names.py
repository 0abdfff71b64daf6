"""Flux.2's transformer in files: its authors' names, and diffusers'.

Unusual about its authors' names, besides those in `flux_blocks_names`: in blocks of one stream every layer is one
tensor in diffusers' names too, and all blocks have the same modulation."""

from __future__ import annotations

from qwenimg.common.networks.denoisers import flux2_dit, flux_blocks_names
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.layout import Layers, Layout, Layouts, StoredShapes
from qwenimg.common.weights.keys import Place

_ENDS: Layers = {
    **flux_blocks_names.ENDS,
    **{
        f"time_guidance_embed.{name}_embedder.linear_{i}": f"{theirs}_in.{layer}"
        for name, theirs in (("timestep", "time"), ("guidance", "guidance"))
        for i, layer in ((1, "in_layer"), (2, "out_layer"))
    },
    **{
        f"{name}.linear": f"{name}.lin"
        for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    },
}
_DOUBLE: Layers = {
    **flux_blocks_names.DOUBLE,
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
_SINGLE: Layers = {**flux_blocks_names.SINGLE, "attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    return flux_blocks_names.place(name, _ENDS, _DOUBLE, _SINGLE)


def _config(stored: StoredShapes, like: Flux2Config) -> Flux2Config:
    """Return the configuration for stored shapes; the axes of RoPE are taken from `like`."""
    hidden = stored.shape("transformer_blocks.0.ff.linear_out.weight", 2)[1]
    return stored.config(
        like,
        **flux_blocks_names.sizes(stored),
        out_channels=None,
        timestep_guidance_channels=stored.shape("time_guidance_embed.timestep_embedder.linear_1.weight", 2)[1],
        mlp_ratio=hidden / max(1, stored.shape("x_embedder.weight", 2)[0]),
        guidance_embeds="time_guidance_embed.guidance_embedder.linear_1.weight" in stored,
    )


LAYOUTS = Layouts(
    network=flux2_dit.NETWORK,
    title="FLUX.2",
    rows=(
        Layout(
            names="its authors' names",
            signs=("single_stream_modulation.lin.weight",),
            place=lambda name, config: place(name),
        ),
        Layout(names="diffusers' names", signs=("single_stream_modulation.linear.weight",)),
    ),
    config=_config,
)
