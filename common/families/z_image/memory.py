"""Bytes and operations of a step of Z-Image."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.zimage_dit import ZImageConfig


def step_peak(config: ZImageConfig, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` image and text tokens with their pads.

    Each token has two residuals, q, k and v in float32, and the feed-forward's two times 8/3 widths."""
    return tokens * config.dim * 42


def step_operations(config: ZImageConfig, tokens: int) -> float:
    """Count the operations of one prediction for `tokens`: for each token and block four squares of the width in the
    attention and eight in the feed-forward, and attention to all tokens."""
    return (config.n_layers + config.n_refiner_layers) * (24.0 * tokens * config.dim**2 + 4.0 * tokens**2 * config.dim)
