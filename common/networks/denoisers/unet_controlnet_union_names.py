"""ControlNet Unions in files: diffusers' names, which are those of their authors too."""

from __future__ import annotations

from dataclasses import replace

from qwenimg.common.networks.denoisers import unet_controlnet_names, unet_controlnet_union
from qwenimg.common.networks.denoisers.unet_controlnet_union import UNetControlNetUnionConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes


def _config(shapes: StoredShapes, like: UNetControlNetUnionConfig) -> UNetControlNetUnionConfig:
    """Return the configuration of a Union for the UNet of `like`: what a ControlNet's file shows, and its kinds and
    layers."""
    kinds = shapes.shape("task_embedding.weight", 2)[0]
    layers = len(shapes.blocks("transformer_layes.0.ln_1.weight"))
    return unet_controlnet_names.config_of(shapes, replace(like, num_control_type=kinds, num_trans_layer=layers))


LAYOUTS = Layouts(
    network=unet_controlnet_union.NETWORK,
    title="SDXL",
    config=_config,
    expected="ControlNet Union of SDXL",
    rows=(Layout(names="diffusers' names", signs=("task_embedding", "control_add_embedding.linear_1.weight")),),
)
