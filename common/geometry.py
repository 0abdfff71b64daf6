"""Sizes and positions: image sizes, latent packing, time features, rotary tables and tiles.

Numbers only: tables are float64, so that both backends round the same values. B batch, L image tokens, S text
tokens, A position axes, C channels; `h w` are latent rows and columns.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

MAX_SIDE = 16384
ROPE_POSITIONS = 4096  # rows of the rotary table that the published model was made with

Shape = tuple[int, int, int]
"""(frames, rows, columns) of an image in tokens; a token is 16 x 16 pixels."""

# --- Image sizes

ASPECT_SIZES = {
    Fraction(1, 1): (1328, 1328),
    Fraction(16, 9): (1664, 928),
    Fraction(9, 16): (928, 1664),
    Fraction(4, 3): (1472, 1104),
    Fraction(3, 4): (1104, 1472),
    Fraction(3, 2): (1584, 1056),
    Fraction(2, 3): (1056, 1584),
}
"""Width and height in pixels that Qwen-Image was trained for, by aspect, which is width by height."""

ASPECT_AREA = 1472 * 1104  # pixels, for another aspect: the middle one of theirs

MAX_ASPECT = 100  # of the longer side by the shorter


def ceil_to(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def render_size(width: int, height: int, multiple: int = 16) -> tuple[int, int]:
    """Width and height to render at, from which the requested size is cropped at the right and the bottom."""
    _check_size(width, height)
    return ceil_to(width, multiple), ceil_to(height, multiple)


def parse_size(text: str) -> tuple[int, int]:
    """Width and height from `1664x928`. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,9})[xX]([0-9]{1,9})", text.strip())
    if match is None:
        raise UsageError(f"size {clean(text, 40)!r} is not WIDTHxHEIGHT in pixels, such as 1664x928")
    width, height = int(match[1]), int(match[2])
    _check_size(width, height)
    return width, height


