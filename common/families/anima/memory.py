"""Bytes and operations of a step of Anima."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.anima_dit import AnimaConfig
from qwenimg.common.precision.precision import BYTES


def step_peak(config: AnimaConfig, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` tokens.

    In a block each row has its residual, the norm of it, and the feed-forward's width, before and behind GELU."""
    return 4 * tokens * (2 * config.dim + 2 * config.hidden)


def context_bytes(config: AnimaConfig, text: int, compute: str) -> int:
    """Return the bytes of keys and values of `text` tokens in all blocks, which are there in every step. compute: the
    dtype of products; values that are scaled in float16 are kept without that, in float32."""
    sizes = BYTES[compute] + (4 if compute == "float16" else BYTES[compute])
    return config.num_layers * text * config.dim * sizes


def step_operations(config: AnimaConfig, tokens: int, text: int) -> float:
    """Count the operations of one prediction for `tokens`: for each token and block six squares of the width, four in
    the attention to the image and two in that to the text, and the feed-forward; and attention to all tokens, and to
    the text."""
    products = tokens * config.dim * (6 * config.dim + 2 * config.hidden)
    return config.num_layers * (2.0 * products + 4.0 * tokens * (tokens + text) * config.dim)
