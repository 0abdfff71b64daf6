"""AuraFlow's transformer in files: its authors' names, which ComfyUI, GGUF files and Pony v7 have, and diffusers'.

Unusual about its authors' names: layers for text have a 1 in their names, those for images a 2, and those of blocks of
one stream a 1; the head's modulation has shift before scale: the halves are swapped.
"""

from __future__ import annotations

import re

from qwenimg.common.networks.denoisers import aura_dit
from qwenimg.common.networks.denoisers.aura_dit import PATCH, REGISTER_TOKENS, TABLE, AuraConfig
from qwenimg.common.networks.layout import Layers, Layout, Layouts, StoredShapes, place_of
from qwenimg.common.weights.keys import Place

_ENDS: Layers = {
    "pos_embed.proj": "init_x_linear",
    "time_step_proj.linear_1": "t_embedder.mlp.0",
    "time_step_proj.linear_2": "t_embedder.mlp.2",
    "context_embedder": "cond_seq_linear",
    "norm_out.linear": Place("modF.1", decode="swapped"),
    "proj_out": "final_linear",
}
_WHOLE = {TABLE: "positional_encoding", REGISTER_TOKENS: "register_tokens"}
_FEED_FORWARD = {"linear_1": "c_fc1", "linear_2": "c_fc2", "out_projection": "c_proj"}
_JOINT: Layers = {
    "norm1.linear": "modX.1",
    "norm1_context.linear": "modC.1",
    **{f"attn.to_{x}": f"attn.w2{x}" for x in "qkv"},
    **{f"attn.add_{x}_proj": f"attn.w1{x}" for x in "qkv"},
    "attn.to_out.0": "attn.w2o",
    "attn.to_add_out": "attn.w1o",
    **{f"ff.{ours}": f"mlpX.{theirs}" for ours, theirs in _FEED_FORWARD.items()},
    **{f"ff_context.{ours}": f"mlpC.{theirs}" for ours, theirs in _FEED_FORWARD.items()},
}
_SINGLE: Layers = {
    "norm1.linear": "modCX.1",
    **{f"attn.to_{x}": f"attn.w1{x}" for x in "qkv"},
    "attn.to_out.0": "attn.w1o",
    **{f"ff.{ours}": f"mlp.{theirs}" for ours, theirs in _FEED_FORWARD.items()},
}
_BLOCK = re.compile(r"(joint|single)_transformer_blocks\.(\d+)\.(.+)")


def place(name: str, config: AuraConfig) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    if name in _WHOLE:
        return Place(_WHOLE[name])
    owner, _, leaf = name.rpartition(".")
    if block := _BLOCK.fullmatch(owner):
        kind, layer, part = block.groups()
        there, start = (_JOINT, "double_layers") if kind == "joint" else (_SINGLE, "single_layers")
        return Place(f"{start}.{layer}.{there[part]}.{leaf}")
    found = place_of(_ENDS, owner)
    return found._replace(key=f"{found.key}.{leaf}")


def _config(stored: StoredShapes, like: AuraConfig) -> AuraConfig:
    """Return the configuration for stored shapes. The width of a head is that of `like`: no tensor shows it."""
    [dim] = stored.shape("pos_embed.proj.bias", 1)
    head_dim = like.attention_head_dim
    return stored.config(
        like,
        in_channels=stored.shape("pos_embed.proj.weight", 2)[1] // PATCH**2,
        out_channels=stored.shape("proj_out.weight", 2)[0] // PATCH**2,
        num_mmdit_layers=len(stored.blocks("joint_transformer_blocks.0.attn.to_q.weight")),
        num_single_dit_layers=len(stored.blocks("single_transformer_blocks.0.attn.to_q.weight")),
        num_attention_heads=dim // head_dim,
        joint_attention_dim=stored.shape("context_embedder.weight", 2)[1],
        caption_projection_dim=dim,
        pos_embed_max_size=stored.shape(TABLE, 3)[1],
    )


LAYOUTS = Layouts(
    network=aura_dit.NETWORK,
    title="AuraFlow",
    rows=(
        Layout(
            names="its authors' names, as ComfyUI has it",
            signs=("double_layers.0.attn.w2q.weight", "cond_seq_linear.weight"),
            place=place,
        ),
        Layout(
            names="diffusers' names",
            signs=("joint_transformer_blocks.0.attn.to_q.weight", "pos_embed.pos_embed", "register_tokens"),
        ),
    ),
    config=_config,
)
