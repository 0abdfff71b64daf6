"""Bytes and operations of a step of Flux.2."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.precision.precision import BYTES


def step_peak(config: Flux2Config, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` image, reference and text tokens.

    In a block of one stream each token has its residual, the norm of it, q, k, v and the feed-forward's two widths from
    one layer, q and k in float32, and attention beside the feed-forward for the next layer."""
    widths = 3 * config.dim + 2 * config.hidden + (config.dim + config.hidden) + 5 * config.dim
    return tokens * widths * 4


def kept_peak(config: Flux2Config, tokens: int, references: int) -> int:
    """Return the bytes of activations in a step of `tokens` image and text tokens that makes or sees keys and values of
    `references`: those of `step_peak` for the larger part, the residual of the other, keys and values of the references
    of one block, and these once more beside those of image and text."""
    larger, smaller = max(tokens, references), min(tokens, references)
    return step_peak(config, larger) + (smaller + 4 * references) * config.dim * 4


def known_bytes(config: Flux2Config, references: int, compute: str) -> int:
    """Return the bytes of keys and values of `references` tokens, computed in the dtype `compute`: 512 KiB a token of
    the published model in bfloat16. Values are kept without the scale that float16 needs, in float32."""
    sizes = BYTES[compute] + (4 if compute == "float16" else BYTES[compute])
    return (config.num_layers + config.num_single_layers) * references * config.dim * sizes


def step_operations(config: Flux2Config, tokens: int, seen: int) -> float:
    """Count the operations of `tokens` tokens in all blocks: for each the projections of attention, four squares of the
    width, and of the feed-forward, and attention to `seen` tokens."""
    layers = config.num_layers + config.num_single_layers
    products = 4 * config.dim**2 + 3 * config.dim * config.hidden
    return layers * (2.0 * tokens * products + 4.0 * tokens * seen * config.dim)
