"""SANA's transformer in files: its authors' names and diffusers'.

Unusual about its authors' names: q, k and v to the image are rows of one tensor, k and v to the text of another; the
table of positions, which is computed here, is in the file and shows for which size of images it was trained.
"""

from __future__ import annotations

from math import isqrt

from qwenimg.common.networks.denoisers import sana_dit
from qwenimg.common.networks.denoisers.sana_dit import QK_NORM, TABLE, SanaConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes, with_start
from qwenimg.common.weights.keys import Place, Rows

_STARTS = {
    "patch_embed.proj.": "x_embedder.proj.",
    "caption_projection.linear_1.": "y_embedder.y_proj.fc1.",
    "caption_projection.linear_2.": "y_embedder.y_proj.fc2.",
    "caption_norm.": "attention_y_norm.",
    "time_embed.emb.timestep_embedder.linear_1.": "t_embedder.mlp.0.",
    "time_embed.emb.timestep_embedder.linear_2.": "t_embedder.mlp.2.",
    "time_embed.timestep_embedder.linear_1.": "t_embedder.mlp.0.",
    "time_embed.timestep_embedder.linear_2.": "t_embedder.mlp.2.",
    "time_embed.guidance_embedder.linear_1.": "cfg_embedder.mlp.0.",
    "time_embed.guidance_embedder.linear_2.": "cfg_embedder.mlp.2.",
    "time_embed.linear.": "t_block.1.",
    "transformer_blocks.": "blocks.",
    "proj_out.": "final_layer.linear.",
    f"{TABLE}.weight": f"final_layer.{TABLE}",
}
"""Starts of names, and what the authors have in their place."""
_PARTS = {
    f".{TABLE}.weight": f".{TABLE}",
    ".attn1.norm_": ".attn.{}_norm",
    ".attn2.norm_": ".cross_attn.{}_norm",
    ".attn1.to_out.0.": ".attn.proj.",
    ".attn2.to_out.0.": ".cross_attn.proj.",
    ".attn2.to_q.": ".cross_attn.q_linear.",
    ".ff.conv_inverted.": ".mlp.inverted_conv.conv.",
    ".ff.conv_depth.": ".mlp.depth_conv.conv.",
    ".ff.conv_point.": ".mlp.point_conv.conv.",
}
_ROWS = {
    ".attn1.to_q.": (".attn.qkv.", Rows(0, 1, 3)),
    ".attn1.to_k.": (".attn.qkv.", Rows(1, 2, 3)),
    ".attn1.to_v.": (".attn.qkv.", Rows(2, 3, 3)),
    ".attn2.to_k.": (".cross_attn.kv_linear.", Rows(0, 1, 2)),
    ".attn2.to_v.": (".cross_attn.kv_linear.", Rows(1, 2, 2)),
}
_HEADS = {1152: 16}  # heads in the attention to the text of the 0.6B, by its width
_SCALES = {64: 1.0, 128: 2.0}  # of positions, by the side in tokens that a model was trained for; others have none


def place(name: str, config: SanaConfig) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    name = with_start(name, _STARTS)
    for ours, (theirs, rows) in _ROWS.items():
        if ours in name:
            return Place(name.replace(ours, theirs), rows)
    for ours, theirs in _PARTS.items():
        if ours in name:
            before, _, after = name.partition(ours)
            return Place(before + theirs.format(after[:1]) + (after[1:] if "{}" in theirs else after))
    return Place(name)


def _config(stored: StoredShapes, like: SanaConfig) -> SanaConfig:
    """Return the configuration for stored shapes, of vectors and rows, since the columns of matrices may be packed; the
    width of heads, and for which size of images it is if no table shows it, are taken from `like`."""
    block = "transformer_blocks.0"
    [dim] = stored.shape("patch_embed.proj.bias", 1)
    [channels] = stored.shape("proj_out.bias", 1)
    hidden = stored.shape(f"{block}.ff.conv_depth.weight", 4)[0] // 2
    guided = "time_embed.guidance_embedder.linear_1.bias" in stored
    text = stored.shapes.get("y_embedder.y_embedding", (0, like.caption_channels))[-1]
    usual = SanaConfig().num_cross_attention_heads if dim == SanaConfig().dim else dim // like.attention_head_dim
    heads = like.num_cross_attention_heads if dim == like.dim else _HEADS.get(dim, usual)
    positions = stored.shapes.get("pos_embed")
    side = like.sample_size if positions is None or len(positions) != 3 else isqrt(positions[1])
    return stored.config(
        like,
        in_channels=channels,
        out_channels=channels,
        num_attention_heads=dim // like.attention_head_dim,
        num_layers=len(stored.blocks(f"{block}.attn1.to_out.0.bias")),
        num_cross_attention_heads=heads,
        cross_attention_head_dim=dim // heads,
        cross_attention_dim=dim,
        caption_channels=text,
        mlp_ratio=hidden / max(1, dim),
        guidance_embeds=guided,
        qk_norm=QK_NORM if f"{block}.attn1.norm_q.weight" in stored else None,
        sample_size=side,
        interpolation_scale=like.interpolation_scale if positions is None else _SCALES.get(side),
    )


LAYOUTS = Layouts(
    network=sana_dit.NETWORK,
    title="SANA",
    rows=(
        Layout(
            names="its authors' names",
            signs=("blocks.0.cross_attn.kv_linear.weight", "blocks.0.mlp.depth_conv.conv.weight"),
            lacks=("blocks.0.mlp.t_conv.weight",),  # of SANA-Video
            place=place,
        ),
        Layout(
            names="diffusers' names",
            signs=("transformer_blocks.0.ff.conv_depth.weight", "caption_norm.weight"),
            lacks=("transformer_blocks.0.ff.conv_temp.weight",),
        ),
    ),
    config=_config,
    ignored=("pos_embed", "y_embedder.y_embedding", "logvar_linear."),  # computed here, or of the training
)
