"""LongCat-Image's transformer in files: the names of Flux.1, as ComfyUI and stable-diffusion.cpp have it, and
diffusers'.

Unusual about them: only what is missing tells a file with Flux.1's names from a Flux.1.
"""

from __future__ import annotations

from qwenimg.common.networks.denoisers import flux_blocks_names, flux_names, longcat_dit
from qwenimg.common.networks.denoisers.longcat_dit import LongCatConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes


def _config(stored: StoredShapes, like: LongCatConfig) -> LongCatConfig:
    """Return the configuration for stored shapes; the axes of RoPE are taken from `like`."""
    return stored.config(like, **flux_blocks_names.sizes(stored))


LAYOUTS = Layouts(
    network=longcat_dit.NETWORK,
    title="LongCat-Image",
    rows=(
        Layout(
            names="Flux.1's names, as ComfyUI has it",
            signs=("single_blocks.0.modulation.lin.weight", "time_in.in_layer.weight"),
            lacks=("vector_in.in_layer.weight", "double_blocks.0.img_mlp.up_proj.weight"),
            place=lambda name, config: flux_names.place(name),
        ),
        Layout(
            names="diffusers' names",
            signs=("single_transformer_blocks.0.norm.linear.weight", "time_embed.timestep_embedder.linear_1.weight"),
        ),
    ),
    config=_config,
)
