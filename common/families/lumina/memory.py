"""Bytes and operations of a step of Lumina-Image 2.0."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.lumina_dit import LuminaConfig


def block_peak(config: LuminaConfig, tokens: int) -> int:
    """Return the bytes of activations in one step, or one block, of `tokens` image and text tokens.

    Each token has two residuals, q, k and v in float32, and the feed-forward's two widths."""
    return tokens * 4 * (3 * config.dim + 2 * config.kv_dim + 2 * config.hidden)


def step_operations(config: LuminaConfig, tokens: int) -> float:
    """Count the operations of one prediction for `tokens`: for each token and block the projections of attention, of
    which keys and values are narrower, and of the feed-forward, and attention to all tokens."""
    products = config.dim * (2 * config.dim + 2 * config.kv_dim + 3 * config.hidden)
    blocks = config.n_layers + config.n_refiner_layers
    return blocks * (2.0 * tokens * products + 4.0 * tokens**2 * config.dim)
