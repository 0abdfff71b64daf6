"""Images and their tokens: functions that move data, and neither compute nor cast. Images are [B C h w].

B batch, L tokens, C channels.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Image = TypeVar("Image", Tensor, np.ndarray)


def from_bchw(x: Image) -> Image:
    """Return x. The order outside of the networks, [B C h w], is this backend's own."""
    return x


def to_bchw(x: Image) -> Image:
    """Return x, as `from_bchw` does."""
    return x


def upsample(x: Tensor, scale: int = 2) -> Tensor:
    """Repeat each pixel in both directions: [B C h w] -> [B C scale*h scale*w]."""
    return F.interpolate(x, scale_factor=float(scale), mode="nearest-exact")


def upsample_like(x: Tensor, like: Tensor) -> Tensor:
    """Repeat each pixel in both directions; drop the last row or column where the sides of `like` are odd."""
    return F.interpolate(x, size=like.shape[2:], mode="nearest")


def laid_out(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the image in the memory order that convolutions in `dtype` take: channels last in 16 bit.

    In float32 a CPU would spend more on laying out wide weights for it (measured 1.5 to 1.8 times the whole convolution
    at 16x16 and 8x8).
    """
    return x.contiguous(memory_format=torch.channels_last) if dtype.itemsize == 2 else x


def tokens(x: Tensor) -> Tensor:
    """Return an image [B C h w] as tokens [B L C]."""
    return x.flatten(2).transpose(1, 2)


def token_rows(x: Tensor) -> Tensor:
    """Return an image [B C h w] as tokens [B L C], the channels of each side by side in memory.

    In float32 a convolution leaves them apart, and so would be the whole residual stream: each norm would copy it.
    """
    return tokens(x).contiguous()


def image(x: Tensor, like: Tensor) -> Tensor:
    """Return tokens [B L C] as an image [B C h w] with the sides of `like`."""
    return x.unflatten(1, like.shape[2:]).permute(0, 3, 1, 2)


def plane(x: Tensor) -> Tensor:
    """Return the first channel of an image [1 C h w], for its sides: [h w]."""
    return x[0, 0]


def on_plane(x: Tensor, plane: Tensor) -> Tensor:
    """Return tokens [B L C] as an image [B C h w] with the sides of `plane` [h w]."""
    return x.unflatten(1, plane.shape).permute(0, 3, 1, 2)


def patches(x: Tensor, size: int = 2) -> Tensor:
    """Make patches of size x size pixels channels, in the order (c, dy, dx): [B C 2h 2w] -> [B 4C h w]."""
    return F.pixel_unshuffle(x, size)


def unpatched(x: Tensor, size: int = 2) -> Tensor:
    """Return an image of its patches: [B 4C h w] -> [B C 2h 2w], the inverse of `patches`."""
    return F.pixel_shuffle(x, size)


def joined_patches(x: Tensor, like: Tensor, patch: int) -> Tensor:
    """Put patches together: tokens [B L patch*patch*C], in the order (dy, dx, c), become an image [B C h w] with the
    sides of `like`."""
    h, w = like.shape[2:]
    x = x.reshape(x.shape[0], h // patch, w // patch, patch, patch, -1)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], -1, h, w)


def edged(x: Tensor) -> Tensor:
    """Repeat the pixels at all edges once: [B C h w] -> [B C h+2 w+2]."""
    x = torch.cat((x[:, :, :1], x, x[:, :, -1:]), dim=2)
    return torch.cat((x[..., :1], x, x[..., -1:]), dim=3)


def beside(x: Tensor, other: Tensor) -> Tensor:
    """Concatenate the channels of two images."""
    return torch.cat((x, other), dim=1)


def height(x: Tensor) -> int:
    """Return the number of rows of an image."""
    return x.shape[2]


def window(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return a rectangle of an image [B C h w]."""
    return x[:, :, rows, columns]


def rows_joined(bands: list[Tensor]) -> Tensor:
    """Concatenate images below each other: [B C h_i w] -> [B C h w]."""
    return bands[0] if len(bands) == 1 else torch.cat(bands, dim=2)


def frames_apart(x: Tensor, count: int) -> Tensor:
    """Make the channels of each image those of `count` frames: [F count*C h w] -> [F*count C h w]."""
    return x.reshape(x.shape[0] * count, -1, *x.shape[2:])


def frames_joined(x: Tensor, count: int) -> Tensor:
    """Make the channels of each `count` frames those of one image: [F*count C h w] -> [F count*C h w]."""
    return x.reshape(x.shape[0] // count, -1, *x.shape[2:])


def frames_before(x: Tensor) -> Tensor:
    """Return the frame before each frame [F C h w], zeros before the first."""
    return torch.cat((torch.zeros_like(x[:1]), x[:-1]))


def last_frame(x: Tensor) -> Tensor:
    """Return the last frame [1 C h w] of frames [F C h w]."""
    return x[-1:]
