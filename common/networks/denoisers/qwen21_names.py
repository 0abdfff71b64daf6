"""Qwen-Image-2.1's transformer in files: diffusers' names, and ComfyUI's.

Unusual about ComfyUI's files: the feed-forward's two layers of the same input are rows of one tensor, the gate's first.
"""

from __future__ import annotations

from qwenimg.common.networks.denoisers import qwen21_dit
from qwenimg.common.networks.denoisers.qwen21_dit import Qwen21Config
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.weights.keys import Place, Rows

_SIGN = "txt_in.text_norm.weight"
_HALVES = {".img_mlp.gate_layer.weight": 0, ".img_mlp.proj.weight": 1}


def place(name: str) -> Place:
    """Return the place of a parameter in a file whose feed-forward is fused."""
    for end, half in _HALVES.items():
        if name.endswith(end):
            return Place(name.replace(end, ".img_mlp.gate_up.weight"), Rows(half, half + 1, 2))
    return Place(name)


def _config(stored: StoredShapes, like: Qwen21Config) -> Qwen21Config:
    """Return the configuration for stored shapes; the axes of RoPE are taken from `like`."""
    width, channels = stored.shape("img_in.weight", 2)
    [head_dim] = stored.shape("transformer_blocks.0.attn.norm_q.weight", 1)
    return stored.config(
        like,
        in_channels=channels,
        out_channels=channels,
        num_layers=len(stored.blocks("transformer_blocks.0.attn.norm_q.weight")),
        attention_head_dim=head_dim,
        num_attention_heads=width // max(1, head_dim),
        context_in_dim=stored.shape(_SIGN, 1)[0],
        mlp_ratio=stored.shape("transformer_blocks.0.img_mlp.out.weight", 2)[1] // max(1, width),
    )


LAYOUTS = Layouts(
    network=qwen21_dit.NETWORK,
    title="Qwen-Image-2.1",
    expected="transformer of Qwen-Image-2.1, by diffusers' names or ComfyUI's",
    rows=(
        Layout(
            names="its feed-forward fused, as ComfyUI has it",
            signs=("transformer_blocks.0.img_mlp.gate_up.weight",),
            place=lambda name, config: place(name),
        ),
        Layout(names="diffusers' names", signs=(_SIGN,)),
    ),
    config=_config,
)
