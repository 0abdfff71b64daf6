"""Krea 2's transformer in files: its authors' names, which ComfyUI and GGUF files have, and diffusers'.

Unusual about its authors' names: the table of a block is one vector there; the gain of a norm is its `scale`."""

from __future__ import annotations

from qwenimg.common.networks.denoisers import krea2_dit
from qwenimg.common.networks.denoisers.krea2_dit import Krea2Config
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.weights.keys import Place


def _config(stored: StoredShapes, like: Krea2Config) -> Krea2Config:
    """Return the configuration for stored shapes, of vectors and rows, since the columns of matrices may be packed; the
    axes of RoPE and the widths of inputs are taken from `like`."""
    block, fusion = "transformer_blocks.0", "text_fusion.layerwise_blocks.0"
    [dim] = stored.shape(f"{block}.norm1.weight", 1)
    [head_dim] = stored.shape(f"{block}.attn.norm_q.weight", 1)
    [text] = stored.shape("txt_in.norm.weight", 1)
    [text_head_dim] = stored.shape(f"{fusion}.attn.norm_q.weight", 1)
    keys, text_keys = (stored.shape(f"{one}.attn.to_k.weight", 2)[0] for one in (block, fusion))
    return stored.config(
        like,
        in_channels=stored.shape("final_layer.linear.bias", 1)[0],
        num_layers=len(stored.blocks(f"{block}.norm1.weight")),
        attention_head_dim=head_dim,
        num_attention_heads=dim // max(1, head_dim),
        num_key_value_heads=keys // max(1, head_dim),
        intermediate_size=stored.shape(f"{block}.ff.up.weight", 2)[0],
        timestep_embed_dim=stored.shape("time_embed.linear_1.weight", 2)[1],
        text_hidden_dim=text,
        num_text_layers=stored.shape("text_fusion.projector.weight", 2)[1],
        text_num_attention_heads=text // max(1, text_head_dim),
        text_num_key_value_heads=text_keys // max(1, text_head_dim),
        text_intermediate_size=stored.shape(f"{fusion}.ff.up.weight", 2)[0],
        num_layerwise_text_blocks=len(stored.blocks(f"{fusion}.norm1.weight")),
        num_refiner_text_blocks=len(stored.blocks("text_fusion.refiner_blocks.0.norm1.weight")),
    )


LAYOUTS = Layouts(
    network=krea2_dit.NETWORK,
    title="Krea 2",
    rows=(
        Layout(
            names="its authors' names, as ComfyUI has it",
            signs=("txtfusion.projector.weight", "tmlp.0.weight"),
            place=lambda name, config: Place(krea2_dit.authors_name(name)),
        ),
        Layout(names="diffusers' names", signs=("text_fusion.projector.weight",)),
    ),
    config=_config,
    ignored=("last.up.", "last.down."),  # left over from the training
)
