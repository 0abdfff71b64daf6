"""Anima's transformer in files: its authors' names, which ComfyUI and GGUF files have too, and diffusers'.

Unusual about its authors' files: the network that makes text of token ids and states is in them too, under a name of
its own (`anima_conditioner_names`)."""

from __future__ import annotations

from qwenimg.common.networks.denoisers import anima_dit
from qwenimg.common.networks.denoisers.anima_dit import PATCH, AnimaConfig, authors_name
from qwenimg.common.networks.encoders.anima_conditioner import INSIDE
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.weights.keys import Place


def _config(stored: StoredShapes, like: AnimaConfig) -> AnimaConfig:
    """Return the configuration for stored shapes, of vectors and rows, since the columns of matrices may be packed; the
    width of text and the scales of RoPE are taken from `like`."""
    block = "transformer_blocks.0"
    [dim], [head_dim] = stored.shape("time_embed.norm.weight", 1), stored.shape(f"{block}.attn1.norm_q.weight", 1)
    channels = stored.shape("proj_out.weight", 2)[0] // PATCH**2
    return stored.config(
        like,
        in_channels=channels,
        out_channels=channels,
        num_attention_heads=dim // max(1, head_dim),
        attention_head_dim=head_dim,
        num_layers=len(stored.blocks(f"{block}.attn1.norm_q.weight")),
        mlp_ratio=stored.shape(f"{block}.ff.net.0.proj.weight", 2)[0] / max(1, dim),
        adaln_lora_dim=stored.shape(f"{block}.norm1.linear_1.weight", 2)[0],
    )


LAYOUTS = Layouts(
    network=anima_dit.NETWORK,
    title="Anima",
    rows=(
        Layout(
            names="its authors' names, as ComfyUI has it",
            signs=("x_embedder.proj.1.weight", "blocks.0.adaln_modulation_self_attn.1.weight"),
            place=lambda name, config: Place(authors_name(name)),
        ),
        Layout(names="diffusers' names", signs=("patch_embed.proj.weight", "time_embed.t_embedder.linear_1.weight")),
    ),
    config=_config,
    ignored=(INSIDE, "pos_embedder.", "accum_"),  # the text's network, positions, counts of the training
)
