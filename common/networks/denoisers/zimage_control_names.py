"""Control networks of Z-Image in files. All programs have their authors' names, which are diffusers' too."""

from __future__ import annotations

from dataclasses import replace

from qwenimg.common.networks.denoisers import zimage_control
from qwenimg.common.networks.denoisers.zimage_control import ZImageControlConfig
from qwenimg.common.networks.denoisers.zimage_dit import PATCH
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes

CHANGES = "control_noise_refiner.0.after_proj.bias"  # of refiner blocks that change the transformer's stream


def _config(stored: StoredShapes, like: ZImageControlConfig, refining: str | None = None) -> ZImageControlConfig:
    """Return the configuration for stored shapes. Its layers are spread over the blocks of the transformer, which
    `like` has as its places. refining: the blocks that change the refiner blocks, if they are not its own."""
    [dim] = stored.shape("control_layers.0.attention_norm1.weight", 1)
    [head_dim] = stored.shape("control_layers.0.attention.norm_q.weight", 1)
    layers = len(stored.blocks("control_layers.0.attention_norm1.weight"))
    blocks = like.control_layers_places
    heads = dim // max(1, head_dim)
    return stored.config(
        like,
        control_layers_places=blocks[:: max(1, round(len(blocks) / max(1, layers)))][:layers],
        control_in_dim=stored.shape("control_x_embedder.weight", 2)[1] // PATCH**2,
        add_control_noise_refiner=refining or ("control_noise_refiner" if CHANGES in stored else None),
        dim=dim,
        n_heads=heads,
        n_kv_heads=heads,
    )


def untrained() -> Layouts:
    """Return the layouts of files of version 2.0, whose own refiner blocks were never trained."""
    return replace(
        LAYOUTS,
        ignored=("control_noise_refiner.",),
        config=lambda stored, like: _config(stored, like, "control_layers"),
    )


LAYOUTS = Layouts(
    network=zimage_control.NETWORK,
    title="Z-Image",
    expected="control network of Z-Image",
    rows=(
        Layout(
            names="diffusers' names",
            signs=(f"{zimage_control.EMBEDDER}weight", "control_layers.0.after_proj.weight"),
        ),
    ),
    config=_config,
    foreign={
        "controlnet_x_embedder.weight": "a ControlNet of Qwen-Image or FLUX.1",
        "controlnet_blocks.0.y_rms.weight": "a file of control patches for Qwen-Image",
        "controlnet_mid_block.weight": "a ControlNet of Stable Diffusion",
        "control_model.middle_block_out.0.weight": "a ControlNet of Stable Diffusion",
        "middle_block_out.0.weight": "a ControlNet of Stable Diffusion",
        "pos_embed_input.proj.weight": "a ControlNet of Stable Diffusion 3",
    },
)
