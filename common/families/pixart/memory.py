"""Bytes and operations of a step of PixArt."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.pixart_dit import MLP_RATIO, PixArtConfig


def step_peak(config: PixArtConfig, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` tokens.

    Each token has its residual, the norm of it, and the feed-forward's width, before and behind GELU."""
    return 4 * tokens * config.dim * (2 + 2 * MLP_RATIO)


def step_operations(config: PixArtConfig, tokens: int, text: int) -> float:
    """Count the operations of one prediction for `tokens`: for each token and block six squares of the width in the
    attentions and eight in the feed-forward, two for each of `text`, and attention to all tokens, and to the text."""
    dim = config.dim
    products = (tokens * (6 + 2 * MLP_RATIO) + 2 * text) * dim**2
    return config.num_layers * (2.0 * products + 4.0 * tokens * (tokens + text) * dim)
