"""Bytes and operations of a step of Anima."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.anima_dit import AnimaConfig


def step_peak(config: AnimaConfig, tokens: int, text: int) -> int:
    """Return the bytes of activations in one step of `tokens` tokens that see `text` tokens.

    In a block each row has its residual, the norm of it, and the feed-forward's width, before and behind GELU; keys and
    values of the text, and the text, are there too."""
    width = 2 * config.dim + 2 * config.hidden
    return 4 * (tokens * width + text * (2 * config.dim + config.text_embed_dim))


def step_operations(config: AnimaConfig, tokens: int, text: int) -> float:
    """Count the operations of one prediction for `tokens`: for each token and block six squares of the width, four in
    the attention to the image and two in that to the text, and the feed-forward; of the text its keys and values; and
    attention to all tokens, and to the text."""
    products = (
        tokens * config.dim * (6 * config.dim + 2 * config.hidden) + 2 * text * config.dim * config.text_embed_dim
    )
    return config.num_layers * (2.0 * products + 4.0 * tokens * (tokens + text) * config.dim)
