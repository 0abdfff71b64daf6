"""Bytes and operations of a step of Z-Image."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.zimage_control import ZImageControlConfig
from qwenimg.common.networks.denoisers.zimage_dit import BlockSizes, ZImageConfig


def block_peak(config: BlockSizes, tokens: int) -> int:
    """Return the bytes of activations in one step, or one block, of `tokens` image and text tokens with their pads.

    Each token has two residuals, q, k and v in float32, and the feed-forward's two times 8/3 widths."""
    return tokens * config.dim * 42


def step_operations(config: ZImageConfig, tokens: int) -> float:
    """Count the operations of one prediction for `tokens`."""
    return (config.n_layers + config.n_refiner_layers) * _block_operations(config, tokens)


def control_operations(config: ZImageControlConfig, tokens: int) -> float:
    """Count the operations of one call of a control network for `tokens`."""
    refiner = config.n_refiner_layers if config.own_refiner else config.layers
    changes = 2.0 * tokens * config.dim**2  # the layer that makes a change
    return (config.layers + refiner) * (_block_operations(config, tokens) + changes)


def _block_operations(config: BlockSizes, tokens: int) -> float:
    """Count the operations of one block: for each token four squares of the width in the attention and eight in the
    feed-forward, and attention to all tokens."""
    return 24.0 * tokens * config.dim**2 + 4.0 * tokens**2 * config.dim
