"""Bytes and operations of a step of Krea 2, and of the text before the first."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.krea2_dit import Krea2Config


def step_peak(config: Krea2Config, tokens: int, text: int) -> int:
    """Return the bytes of activations in one step of `tokens` tokens, or of the fusion of `text` tokens if that takes
    more, since it has a row for each layer of the text encoder.

    In a block each row has its residual, the norm of it, and the feed-forward's gate, before and behind SiLU, and
    values."""
    step = tokens * (2 * config.dim + 3 * config.intermediate_size)
    fusion = text * config.num_text_layers * (2 * config.text_hidden_dim + 3 * config.text_intermediate_size)
    return 4 * max(step, fusion)


def step_operations(config: Krea2Config, tokens: int) -> float:
    """Count the operations of one prediction for `tokens`: for each token and block the projections of attention, three
    squares of the width and its keys and values, and of the feed-forward, and attention to all tokens."""
    keys = config.num_key_value_heads * config.attention_head_dim
    products = config.dim * (3 * config.dim + 2 * keys + 3 * config.intermediate_size)
    return config.num_layers * (2.0 * tokens * products + 4.0 * tokens**2 * config.dim)
