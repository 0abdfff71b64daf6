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
