"""Qwen-Image's transformer in files: diffusers' names, which llama.cpp's GGUF files have too, and mflux's."""

from __future__ import annotations

from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import ADDITION, QwenDiTConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes

_NORM = "transformer_blocks.0.attn.norm_q.weight"


def _config(stored: StoredShapes, like: QwenDiTConfig) -> QwenDiTConfig:
    """Return the configuration for stored shapes of vectors only, since matrices may be packed; the axes of RoPE are
    taken from `like`."""
    [dim], [features] = stored.shape("img_in.bias", 1), stored.shape("proj_out.bias", 1)
    [head_dim], [text] = stored.shape(_NORM, 1), stored.shape("txt_norm.weight", 1)
    return stored.config(
        like,
        in_channels=features,
        out_channels=features // like.patch_size**2,
        num_layers=len(stored.blocks(_NORM)),
        attention_head_dim=head_dim,
        num_attention_heads=dim // max(1, head_dim),
        joint_attention_dim=text,
        use_additional_t_cond=like.use_additional_t_cond or ADDITION in stored,
    )


LAYOUTS = Layouts(
    network=qwen_dit.NETWORK,
    title="Qwen-Image",
    rows=(
        Layout(names="diffusers' names", signs=("transformer_blocks.0.img_mod.1.weight",)),
        Layout(names="mflux's names", signs=("transformer_blocks.0.img_mod_linear.weight",)),
    ),
    config=_config,
)
