"""Bytes and operations of a step of Flux.2."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config


def step_peak(config: Flux2Config, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` image, reference and text tokens.

    In a block of one stream each token has its residual, the norm of it, q, k, v and the feed-forward's two widths from
    one layer, q and k in float32, and attention beside the feed-forward for the next layer."""
    widths = 3 * config.dim + 2 * config.hidden + (config.dim + config.hidden) + 5 * config.dim
    return tokens * widths * 4


def step_operations(config: Flux2Config, tokens: int) -> float:
    """Count the operations of one prediction for `tokens`: for each token and block the projections of attention, four
    squares of the width, and of the feed-forward, and attention to all tokens."""
    layers = config.num_layers + config.num_single_layers
    products = 4 * config.dim**2 + 3 * config.dim * config.hidden
    return layers * (2.0 * tokens * products + 4.0 * tokens**2 * config.dim)
