"""Bytes and operations of blocks that attend to the image, then to the text, and end in a feed-forward without a
gate."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.anima_dit import AnimaConfig
from qwenimg.common.networks.denoisers.pixart_dit import PixArtConfig
from qwenimg.common.precision.precision import BYTES


def step_peak(config: AnimaConfig | PixArtConfig, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` tokens: in a block each has its residual, the norm of it,
    and the feed-forward's width, before and behind GELU, in float32."""
    return 4 * tokens * (2 * config.dim + 2 * config.hidden)


def context_bytes(layers: int, width: int, text: int, compute: str) -> int:
    """Return the bytes of keys and values of `text` tokens in all `layers`, if they are there in every step. compute:
    the dtype of products; values that are scaled in float16 are kept without that, in float32."""
    sizes = BYTES[compute] + (4 if compute == "float16" else BYTES[compute])
    return layers * text * width * sizes


def step_operations(config: AnimaConfig | PixArtConfig, tokens: int, text: int, *, keeps: bool) -> float:
    """Count the operations of one prediction for `tokens`: for each token and block six squares of the width, four in
    the attention to the image and two in that to the text, and the feed-forward; attention to all tokens, and to the
    text; and two squares for each of `text`, unless the model `keeps` its keys and values."""
    dim = config.dim
    products = tokens * dim * (6 * dim + 2 * config.hidden) + (0 if keeps else 2 * text * dim**2)
    return config.num_layers * (2.0 * products + 4.0 * tokens * (tokens + text) * dim)
