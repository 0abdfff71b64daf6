"""Bytes and operations of a step of SANA."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.sana_dit import SanaConfig


def step_peak(config: SanaConfig, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` tokens: each has its residual, the norm of it, and the
    feed-forward's two widths before and behind the convolution, in float32."""
    return 4 * tokens * (2 * config.dim + 6 * config.hidden)


def step_operations(config: SanaConfig, tokens: int, text: int) -> float:
    """Count the operations of one prediction for `tokens`: for each token and block the projections of both
    attentions, the feed-forward with its convolution, a head's squared width twice in place of attention to all tokens,
    and attention to the text."""
    dim, inner, hidden = config.dim, config.cross_dim, config.hidden
    products = 4 * dim * dim + 2 * dim * inner + 3 * dim * hidden + 2 * 9 * hidden + 2 * dim * config.attention_head_dim
    return config.num_layers * (2.0 * tokens * products + 4.0 * tokens * text * inner)
