"""Conversion of latents [B, C, h, w] to the tokens of a transformer and back.

2 x 2 latent pixels become one token. The order of its channels is the family's: (c, dy, dx), or (dy, dx, c) where
channels come last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from numpy.typing import NDArray


class Packing(NamedTuple):
    """Both directions between latents and the input of a transformer."""

    pack: Callable[[NDArray[Any]], NDArray[Any]] = lambda latents: latents
    unpack: Callable[[NDArray[Any]], NDArray[Any]] = lambda latents: latents


AS_IMAGES = Packing()


def pack(latents: NDArray[Any], *, channels_last: bool = False) -> NDArray[Any]:
    """Pack latents [B C h w] as tokens [B, h/2 * w/2, 4C]. Raises ValueError unless h and w are even."""
    B, C, h, w = latents.shape
    if h % 2 or w % 2:
        raise ValueError(f"latents of {h} x {w} cannot be packed: both must be even")
    order = (0, 2, 4, 3, 5, 1) if channels_last else (0, 2, 4, 1, 3, 5)
    x = latents.reshape(B, C, h // 2, 2, w // 2, 2).transpose(order)
    return x.reshape(B, (h // 2) * (w // 2), 4 * C)


def tokens(latents: NDArray[Any]) -> NDArray[Any]:
    """Return latents [B C h w], in patches already, as tokens [B, h*w, C]."""
    B, C, h, w = latents.shape
    return latents.reshape(B, C, h * w).transpose(0, 2, 1)


def image(tokens: NDArray[Any], h: int, w: int) -> NDArray[Any]:
    """Return tokens [B, h*w, C] as latents [B C h w], the inverse of `tokens`."""
    B, _, C = tokens.shape
    return tokens.transpose(0, 2, 1).reshape(B, C, h, w)


def unpack(tokens: NDArray[Any], h: int, w: int, *, channels_last: bool = False) -> NDArray[Any]:
    """Unpack tokens [B, h/2 * w/2, 4C] to latents [B C h w], the inverse of `pack`. Raises ValueError."""
    B, L, channels = tokens.shape
    if h % 2 or w % 2 or h * w != 4 * L or channels % 4:
        raise ValueError(f"tokens {tokens.shape} are not those of {h} x {w} latents")
    C = channels // 4
    if channels_last:
        x = tokens.reshape(B, h // 2, w // 2, 2, 2, C).transpose(0, 5, 1, 3, 2, 4)
    else:
        x = tokens.reshape(B, h // 2, w // 2, C, 2, 2).transpose(0, 3, 1, 4, 2, 5)
    return x.reshape(B, C, h, w)


def squares(h: int, w: int) -> Packing:
    """Return the directions between latents [B C h w] and tokens of 2 x 2 latent pixels."""
    return Packing(pack, partial(unpack, h=h, w=w))


def patches(h: int, w: int) -> Packing:
    """Return the directions between latents [B C h w], in patches already, and tokens."""
    return Packing(tokens, partial(image, h=h, w=w))


def pack_frames(latents: NDArray[Any]) -> NDArray[Any]:
    """Pack frames [F C h w] as tokens [1, F * h/2 * w/2, 4C], one frame after the other. Raises as `pack` does."""
    tokens = pack(latents)
    return tokens.reshape(1, -1, tokens.shape[-1])


def unpack_frames(tokens: NDArray[Any], frames: int, h: int, w: int) -> NDArray[Any]:
    """Unpack tokens [1, F * h/2 * w/2, 4C] to frames [F C h w], the inverse of `pack_frames`. Raises as `unpack`
    does."""
    return unpack(tokens.reshape(frames, -1, tokens.shape[-1]), h, w)


def frames(count: int, h: int, w: int) -> Packing:
    """Return the directions between frames [F C h w] and tokens of 2 x 2 latent pixels."""
    return Packing(pack_frames, partial(unpack_frames, frames=count, h=h, w=w))
