"""Images and their tokens: data is moved here, never computed or cast. Images are [B h w C].

B batch, L tokens, C channels.
"""

from __future__ import annotations

from typing import TypeVar

import mlx.core as mx
import numpy as np

Array = mx.array


Image = TypeVar("Image", Array, np.ndarray)


def from_bchw(x: Image) -> Image:
    """[B C h w], as outside of the networks, to [B h w C]."""
    return x.transpose(0, 2, 3, 1)


def to_bchw(x: Image) -> Image:
    """[B h w C] to [B C h w], as outside of the networks."""
    return x.transpose(0, 3, 1, 2)


def upsample(x: Array) -> Array:
    """Each pixel four times: [B h w C] -> [B 2h 2w C]."""
    return mx.repeat(mx.repeat(x, 2, axis=1), 2, axis=2)


def upsample_like(x: Array, kept: Array) -> Array:
    """Each pixel four times, without the last row or column where the sides of `kept` are odd."""
    return upsample(x)[:, : kept.shape[1], : kept.shape[2]]


def laid_out(x: Array, dtype: mx.Dtype) -> Array:
    """Nothing here: MLX has one layout."""
    return x


def tokens(x: Array) -> Array:
    """An image [B h w C] as tokens [B L C]."""
    return x.flatten(1, 2)


def image(x: Array, like: Array) -> Array:
    """Tokens [B L C] as an image [B h w C] of the sides of `like`."""
    return x.reshape(*like.shape[:3], -1)


def beside(x: Array, kept: Array) -> Array:
    """The channels of two images in one."""
    return mx.concatenate((x, kept), axis=-1)


def height(x: Array) -> int:
    """Return how many rows an image has."""
    return x.shape[1]


def window(x: Array, rows: slice, columns: slice) -> Array:
    """A rectangle of an image [B h w C]."""
    return x[:, rows, columns]


def rows_joined(bands: list[Array]) -> Array:
    """Images below each other in one: [B h_i w C] -> [B h w C]."""
    return bands[0] if len(bands) == 1 else mx.concatenate(bands, axis=1)
