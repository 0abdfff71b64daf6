"""Anima's text conditioner in files: within the file of a transformer, and alone in diffusers' names."""

from __future__ import annotations

from qwenimg.common.networks.encoders import anima_conditioner
from qwenimg.common.networks.encoders.anima_conditioner import INSIDE, ConditionerConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.weights.keys import Place

_SIGN = "blocks.0.norm_cross_attn.weight"


def _config(stored: StoredShapes, like: ConditionerConfig) -> ConditionerConfig:
    """Return the configuration for stored shapes; the columns of matrices, which may be packed, do not count: the width
    of the states is taken from `like`."""
    block = f"{INSIDE}blocks.0"
    [dim], [head_dim] = stored.shape(f"{INSIDE}norm.weight", 1), stored.shape(f"{block}.self_attn.q_norm.weight", 1)
    return stored.config(
        like,
        target_dim=dim,
        model_dim=dim,
        num_layers=len(stored.blocks(f"{block}.norm_mlp.weight")),
        num_attention_heads=dim // max(1, head_dim),
        mlp_ratio=stored.shape(f"{block}.mlp.0.bias", 1)[0] / max(1, dim),
        target_vocab_size=stored.shape(f"{INSIDE}embed.weight", 2)[0],
    )


LAYOUTS = Layouts(
    network=anima_conditioner.NETWORK,
    title="Anima",
    expected="text conditioner of Anima, which its transformer's file has",
    rows=(
        Layout(
            names="its authors' names, in the transformer's file",
            signs=(INSIDE + _SIGN,),
            place=lambda name, config: Place(name),
        ),
        Layout(names="diffusers' names", signs=(_SIGN,)),
    ),
    config=_config,
    ignored=("x_embedder.", "t_embedder.", "t_embedding_norm.", "blocks.", "final_layer.", "pos_embedder.", "accum_"),
)
