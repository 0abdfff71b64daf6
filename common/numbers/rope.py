"""Rotary position embeddings: positions of image and text tokens, and the tables of their angles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.numbers.sizes import Shape

Positions = NDArray[np.int64] | NDArray[np.float64]
Table = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Cosines and sines [L D/2]."""
ROPE_POSITIONS = 4096  # rows of the published model's rotary table


# Positions


def image_positions(shapes: Sequence[Shape], layered: bool = False) -> NDArray[np.int64]:
    """Return the positions (frame, row, column) of the tokens of all images in order, [L 3].

    Image i starts at frame i; rows and columns are centred: -(n - n // 2) .. n // 2 - 1. In the layered model the last
    image is the condition, at frame -1. Raises ValueError if the condition has several frames.
    """
    parts = []
    for index, (frames, rows, columns) in enumerate(shapes):
        condition = layered and index == len(shapes) - 1
        if condition and frames != 1:
            raise ValueError(f"the condition image has {frames} frames, expected 1")
        first = -1 if condition else index
        axes = np.meshgrid(first + np.arange(frames), centred(rows), centred(columns), indexing="ij")
        parts.append(np.stack(axes, axis=-1).reshape(-1, 3))
    return np.concatenate(parts).astype(np.int64)


def text_positions(shapes: Sequence[Shape], length: int, layered: bool = False) -> NDArray[np.int64]:
    """Return the positions of `length` text tokens, [S 3]: the same number on all axes, counted from past every image.

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


def picture_positions(length: int, pictures: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
    """Return the positions (time, row, column) of `length` tokens of a language model with pictures, [S 3]. `pictures`:
    (first token, rows, columns) of each picture, in order. A text token has one number on all three axes. A picture has
    one time, and its rows and columns count up from it; the text after it continues from the picture's longer side (P.
    Wang et al., "Qwen2-VL", 2024)."""
    positions = np.empty((length, 3), np.int64)
    token = number = 0
    for start, rows, columns in [*pictures, (length, 0, 0)]:
        positions[token:start] = (number + np.arange(start - token))[:, None]
        number += start - token
        token = start + rows * columns
        places = np.indices((1, rows, columns)).reshape(3, -1).T
        positions[start:token] = number + places
        number += max(rows, columns)
    return positions


def text_at(numbers: Sequence[int]) -> NDArray[np.int64]:
    """Return the positions (time, row, column) of text tokens with these `numbers`, [S 3]."""
    return np.repeat(np.array(numbers, np.int64)[:, None], 3, axis=1)


def centred(count: int) -> NDArray[np.int64]:
    """Return the positions of `count` rows or columns around zero: -(n - n // 2) .. n // 2 - 1."""
    return np.arange(count, dtype=np.int64) - (count - count // 2)


# Tables, in float64, so that both backends round the same values


def rope_angles(positions: Positions, axes: Sequence[int], theta: float = 10000.0) -> NDArray[np.float64]:
    """Return the angles [L, sum(axes)/2] of positions [L A]: axis a of width d gives position / theta^(2i/d), i < d/2.

    Rotary position embedding: J. Su et al., "RoFormer", 2021. Raises ValueError for positions of another number of
    axes, or an odd width.
    """
    if positions.ndim != 2 or positions.shape[1] != len(axes) or any(d % 2 for d in axes):
        raise ValueError(f"positions {positions.shape} do not go with rotary axes {tuple(axes)}")
    parts = []
    for a, d in enumerate(axes):
        frequencies = np.array([theta ** (-2 * i / d) for i in range(d // 2)])
        parts.append(positions[:, a, None] * frequencies)
    return np.concatenate(parts, axis=1)


def rope_table(positions: Positions, axes: Sequence[int], theta: float = 10000.0) -> Table:
    """Return cosine and sine of `rope_angles`, each [L, sum(axes)/2]."""
    angles = rope_angles(positions, axes, theta)
    return np.cos(angles), np.sin(angles)


def section_axes(sections: Sequence[int]) -> list[int]:
    """Return the axis of each angle: axis a takes the next `sections[a]` of them."""
    return [axis for axis, count in enumerate(sections) for _ in range(count)]


def interleaved_axes(sections: Sequence[int]) -> list[int]:
    """Return the axis of each angle: the axes take them in turn. Axis a > 0 stops after `sections[a]` of them, and axis
    0 has all that the others leave."""
    turns = len(sections)
    return [i % turns if i < turns * sections[i % turns] else 0 for i in range(sum(sections))]
