"""Bytes and operations of a step of FLUX.3."""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.networks.denoisers.flux3_dit import Flux3Config


def step_peak(config: Flux3Config, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` image, reference and text tokens.

    In a block each token has its residual, the norm of it, and the result of attention beside the feed-forward's three
    widths."""
    return tokens * (4 * config.dim + 3 * config.hidden) * 4


def step_operations(config: Flux3Config, streams: Sequence[int]) -> float:
    """Count the operations of one prediction for `streams` of so many tokens: for each token and block the projections
    of attention, four squares of the width, and of the feed-forward, and attention within the stream, or to all."""
    products = 4 * config.dim**2 + 3 * config.dim * config.hidden

    def block(tokens: int) -> float:
        return 2.0 * tokens * products + 4.0 * tokens**2 * config.dim

    return config.num_layers * sum(map(block, streams)) + config.num_single_layers * block(sum(streams))
