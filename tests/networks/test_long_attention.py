"""Attention of one head over as many tokens as an image of a million pixels has latents, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import torch
from support.relative import relative

from qwenimg.backends.mlx import ops as mlx_ops
from qwenimg.backends.torch import ops

LIMIT = 8e-7  # relative L2: 13 roundings. In one run of keys MLX is 2.9e-6 off on a CPU, and more with each further key
QUERIES, WIDTH = 64, 18


@pytest.mark.parametrize("keys", [2048, 2049, 16384, 16280])
@pytest.mark.parametrize("much", [1.0, 40.0], ids=["even", "peaked"])
def test_equals_float64(keys: int, much: float) -> None:
    rng = np.random.default_rng(keys)
    q = much * rng.standard_normal((1, QUERIES, WIDTH), np.float32)
    k, v = (rng.standard_normal((1, keys, WIDTH), np.float32) for _ in range(2))
    scores = q[0].astype(np.float64) @ k[0].T.astype(np.float64) / WIDTH**0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    exact = (weights / weights.sum(axis=1, keepdims=True) @ v[0])[None]
    with mx.stream(mx.cpu):
        there = np.array(mlx_ops.single_head_attention(*map(mx.array, (q, k, v))))
    here = ops.single_head_attention(*map(torch.from_numpy, (q, k, v))).numpy()
    limit = LIMIT if much == 1 else 2e-6  # scores near 100 are rounded to 8e-6
    errors = {"mlx": relative(there, exact), "cpu": relative(here, exact)}
    print(f"{keys} keys: {errors} (limit {limit})")
    assert max(errors.values()) <= limit


@pytest.mark.parametrize("heads", [1, 3])
def test_attention_of_heads_equals_float64(heads: int) -> None:
    rng = np.random.default_rng(heads)
    q, k, v = (rng.standard_normal((2, length, heads, WIDTH), np.float32) for length in (5, 16384, 16384))
    scores = np.einsum("blhd,bshd->bhls", q.astype(np.float64), k) / WIDTH**0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    exact = np.einsum("bhls,bshd->blhd", weights / weights.sum(axis=-1, keepdims=True), v).reshape(2, 5, -1)
    with mx.stream(mx.cpu):
        error = relative(np.array(mlx_ops.attention(*map(mx.array, (q, k, v)))), exact)
    print(f"{heads} heads: {error:.1e}")
    assert error <= LIMIT
