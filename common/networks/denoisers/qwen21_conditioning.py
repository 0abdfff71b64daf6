"""Inputs of Qwen-Image-2.1's transformer that are made in numpy: positions, RoPE tables, runs of tokens, sinusoids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.networks.denoisers.qwen21_dit import ROPE_THETA, SLOT, TIME_CHANNELS, Qwen21Config
from qwenimg.common.numbers import rope
from qwenimg.common.numbers.timesteps import TimeDtype, timestep_features

Grid = tuple[int, int]  # rows and columns of latent tokens
SlotPlace = tuple[int, int, int]  # of a reference: its first slot among the text states, rows and columns of slots

POSITIONS = 8192  # of text and of images among the text: the published model's table ends there


class TokenRun(NamedTuple):
    """A run of tokens: a stretch of text, or one reference image. Each token attends to all earlier runs and to its own
    run (only to its earlier tokens if `causal`)."""

    start: int
    end: int
    causal: bool


class PromptLayout(NamedTuple):
    """The tokens before an image, in the order of the prompt, and the positions (frame, row, column) of both."""

    runs: tuple[TokenRun, ...]
    context: NDArray[np.int64]  # [P 3]
    image: NDArray[np.int64]  # [L 3]


def layout(length: int, places: Sequence[SlotPlace], grid: Grid) -> PromptLayout:
    """Return the layout of `length` text states, in which references stand at `places`, and of an image of `grid`
    tokens. Raises UsageError for text that leaves the table of positions."""
    runs, positions, number = list[TokenRun](), list[NDArray[np.int64]](), 0
    for block in _blocks(length, places):
        start = sum(map(len, positions))
        positions.append(_text(number, block) if isinstance(block, int) else _image(number, block))
        runs.append(TokenRun(start, start + len(positions[-1]), isinstance(block, int)))
        number += block if isinstance(block, int) else max(block)
    if number >= POSITIONS:
        raise UsageError(
            f"{length} text tokens with {len(places)} references reach position {number:,}, the model's table has "
            f"{POSITIONS:,}; choose a shorter prompt"
        )
    return PromptLayout(tuple(runs), np.concatenate(positions), _image(number, grid))


def _blocks(length: int, places: Sequence[SlotPlace]) -> Iterator[int | Grid]:
    """Yield the number of tokens of each stretch of text, and the grid of each reference."""
    token = 0
    for start, rows, columns in places:
        if start > token:
            yield start - token
        yield SLOT * rows, SLOT * columns
        token = start + rows * columns
    if length > token:
        yield length - token


def _text(first: int, count: int) -> NDArray[np.int64]:
    return np.repeat(np.arange(first, first + count, dtype=np.int64)[:, None], 3, axis=1)


def _image(frame: int, grid: Grid) -> NDArray[np.int64]:
    rows, columns = map(rope.centred, grid)
    return np.stack(np.meshgrid([frame], rows, columns, indexing="ij"), axis=-1).reshape(-1, 3).astype(np.int64)


def tables(config: Qwen21Config, layout: PromptLayout) -> tuple[rope.Table, rope.Table]:
    """Return (cos, sin) [L, D/2] for the image, and [P, D/2] for the tokens before it."""
    axes = config.axes_dims_rope
    return rope.rope_table(layout.image, axes, ROPE_THETA), rope.rope_table(layout.context, axes, ROPE_THETA)


def time_row(timestep: float, dtype: TimeDtype) -> NDArray[np.float64]:
    """Return the sinusoid [1, 256] of a schedule's timestep (0..1000)."""
    return timestep_features(timestep, TIME_CHANNELS, dtype=dtype)[None]
