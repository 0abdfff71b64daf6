"""FLUX.3's transformer in files: its authors' names, which ComfyUI has, and diffusers'.

Unusual about its authors' names: each layer of a block is a tensor of its own, as in diffusers' names; the final
layer's modulation has shift before scale, so that the halves are swapped; the gain of a norm is its `scale`."""

from __future__ import annotations

from qwenimg.common.networks.denoisers import flux3_dit
from qwenimg.common.networks.denoisers.flux3_dit import TARGET, Flux3Config
from qwenimg.common.networks.layout import Layers, Layout, Layouts, StoredShapes, place_of
from qwenimg.common.weights.keys import Place

_ENDS: Layers = {
    "context_embedder": "txt_in",
    "proj_out": "final_layer.image.linear",
    "norm_out.linear": Place("final_layer.image.adaLN_modulation.1", decode="swapped"),
    **{
        f"{ours}.linear_{i}": f"{theirs}.{layer}"
        for ours, theirs in (("timestep_embedder", "time_in"), (TARGET, "ref_time_in"))
        for i, layer in ((1, "in_layer"), (2, "out_layer"))
    },
}
_STARTS = {
    "x_embedders.": "emb_in.",
    "mode_blocks.": "content_mode_blocks.",
    "single_transformer_blocks.": "single_blocks.",
}
_LAYERS = {
    **{f".attn.to_{x}": f".{x}_proj" for x in "qkv"},
    ".attn.to_out.0": ".attn_out",
    ".attn.norm_q": ".norm.query_norm",
    ".attn.norm_k": ".norm.key_norm",
    ".ff.linear_in": ".mlp_in",
    ".ff.linear_out": ".mlp_out",
    ".linear": ".lin",
}


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    owner, _, leaf = name.rpartition(".")
    if owner in _ENDS:
        there = place_of(_ENDS, owner)
        return there._replace(key=f"{there.key}.{leaf}")
    for ours, theirs in _STARTS.items():
        owner = theirs + owner.removeprefix(ours) if owner.startswith(ours) else owner
    for ours, theirs in _LAYERS.items():
        owner = owner.removesuffix(ours) + theirs if owner.endswith(ours) else owner
    return Place(f"{owner}.{'scale' if owner.endswith('_norm') else leaf}")


def _config(stored: StoredShapes, like: Flux3Config) -> Flux3Config:
    """Return the configuration for stored shapes, of vectors and rows, since the columns of matrices may be packed; the
    axes of RoPE and the widths of inputs are taken from `like`."""
    width = stored.shape("context_embedder.weight", 2)[0]
    [head_dim] = stored.shape("txt_mode_blocks.0.attn.norm_q.weight", 1)
    return stored.config(
        like,
        in_channels=stored.shape("proj_out.weight", 2)[0],
        cond_in_channels=stored.shape("proj_out.weight", 2)[0],
        num_layers=len(stored.blocks("txt_mode_blocks.0.attn.norm_q.weight")),
        num_single_layers=len(stored.blocks("single_transformer_blocks.0.attn.norm_q.weight")),
        attention_head_dim=head_dim,
        num_attention_heads=width // max(1, head_dim),
        joint_attention_dim=stored.shape("context_embedder.weight", 2)[1],
        timestep_channels=stored.shape("timestep_embedder.linear_1.weight", 2)[1],
        mlp_ratio=stored.shape("txt_mode_blocks.0.ff.linear_in.weight", 2)[0] / max(1, 2 * width),
        flow_map=f"{TARGET}.linear_1.weight" in stored,
    )


LAYOUTS = Layouts(
    network=flux3_dit.NETWORK,
    title="FLUX.3",
    rows=(
        Layout(
            names="its authors' names, as ComfyUI has it",
            signs=("early_stream_modulations.image.lin.weight",),
            place=lambda name, config: place(name),
        ),
        Layout(names="diffusers' names", signs=("early_stream_modulations.image.linear.weight",)),
    ),
    config=_config,
    ignored=("repa_projectors.",),  # left over from the training
)
