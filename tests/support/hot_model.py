"""The tiny transformer with the residual streams of the real one: up to 50 million, by way of three outlier channels.

A stream's size is that of the layers that write to it: img_in, to_out.0 and img_mlp.net.2, and their like for the text,
times the gates. What reads it starts with a LayerNorm, so the model's output stays about 1. Factors are powers of two,
shared between weights and gates so that every weight fits into float16. The first block stays cool.
"""

from __future__ import annotations

import torch

OUTLIERS = (5, 23, 41)  # channels
WRITER, OUTLIER_WRITER = 2.0**10, 2.0**12
GATE, OUTLIER_GATE = 2.0**6, 2.0**14
WRITERS = ("attn.to_out.0", "attn.to_add_out", "img_mlp.net.2", "txt_mlp.net.2")


def heat(weights: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The weights of a tiny transformer, by checkpoint key, made hot."""
    hot = {key: value.clone() for key, value in weights.items()}
    dim = len(hot["img_in.bias"])
    for name in ("img_in", "txt_in"):
        _scale(hot, name, torch.full((dim,), WRITER))
    for i in range(layers):
        block = f"transformer_blocks.{i}"
        for name in WRITERS:
            _scale(hot, f"{block}.{name}", _factors(dim, WRITER, OUTLIER_WRITER))
        if i:
            gates = torch.ones(6, dim)
            gates[2] = gates[5] = _factors(dim, GATE, OUTLIER_GATE)  # shift, scale, gate, twice
            for name in ("img_mod.1", "txt_mod.1"):
                _scale(hot, f"{block}.{name}", gates.flatten())
    return hot


def _factors(dim: int, factor: float, outlier: float) -> torch.Tensor:
    made = torch.full((dim,), factor)
    made[list(OUTLIERS)] = outlier
    return made


def _scale(weights: dict[str, torch.Tensor], layer: str, rows: torch.Tensor) -> None:
    weights[f"{layer}.weight"] *= rows[:, None]
    weights[f"{layer}.bias"] *= rows


# What a float32 stream alone does not hold in float16: products whose results are beyond 65504.
PRODUCTS = {
    "attn.to_v": 2.0**12,
    "attn.add_v_proj": 2.0**12,
    "attn.to_out.0": 2.0**-9,
    "attn.to_add_out": 2.0**-9,
    "img_mlp.net.2": 2.0**6,
    "txt_mlp.net.2": 2.0**6,
}


def heat_products(weights: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The hot transformer with values and feed-forwards of 1e5 and more in its last block, their gates turned down so
    that the streams stay as hot as they are."""
    hot = heat(weights, layers)
    block = f"transformer_blocks.{layers - 1}"
    for name, factor in PRODUCTS.items():
        _scale(hot, f"{block}.{name}", torch.full((len(hot[f"{block}.{name}.bias"]),), factor))
    for name in ("img_mod.1", "txt_mod.1"):
        gates = torch.ones(6, len(hot["img_in.bias"]))
        gates[1], gates[2], gates[5] = 2.0**6, 2.0**-8, 2.0**-6  # scale, gate, gate
        _scale(hot, f"{block}.{name}", gates.flatten())
    return hot