def parse_aspect(text: str) -> Fraction:
    """Width by height from `16:9`. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]{1,4})?):([0-9]{1,4}(?:\.[0-9]{1,4})?)", text.strip())
    if match is None or not Fraction(match[1]) or not Fraction(match[2]):
        raise UsageError(f"aspect {clean(text, 40)!r} is not WIDTH:HEIGHT, such as 16:9")
    aspect = Fraction(match[1]) / Fraction(match[2])
    if max(aspect, 1 / aspect) > MAX_ASPECT:
        raise UsageError(f"aspect {text.strip()} is outside 1:{MAX_ASPECT} to {MAX_ASPECT}:1")
    return aspect


def aspect_size(aspect: Fraction, area: int) -> tuple[int, int]:
    """Width and height in multiples of 16, as near to `aspect` and then to `area`, in pixels, as the nearest can be."""
    ratio = float(aspect)
    width, height = math.sqrt(area * ratio), math.sqrt(area / ratio)

    def error(size: tuple[int, int]) -> tuple[float, float]:
        return abs(math.log(size[0] / size[1] / ratio)), abs(math.log(size[0] * size[1] / area))

    return min(itertools.product(_neighbours(width), _neighbours(height)), key=error)


def _neighbours(side: float) -> tuple[int, int]:
    below = max(16, int(side) // 16 * 16)
    return below, below + 16


def _check_size(width: int, height: int) -> None:
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise UsageError(f"size {clean(width, 40)}x{clean(height, 40)} is outside 1 to {MAX_SIDE} pixels a side")


# --- Packing: 2 x 2 latent pixels become one token, channels in the order (c, dy, dx)


def pack(latents: NDArray[Any]) -> NDArray[Any]:
    """Latents [B C h w] -> tokens [B, h/2 * w/2, 4C]; h and w even."""
    B, C, h, w = latents.shape
    if h % 2 or w % 2:
        raise ValueError(f"latents of {h} x {w} cannot be packed: both must be even")
    x = latents.reshape(B, C, h // 2, 2, w // 2, 2).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(B, (h // 2) * (w // 2), 4 * C)


def unpack(tokens: NDArray[Any], h: int, w: int) -> NDArray[Any]:
    """Tokens [B, h/2 * w/2, 4C] -> latents [B C h w], the inverse of `pack`."""
    B, L, channels = tokens.shape
    if h % 2 or w % 2 or h * w != 4 * L or channels % 4:
        raise ValueError(f"tokens {tokens.shape} are not those of {h} x {w} latents")
    x = tokens.reshape(B, h // 2, w // 2, channels // 4, 2, 2).transpose(0, 3, 1, 4, 2, 5)
    return x.reshape(B, channels // 4, h, w)


# --- Time features

TimeDtype = Literal["float32", "bfloat16", "float16"]


def rounded(timestep: float, dtype: TimeDtype) -> float:
    """timestep / 1000, both numbers rounded to `dtype`: the time that a diffusers model sees."""
    return _round(_round(timestep, dtype) / 1000.0, dtype)


def timestep_features(
    timestep: float, channels: int = 256, max_period: float = 10000.0, dtype: TimeDtype = "float32"
) -> NDArray[np.float64]:
    """Sinusoidal features of a time in 0 .. 1000, [channels]: all cosines, then all sines, in float64.

    Angle i is 1000 t / max_period^(2i/channels) (A. Vaswani et al., "Attention Is All You Need", 2017),
    where t is `rounded(timestep, dtype)`.
    """
    if not 0 <= timestep < math.inf or channels % 2:
        raise ValueError(f"time {timestep} has no {channels} features: 0 or more, and an even number of features")
    return sinusoids(1000.0 * rounded(timestep, dtype), channels, max_period)


def sinusoids(value: float, channels: int, max_period: float = 10000.0, shift: int = 0) -> NDArray[np.float64]:
    """All cosines, then all sines [channels] of angles value / max_period^(i / (channels/2 - shift)), in float64."""
    half = channels // 2
    frequencies = np.array([math.exp(-math.log(max_period) * i / (half - shift)) for i in range(half)])
    angles = value * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)])


def _round(value: float, dtype: TimeDtype) -> float:
    """Nearest value of `dtype`, ties to even; through float32, in which half-precision operations compute."""
    single = np.float32(value)
    if dtype == "float32":
        return float(single)
    if dtype == "float16":
        return float(np.float16(single))
    bits = int(single.view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))


# --- Rotary positions


def image_positions(shapes: Sequence[Shape], layered: bool = False) -> NDArray[np.int64]:
    """Positions (frame, row, column) of the tokens of all images in order, [L 3].

    Image i starts at frame i; rows and columns are centred: -(n - n // 2) .. n // 2 - 1. In the layered model
    the last image is the condition, at frame -1.
    """
    parts = []
    for index, (frames, rows, columns) in enumerate(shapes):
        condition = layered and index == len(shapes) - 1
        if condition and frames != 1:
            raise ValueError(f"the condition image has {frames} frames, expected 1")
        first = -1 if condition else index
        axes = np.meshgrid(first + np.arange(frames), _centred(rows), _centred(columns), indexing="ij")
        parts.append(np.stack(axes, axis=-1).reshape(-1, 3))
    return np.concatenate(parts).astype(np.int64)


def text_positions(shapes: Sequence[Shape], length: int, layered: bool = False) -> NDArray[np.int64]:
    """Positions of `length` text tokens, [S 3]: the same number on all axes, counted from past every image.

    Raises UsageError if the last position leaves the table of 4096.
    """
    start = max(max(rows // 2, columns // 2) for _, rows, columns in shapes)
    if layered:
        start = max(start, len(shapes) - 1)
    if start + length >= ROPE_POSITIONS:
        raise UsageError(
            f"{length} text tokens after position {start} do not fit below {ROPE_POSITIONS}; "
            "choose a smaller image or a shorter prompt"
        )
    return np.repeat(np.arange(start, start + length, dtype=np.int64)[:, None], 3, axis=1)


def _centred(count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) - (count - count // 2)


# --- Rotary tables


def rope_angles(positions: NDArray[np.int64], axes: Sequence[int], theta: float = 10000.0) -> NDArray[np.float64]:
    """Angles [L, sum(axes)/2] of positions [L A]: axis a of width d gives position / theta^(2i/d), i < d/2.

    Rotary position embedding: J. Su et al., "RoFormer", 2021.
    """
    if positions.ndim != 2 or positions.shape[1] != len(axes) or any(d % 2 for d in axes):
        raise ValueError(f"positions {positions.shape} do not go with rotary axes {tuple(axes)}")
    parts = []
    for a, d in enumerate(axes):
        frequencies = np.array([theta ** (-2 * i / d) for i in range(d // 2)])
        parts.append(positions[:, a, None] * frequencies)
    return np.concatenate(parts, axis=1)


def rope_table(
    positions: NDArray[np.int64], axes: Sequence[int], theta: float = 10000.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosine and sine of `rope_angles`, each [L, sum(axes)/2]."""
    angles = rope_angles(positions, axes, theta)
    return np.cos(angles), np.sin(angles)


def text_rope(length: int, head_dim: int, theta: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosine and sine for the text encoder, each [S, head_dim/2]; pair i is channels i and i + head_dim/2."""
    return rope_table(np.arange(length, dtype=np.int64)[:, None], (head_dim,), theta)


# --- Tiles


class Tile(NamedTuple):
    """One tile along one axis, in indices of the whole: what it reads and what it keeps."""

    read_start: int
    read_stop: int
    keep_start: int
    keep_stop: int


def tiles(size: int, tile: int, halo: int) -> list[Tile]:
    """Tiles that keep each of 0 .. size - 1 once, at most `tile` each, and read `halo` more on both sides."""
    if size < 1 or tile < 1 or halo < 0:
        raise ValueError(f"no tiles of {tile} with a halo of {halo} for a size of {size}")
    spans = [(start, min(start + tile, size)) for start in range(0, size, tile)]
    return [Tile(max(0, start - halo), min(size, stop + halo), start, stop) for start, stop in spans]


class Fade(NamedTuple):
    """One tile along one axis that overlaps its neighbours: what it reads, and the weight of each pixel it makes."""

    read_start: int
    read_stop: int
    weights: list[float]


def fades(size: int, tile: int, overlap: int, scale: int) -> list[Fade]:
    """Tiles of equal length, at most `tile`, that read `overlap` more on both sides; `scale` pixels for each index.

    Across a seam one tile's weights fall linearly while the other's rise, over all that both read: at each pixel the
    weights add up to 1.
    """
    even = math.ceil(size / math.ceil(size / tile))
    overlap = min(overlap, even // 2)
    return [_fade(part, size, overlap * scale, scale) for part in tiles(size, even, overlap)]


def _fade(tile: Tile, size: int, reach: int, scale: int) -> Fade:
    """`reach`: pixels from a seam to where one tile has the whole weight."""
    begin, end = tile.keep_start * scale, tile.keep_stop * scale
    pixels = [p + 0.5 for p in range(tile.read_start * scale, tile.read_stop * scale)]
    rise = [1.0 if tile.keep_start == 0 else min(1.0, (p - begin) / (2 * reach) + 0.5) for p in pixels]
    fall = [1.0 if tile.keep_stop == size else min(1.0, (end - p) / (2 * reach) + 0.5) for p in pixels]
    return Fade(tile.read_start, tile.read_stop, [a * b for a, b in zip(rise, fall, strict=True)])
