"""Images and their tokens: functions that move data, and neither compute nor cast. Images are [B h w C].

B batch, L tokens, C channels.
"""

from __future__ import annotations

from typing import TypeVar

import mlx.core as mx
import numpy as np

Array = mx.array


Image = TypeVar("Image", Array, np.ndarray)


def from_bchw(x: Image) -> Image:
    """Convert [B C h w], the order outside of the networks, to [B h w C]."""
    return x.transpose(0, 2, 3, 1)


def to_bchw(x: Image) -> Image:
    """Convert [B h w C] to [B C h w], the order outside of the networks."""
    return x.transpose(0, 3, 1, 2)


def upsample(x: Array, scale: int = 2) -> Array:
    """Repeat each pixel in both directions: [B h w C] -> [B scale*h scale*w C]."""
    return mx.repeat(mx.repeat(x, scale, axis=1), scale, axis=2)


def upsample_like(x: Array, like: Array) -> Array:
    """Repeat each pixel in both directions; drop the last row or column where the sides of `like` are odd."""
    return upsample(x)[:, : like.shape[1], : like.shape[2]]


def laid_out(x: Array, dtype: mx.Dtype) -> Array:
    """Return x: MLX has one memory order."""
    return x


def tokens(x: Array) -> Array:
    """Return an image [B h w C] as tokens [B L C]."""
    return x.flatten(1, 2)


def token_rows(x: Array) -> Array:
    """Return an image [B h w C] as tokens [B L C], whose channels are side by side in memory."""
    return tokens(x)


def image(x: Array, like: Array) -> Array:
    """Return tokens [B L C] as an image [B h w C] with the sides of `like`."""
    return x.reshape(*like.shape[:3], -1)


def plane(x: Array) -> Array:
    """Return the first channel of an image [1 h w C], for its sides: [h w]."""
    return x[0, :, :, 0]


def on_plane(x: Array, plane: Array) -> Array:
    """Return tokens [B L C] as an image [B h w C] with the sides of `plane` [h w]."""
    return x.reshape(x.shape[0], *plane.shape, -1)


def patches(x: Array, size: int = 2) -> Array:
    """Make patches of size x size pixels channels, in the order (c, dy, dx): [B 2h 2w C] -> [B h w 4C]."""
    B, height, width, C = x.shape
    x = x.reshape(B, height // size, size, width // size, size, C).transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(B, height // size, width // size, size * size * C)


def unpatched(x: Array, size: int = 2) -> Array:
    """Return an image of its patches: [B h w 4C] -> [B 2h 2w C], the inverse of `patches`."""
    B, height, width, C = x.shape
    x = x.reshape(B, height, width, C // size**2, size, size).transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(B, size * height, size * width, C // size**2)


def joined_patches(x: Array, like: Array, patch: int) -> Array:
    """Put patches together: tokens [B L patch*patch*C], in the order (dy, dx, c), become an image [B h w C] with the
    sides of `like`."""
    h, w = like.shape[1:3]
    x = x.reshape(x.shape[0], h // patch, w // patch, patch, patch, -1)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(x.shape[0], h, w, -1)


def edged(x: Array) -> Array:
    """Repeat the pixels at all edges once: [B h w C] -> [B h+2 w+2 C]."""
    return mx.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="edge")


def beside(x: Array, other: Array) -> Array:
    """Concatenate the channels of two images."""
    return mx.concatenate((x, other), axis=-1)


def height(x: Array) -> int:
    """Return the number of rows of an image."""
    return x.shape[1]


def window(x: Array, rows: slice, columns: slice) -> Array:
    """Return a rectangle of an image [B h w C]."""
    return x[:, rows, columns]


def rows_joined(bands: list[Array]) -> Array:
    """Concatenate images below each other: [B h_i w C] -> [B h w C]."""
    return bands[0] if len(bands) == 1 else mx.concatenate(bands, axis=1)


def frames_apart(x: Array, count: int) -> Array:
    """Make the channels of each image those of `count` frames: [F h w count*C] -> [F*count h w C]."""
    F, h, w, _ = x.shape
    return x.reshape(F, h, w, count, -1).transpose(0, 3, 1, 2, 4).reshape(F * count, h, w, -1)


def frames_joined(x: Array, count: int) -> Array:
    """Make the channels of each `count` frames those of one image: [F*count h w C] -> [F h w count*C]."""
    F, h, w, _ = x.shape
    return x.reshape(F // count, count, h, w, -1).transpose(0, 2, 3, 1, 4).reshape(F // count, h, w, -1)


def frames_before(x: Array) -> Array:
    """Return the frame before each frame [F h w C], zeros before the first."""
    return mx.concatenate((mx.zeros_like(x[:1]), x[:-1]))


def last_frame(x: Array) -> Array:
    """Return the last frame [1 h w C] of frames [F h w C]."""
    return x[-1:]
