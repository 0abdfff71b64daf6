"""Conversion of latents [B, C, h, w] to the tokens of a transformer and back.

2 x 2 latent pixels become one token, channels in the order (c, dy, dx).
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray


def pack(latents: NDArray[Any]) -> NDArray[Any]:
    """Pack latents [B C h w] as tokens [B, h/2 * w/2, 4C]. Raises ValueError unless h and w are even."""
    B, C, h, w = latents.shape
    if h % 2 or w % 2:
        raise ValueError(f"latents of {h} x {w} cannot be packed: both must be even")
    x = latents.reshape(B, C, h // 2, 2, w // 2, 2).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(B, (h // 2) * (w // 2), 4 * C)


def unpack(tokens: NDArray[Any], h: int, w: int) -> NDArray[Any]:
    """Unpack tokens [B, h/2 * w/2, 4C] to latents [B C h w], the inverse of `pack`. Raises ValueError."""
    B, L, channels = tokens.shape
    if h % 2 or w % 2 or h * w != 4 * L or channels % 4:
        raise ValueError(f"tokens {tokens.shape} are not those of {h} x {w} latents")
    x = tokens.reshape(B, h // 2, w // 2, channels // 4, 2, 2).transpose(0, 3, 1, 4, 2, 5)
    return x.reshape(B, channels // 4, h, w)
