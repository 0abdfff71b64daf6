"""T5's encoder in files: transformers' names, llama.cpp's and mflux's, which its `rename` maps behind any prefix; and
UMT5's, which has a table of distances in every block."""

from __future__ import annotations

from qwenimg.common.networks.encoders import t5
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes

_GATE = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"  # only version 1.1 has it
_PILE, _PILE_LLAMA_CPP = t5.SECOND_BUCKETS, "enc.blk.1.attn_rel_b.weight"
_NORM, _ATTENTION = "encoder.block.0.layer.0.layer_norm.weight", "encoder.block.0.layer.0.SelfAttention"


def _config(stored: StoredShapes, like: T5Config) -> T5Config:
    """Return the configuration for stored shapes; the columns of matrices, which may be packed, do not count."""
    [width] = stored.shape(_NORM, 1)
    buckets, heads = stored.shape(f"{_ATTENTION}.relative_attention_bias.weight", 2)
    return stored.config(
        like,
        vocab_size=stored.shape("shared.weight", 2)[0],
        d_model=width,
        d_kv=stored.shape(f"{_ATTENTION}.q.weight", 2)[0] // max(1, heads),
        d_ff=stored.shape(_GATE, 2)[0],
        num_layers=len(stored.blocks(_NORM)),
        num_heads=heads,
        relative_attention_num_buckets=buckets,
    )


LAYOUTS = Layouts(
    network=t5.NETWORK,
    title="T5 v1.1",
    rows=(
        Layout(names="transformers' names", signs=(_GATE,), lacks=(_PILE,)),
        Layout(names="llama.cpp's names", signs=("enc.blk.0.ffn_gate.weight",), lacks=(_PILE_LLAMA_CPP,)),
        Layout(names="mflux's names", signs=("t5_blocks.0.ff.DenseReluDense.wi_0.weight",)),
    ),
    config=_config,
)

UMT5 = Layouts(
    network=t5.UMT5,
    title="UMT5",
    rows=(
        Layout(names="transformers' names", signs=(_PILE, _GATE)),
        Layout(names="llama.cpp's names", signs=(_PILE_LLAMA_CPP, "enc.blk.0.ffn_gate.weight")),
    ),
    config=_config,
)
