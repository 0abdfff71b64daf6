"""Bytes and operations of a step of ERNIE-Image."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.ernie_dit import ErnieConfig


def step_peak(config: ErnieConfig, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` image and text tokens.

    In a block each token has its residual, the norm of it, and the feed-forward's gate, before and behind GELU, and
    values."""
    return tokens * (2 * config.dim + 3 * config.ffn_hidden_size) * 4


def step_operations(config: ErnieConfig, tokens: int) -> float:
    """Count the operations of one prediction for `tokens`: for each token and block the projections of attention, four
    squares of the width, and of the feed-forward, and attention to all tokens."""
    products = 4 * config.dim**2 + 3 * config.dim * config.ffn_hidden_size
    return config.num_layers * (2.0 * tokens * products + 4.0 * tokens**2 * config.dim)
