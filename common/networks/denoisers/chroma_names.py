"""Chroma's transformer in files: its authors' names, which are Flux.1's, and diffusers'."""

from __future__ import annotations

from qwenimg.common.networks.denoisers import chroma_dit, flux_blocks_names, flux_names
from qwenimg.common.networks.denoisers.chroma_dit import APPROXIMATOR, ChromaConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.weights.keys import Place

_LEAVES = {"linear_1": "in_layer", "linear_2": "out_layer"}


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    if not name.startswith(APPROXIMATOR):
        return flux_names.place(name)
    parts = [_LEAVES.get(part, part) for part in name.split(".")]
    return Place(".".join([*parts[:-1], "scale"] if "norms" in parts else parts))


def _config(stored: StoredShapes, like: ChromaConfig) -> ChromaConfig:
    """Return the configuration for stored shapes; the axes of RoPE are taken from `like`."""
    return stored.config(
        like,
        **flux_blocks_names.sizes(stored),
        out_channels=stored.shape("proj_out.weight", 2)[0],
        approximator_num_channels=stored.shape(f"{APPROXIMATOR}in_proj.weight", 2)[1],
        approximator_hidden_dim=stored.shape(f"{APPROXIMATOR}norms.0.weight", 1)[0],
        approximator_layers=len(stored.blocks(f"{APPROXIMATOR}norms.0.weight")),
    )


_SIGN = f"{APPROXIMATOR}in_proj.weight"
LAYOUTS = Layouts(
    network=chroma_dit.NETWORK,
    title="Chroma",
    rows=(
        Layout(
            names="its authors' names",
            signs=(_SIGN, "single_blocks.0.linear1.weight"),
            place=lambda name, config: place(name),
        ),
        Layout(names="diffusers' names", signs=(_SIGN, "single_transformer_blocks.0.proj_mlp.weight")),
    ),
    config=_config,
    foreign={"nerf_image_embedder.embedder.0.weight": "Chroma1-Radiance, which draws pixels without a VAE"},
)
