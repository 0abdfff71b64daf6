"""Flux.2's transformer in one file, with its authors' names or diffusers': configuration, and place of each parameter.

Unusual about its authors' names:
- in blocks of two streams q, k and v are rows of one tensor; in blocks of one stream every layer is one tensor in
  diffusers' names too;
- the final layer's modulation has shift before scale: the halves are swapped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.networks.denoisers import flux2_dit
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.parts.authors_names import TransformerFile, count_blocks
from qwenimg.common.parts.ldm_configs import Shapes, shape_of
from qwenimg.common.weights.keys import Place, Rows

_ENDS = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
    **{
        f"time_guidance_embed.{ours}_embedder.linear_{i}": f"{theirs}_in.{layer}"
        for ours, theirs in (("timestep", "time"), ("guidance", "guidance"))
        for i, layer in ((1, "in_layer"), (2, "out_layer"))
    },
    **{
        f"{name}.linear": f"{name}.lin"
        for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    },
}
_DOUBLE = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
}
_SINGLE = {
    "attn.to_qkv_mlp_proj": "linear1",
    "attn.to_out": "linear2",
    "attn.norm_q": "norm.query_norm",
    "attn.norm_k": "norm.key_norm",
}
_BLOCK = re.compile(r"(?P<single>single_)?transformer_blocks\.(?P<index>\d+)\.(?P<part>.+)\.weight")
_FUSED = re.compile(r"attn\.(?:to_(?P<image>[qkv])|add_(?P<text>[qkv])_proj)")


def _config(path: Path, shapes: Shapes, like: Flux2Config, called: Callable[[str], str]) -> Flux2Config:
    """Return the configuration of the transformer with these `shapes`, whose names `called` makes of diffusers'; the
    axes of positions are those of `like`. Raises ModelError."""

    def shape(name: str, rank: int) -> tuple[int, ...]:
        return shape_of(path, shapes, called(f"{name}.weight"), rank)

    width, channels = shape("x_embedder", 2)
    [head_dim] = shape("transformer_blocks.0.attn.norm_q", 1)
    data: dict[str, Any] = asdict(like) | {
        "in_channels": channels,
        "out_channels": None,
        "num_layers": count_blocks(shapes, "double_blocks.", "transformer_blocks."),
        "num_single_layers": count_blocks(shapes, "single_blocks.", "single_transformer_blocks."),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // max(1, head_dim),
        "joint_attention_dim": shape("context_embedder", 2)[1],
        "timestep_guidance_channels": shape("time_guidance_embed.timestep_embedder.linear_1", 2)[1],
        "mlp_ratio": shape("transformer_blocks.0.ff.linear_out", 2)[1] / max(1, width),
        "guidance_embeds": called("time_guidance_embed.guidance_embedder.linear_1.weight") in shapes,
    }
    return parse(Flux2Config, data, source=path)


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        owner = name.removesuffix(".weight")
        return Place(f"{_ENDS[owner]}.weight", decode="swapped" if owner == "norm_out.linear" else None)
    start = f"{'single' if block['single'] else 'double'}_blocks.{block['index']}"
    if not block["single"] and (fused := _FUSED.fullmatch(block["part"])):
        third = "qkv".index(fused["image"] or fused["text"])
        return Place(f"{start}.{'img' if fused['image'] else 'txt'}_attn.qkv.weight", Rows(third, third + 1, 3))
    theirs = (_SINGLE if block["single"] else _DOUBLE)[block["part"]]
    return Place(f"{start}.{theirs}.{'scale' if theirs.endswith('_norm') else 'weight'}")


FILE = TransformerFile(
    network=flux2_dit.NETWORK,
    title="FLUX.2",
    sign="single_stream_modulation.lin.weight",
    diffusers_sign="single_stream_modulation.linear.weight",
    place=place,
    config=_config,
)
