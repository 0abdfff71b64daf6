"""Bytes and operations of a step of Qwen-Image-2.1: of the image's tokens, and of those of text and references in front
of it, whose keys and values are kept between the steps."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.qwen21_dit import Qwen21Config


def step_peak(config: Qwen21Config, image: int, context: int) -> int:
    """Return the bytes of activations in one step of `image` tokens behind a `context`.

    Each token of the larger part has its residual, the norm of it, and the feed-forward's two widths or q, k, v and
    what attention makes of them; the other part has its residual; and attention has keys and values of both."""
    larger, smaller = max(image, context), min(image, context)
    return (larger * (3 * config.dim + 2 * config.hidden) + smaller * config.dim + 2 * context * config.dim) * 4


def known_bytes(config: Qwen21Config, context: int, itemsize: int) -> int:
    """Return the bytes of keys and values of a `context`, with `itemsize` bytes for each number: 512 KiB a token of
    the published model in 16 bit."""
    return 2 * config.num_layers * context * config.dim * itemsize


def step_operations(config: Qwen21Config, tokens: int, seen: int) -> float:
    """Count the operations of `tokens` tokens in all blocks: for each the projections of attention, four squares of the
    width, and of the feed-forward, and attention to `seen` tokens."""
    products = 4 * config.dim**2 + 3 * config.dim * config.hidden
    return config.num_layers * (2.0 * tokens * products + 4.0 * tokens * seen * config.dim)
