"""ControlNets of Flux.1 in files: diffusers' names, which are those of their authors and of ComfyUI too."""

from __future__ import annotations

from qwenimg.common.networks.denoisers import flux_blocks_names, flux_controlnet
from qwenimg.common.networks.denoisers.flux_controlnet import FluxControlNetConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes

MODES = "controlnet_mode_embedder.weight"


def _config(stored: StoredShapes, like: FluxControlNetConfig) -> FluxControlNetConfig:
    """Return the configuration for stored shapes; the axes of RoPE are taken from `like`."""
    return stored.config(
        like,
        **flux_blocks_names.sizes(stored),
        pooled_projection_dim=stored.shape("time_text_embed.text_embedder.linear_1.weight", 2)[1],
        guidance_embeds="time_text_embed.guidance_embedder.linear_1.weight" in stored,
        num_mode=stored.shape(MODES, 2)[0] if MODES in stored else None,
    )


LAYOUTS = Layouts(
    network=flux_controlnet.NETWORK,
    title="FLUX.1",
    expected="ControlNet of FLUX.1",
    rows=(
        Layout(
            names="diffusers' names",
            signs=("controlnet_x_embedder.weight", "time_text_embed.text_embedder.linear_1.weight"),
        ),
    ),
    config=_config,
    foreign={
        "input_hint_block.0.weight": f"a ControlNet of XLabs: {flux_controlnet.XLABS}",
        "input_hint_block.conv_in.weight": f"a ControlNet of XLabs: {flux_controlnet.XLABS}",
        "controlnet_blocks.0.y_rms.weight": "a file of control patches for Qwen-Image",
        "txt_norm.weight": "a ControlNet of Qwen-Image",
        "controlnet_mid_block.weight": "a ControlNet of Stable Diffusion",
        "control_model.middle_block_out.0.weight": "a ControlNet of Stable Diffusion",
        "middle_block_out.0.weight": "a ControlNet of Stable Diffusion",
        "pos_embed_input.proj.weight": "a ControlNet of Stable Diffusion 3",
        "control_layers.0.after_proj.weight": "a control network of Z-Image",
    },
)
