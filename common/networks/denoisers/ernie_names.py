"""ERNIE-Image's transformer in files: its authors' names, which diffusers and ComfyUI have, and mflux's, one by one."""

from __future__ import annotations

from qwenimg.common.networks.denoisers import ernie_dit
from qwenimg.common.networks.denoisers.ernie_dit import ErnieConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes

_SIGN = "layers.0.adaLN_sa_ln.weight"


def _config(stored: StoredShapes, like: ErnieConfig) -> ErnieConfig:
    """Return the configuration for stored shapes, of vectors and rows, since the columns of matrices may be packed; the
    axes of RoPE and the width of text are taken from `like`, but for a model without a layer for text."""
    [width] = stored.shape(_SIGN, 1)
    [head_dim] = stored.shape("layers.0.self_attention.norm_q.weight", 1)
    [channels] = stored.shape("final_linear.bias", 1)
    return stored.config(
        like,
        hidden_size=width,
        num_attention_heads=width // max(1, head_dim),
        num_layers=len(stored.blocks(_SIGN)),
        ffn_hidden_size=stored.shape("layers.0.mlp.gate_proj.weight", 2)[0],
        in_channels=channels,
        out_channels=channels,
        text_in_dim=stored.shape("text_proj.weight", 2)[1] if "text_proj.weight" in stored else width,
    )


LAYOUTS = Layouts(
    network=ernie_dit.NETWORK,
    title="ERNIE-Image",
    expected="transformer of ERNIE-Image",
    rows=(Layout(names="its authors' names", signs=(_SIGN,)),),
    config=_config,
)
