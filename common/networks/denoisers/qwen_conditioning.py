"""Inputs of the transformer that are made once per run: RoPE tables, time features and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.qwen_dit import ROPE_THETA, TIME_CHANNELS, QwenDiTConfig
from qwenimg.common.numbers import rope
from qwenimg.common.numbers.timesteps import TimeDtype, timestep_features

Shape = tuple[int, int, int]


def image_and_text_rope(config: QwenDiTConfig, shapes: Sequence[Shape], length: int) -> tuple[rope.Table, rope.Table]:
    """Return (cos, sin) [L, D/2] for images of `shapes` (frames, rows, columns), and [S, D/2] for `length` text tokens.
    Raises UsageError if they do not fit the model's table of positions."""
    layered, axes = config.use_layer3d_rope, config.axes_dims_rope
    image = rope.image_positions(shapes, layered)
    text = rope.text_positions(shapes, length, layered)
    return rope.rope_table(image, axes, ROPE_THETA), rope.rope_table(text, axes, ROPE_THETA)


def time_rows(config: QwenDiTConfig, timesteps: Sequence[float], dtype: TimeDtype) -> NDArray[np.float64]:
    """Return the sinusoids [T, 256] of a schedule's timesteps (0..1000), with timestep 0 as the last row for a model
    with `zero_cond_t`. A timestep is first rounded to `dtype`: float32, or the transformer's as diffusers does."""
    times = [*timesteps, 0.0] if config.zero_cond_t else list(timesteps)
    return np.stack([timestep_features(time, TIME_CHANNELS, dtype=dtype) for time in times])


def key_mask(lengths: Sequence[int], image_tokens: int) -> NDArray[np.bool_] | None:
    """Return [B, 1, 1, S+L], True where a key counts, for padded texts of `lengths`; None if none is padded."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    text = np.arange(longest)[None] < np.asarray(lengths)[:, None]
    image = np.ones((len(lengths), image_tokens), dtype=bool)
    return np.concatenate((text, image), axis=1)[:, None, None]


def zero_index(config: QwenDiTConfig, shapes: Sequence[Shape]) -> NDArray[Any] | None:
    """Return [L] for a model with `zero_cond_t`: 0 for tokens of the generated image, 1 for tokens of reference images,
    which the model sees at timestep 0. None if every token has the step's own timestep."""
    if not config.zero_cond_t or len(shapes) == 1:
        return None
    counts = [frames * rows * columns for frames, rows, columns in shapes]
    return np.repeat(np.asarray([0] + [1] * (len(counts) - 1)), counts)
