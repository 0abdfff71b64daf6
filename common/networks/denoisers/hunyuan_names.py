"""Hunyuan-DiT's transformer in files: its authors' names, which ComfyUI has too, and diffusers'.

Unusual about its authors' names: q, k and v of the attention to the image are rows of one tensor, k and v of that to
the text of another; the second norm of a block is the third of diffusers, and the third the second; the last
modulation has shift before scale."""

from __future__ import annotations

import re
from typing import Any

from qwenimg.common.networks.denoisers import hunyuan_dit
from qwenimg.common.networks.denoisers.hunyuan_dit import EMB, PADDING, PLACES, HunyuanConfig
from qwenimg.common.networks.layout import QKV, Layers, Layout, Layouts, StoredShapes, place_of
from qwenimg.common.weights.keys import Place, Rows

STYLE = "style_embedder.weight"
_ENDS = {
    "pos_embed.proj": "x_embedder.proj",
    "text_embedder.linear_1": "mlp_t5.0",
    "text_embedder.linear_2": "mlp_t5.2",
    f"{EMB}.timestep_embedder.linear_1": "t_embedder.mlp.0",
    f"{EMB}.timestep_embedder.linear_2": "t_embedder.mlp.2",
    f"{EMB}.extra_embedder.linear_1": "extra_embedder.0",
    f"{EMB}.extra_embedder.linear_2": "extra_embedder.2",
    f"{EMB}.style_embedder": "style_embedder",
    **{f"{EMB}.pooler.{x}_proj": f"pooler.{x}_proj" for x in ("q", "k", "v", "c")},
    "proj_out": "final_layer.linear",
}
_TABLES = {f"{PADDING}.weight": PADDING, f"{EMB}.pooler.{PLACES}.weight": f"pooler.{PLACES}"}
_IN_BLOCK: Layers = {
    "norm1.norm": "norm1",
    "norm1.linear": "default_modulation.1",
    "norm2": "norm3",
    "norm3": "norm2",
    "skip_norm": "skip_norm",
    "skip_linear": "skip_linear",
    **{f"attn1.to_{x}": Place("attn1.Wqkv", Rows(i, i + 1, 3)) for i, x in QKV},
    "attn2.to_q": "attn2.q_proj",
    "attn2.to_k": Place("attn2.kv_proj", Rows(0, 1, 2)),
    "attn2.to_v": Place("attn2.kv_proj", Rows(1, 2, 2)),
    **{f"attn{i}.norm_{x}": f"attn{i}.{x}_norm" for i in (1, 2) for x in ("q", "k")},
    **{f"attn{i}.to_out.0": f"attn{i}.out_proj" for i in (1, 2)},
    "ff.net.0.proj": "mlp.fc1",
    "ff.net.2": "mlp.fc2",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    if block := _BLOCK.fullmatch(name):
        layer, part, leaf = block.groups()
        there = place_of(_IN_BLOCK, part)
        return there._replace(key=f"blocks.{layer}.{there.key}.{leaf}")
    if name in _TABLES:
        return Place(_TABLES[name])
    owner, _, leaf = name.rpartition(".")
    if owner == "norm_out.linear":
        return Place(f"final_layer.adaLN_modulation.1.{leaf}", decode="swapped")
    return Place(f"{_ENDS[owner]}.{leaf}")


def _config(stored: StoredShapes, like: HunyuanConfig) -> HunyuanConfig:
    """Return the configuration for stored shapes; the lengths of texts are those of `like` where their sum is."""
    [width] = stored.shape("pos_embed.proj.bias", 1)
    [head] = stored.shape("blocks.0.attn1.norm_q.weight", 1)
    places, text = stored.shape(f"{PADDING}.weight", 2)
    pooled, t5 = stored.shape(f"{EMB}.pooler.{PLACES}.weight", 2)
    inner = stored.shape("blocks.0.ff.net.0.proj.bias", 1)[0]
    data: dict[str, Any] = {
        "num_attention_heads": width // max(1, head),
        "attention_head_dim": head,
        "in_channels": stored.shape("pos_embed.proj.weight", 4)[1],
        "num_layers": len(stored.blocks("blocks.0.norm1.linear.bias")),
        "hidden_size": width,
        "cross_attention_dim": text,
        "cross_attention_dim_t5": t5,
        "pooled_projection_dim": stored.shape(f"{EMB}.pooler.c_proj.bias", 1)[0],
        "text_len": places - pooled + 1,
        "text_len_t5": pooled - 1,
        "use_style_cond_and_image_meta_size": f"{EMB}.style_embedder.weight" in stored,
    }
    if int(width * like.mlp_ratio) != inner:
        data["mlp_ratio"] = (inner + 0.5) / width
    return stored.config(like, **data)


LAYOUTS = Layouts(
    network=hunyuan_dit.NETWORK,
    title="Hunyuan-DiT",
    rows=(
        Layout(
            names="its authors' names, as ComfyUI has it",
            signs=("mlp_t5.0.weight", "blocks.0.attn1.Wqkv.weight"),
            lacks=("after_proj_list.0.weight",),
            place=lambda name, config: place(name),
        ),
        Layout(
            names="diffusers' names",
            signs=("blocks.0.norm1.linear.weight", "text_embedder.linear_1.weight"),
            lacks=("controlnet_blocks.0.weight",),
        ),
    ),
    config=_config,
    foreign={
        "after_proj_list.0.weight": "a ControlNet of Hunyuan-DiT, which this version does not draw with",
        "controlnet_blocks.0.weight": "a ControlNet of Hunyuan-DiT, which this version does not draw with",
    },
)
