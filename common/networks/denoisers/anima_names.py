"""Anima's transformer in files: its authors' names, which ComfyUI and GGUF files have too, and diffusers'.

Unusual about its authors' files: the network that makes text of token ids and states is in them too, under a name of
its own (`anima_conditioner_names`)."""

from __future__ import annotations

from dataclasses import asdict

from qwenimg.common.base.config import parse
from qwenimg.common.networks.denoisers import anima_dit
from qwenimg.common.networks.denoisers.anima_dit import PATCH, AnimaConfig
from qwenimg.common.networks.encoders.anima_conditioner import INSIDE
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.weights.keys import Place

STARTS = {
    "patch_embed.proj.": "x_embedder.proj.1.",
    "time_embed.t_embedder.": "t_embedder.1.",
    "time_embed.norm.": "t_embedding_norm.",
    "transformer_blocks.": "blocks.",
    "norm_out.linear_": "final_layer.adaln_modulation.",
    "proj_out.": "final_layer.linear.",
}
"""The authors' starts of names, by those of diffusers."""
PARTS = {
    ".norm1.linear_": ".adaln_modulation_self_attn.",
    ".norm2.linear_": ".adaln_modulation_cross_attn.",
    ".norm3.linear_": ".adaln_modulation_mlp.",
    ".attn1.": ".self_attn.",
    ".attn2.": ".cross_attn.",
    ".to_q.": ".q_proj.",
    ".to_k.": ".k_proj.",
    ".to_v.": ".v_proj.",
    ".to_out.0.": ".output_proj.",
    ".norm_q.": ".q_norm.",
    ".norm_k.": ".k_norm.",
    ".ff.net.0.proj.": ".mlp.layer1.",
    ".ff.net.2.": ".mlp.layer2.",
}
"""The authors' parts of names within a block, by those of diffusers."""
SIGN = "blocks.0.adaln_modulation_self_attn.1.weight"


def authors_name(name: str) -> str:
    """Return the authors' name of a parameter."""
    ours = next(start for start in STARTS if name.startswith(start))
    name = STARTS[ours] + name.removeprefix(ours)
    for part, theirs in PARTS.items():
        name = name.replace(part, theirs)
    return name


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key, in diffusers' names or its authors'; None for the text's network."""
    ours = next((ours for ours, theirs in STARTS.items() if key.startswith(theirs)), "")
    key = ours + key.removeprefix(STARTS[ours]) if ours else key
    for part, theirs in PARTS.items():
        key = key.replace(theirs, part)
    return None if key.startswith(INSIDE) else key


def _config(stored: StoredShapes, like: AnimaConfig) -> AnimaConfig:
    """Return the configuration for stored shapes, of vectors and rows, since the columns of matrices may be packed; the
    width of text and the scales of RoPE are taken from `like`."""
    block = "transformer_blocks.0"
    [dim], [head_dim] = stored.shape("time_embed.norm.weight", 1), stored.shape(f"{block}.attn1.norm_q.weight", 1)
    channels = stored.shape("proj_out.weight", 2)[0] // PATCH**2
    data = asdict(like) | {
        "in_channels": channels,
        "out_channels": channels,
        "num_attention_heads": dim // max(1, head_dim),
        "attention_head_dim": head_dim,
        "num_layers": len(stored.blocks(f"{block}.attn1.norm_q.weight")),
        "mlp_ratio": stored.shape(f"{block}.ff.net.0.proj.weight", 2)[0] / max(1, dim),
        "adaln_lora_dim": stored.shape(f"{block}.norm1.linear_1.weight", 2)[0],
    }
    return parse(AnimaConfig, data, source=stored.path)


LAYOUTS = Layouts(
    network=anima_dit.NETWORK,
    title="Anima",
    rows=(
        Layout(
            names="its authors' names, as ComfyUI has it",
            signs=("x_embedder.proj.1.weight", SIGN),
            place=lambda name, config: Place(authors_name(name)),
        ),
        Layout(names="diffusers' names", signs=("patch_embed.proj.weight", "time_embed.t_embedder.linear_1.weight")),
    ),
    config=_config,
    ignored=(INSIDE, "pos_embedder.", "accum_"),  # the text's network, positions, counts of the training
)
