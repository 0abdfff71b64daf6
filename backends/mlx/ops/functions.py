"""Functions of the models: dtypes, streams, modulation, RoPE, activations, guidance."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import mlx.core as mx
from mlx.core import array as Array

from qwenimg.backends.mlx.compile import fused
from qwenimg.backends.mlx.compile import on_gpu as on_gpu
from qwenimg.common.runtime.observers import seen

DTYPES = {name: getattr(mx, name) for name in ("float64", "float32", "bfloat16", "float16")}


def at_least_float32(x: Array) -> Array:
    return x if x.dtype in (mx.float32, mx.float64) else x.astype(mx.float32)


def pad_tokens(x: Array, length: int) -> Array:
    """[B S C] -> [B length C] with zeros at the end."""
    return mx.pad(x, [(0, 0), (0, length - x.shape[1]), (0, 0)])


def repeated(x: Array, count: int) -> Array:
    """A batch of one as a batch of `count`, without a copy."""
    return mx.broadcast_to(x, (count, *x.shape[1:]))


def stream(x: Array, dtype: mx.Dtype) -> Array:
    """The start of a residual stream in the dtype that the policy gives it."""
    return x.astype(dtype)


@cache
def _modulated(dtype: mx.Dtype) -> Callable[..., Array]:
    """With the cast inside, so that the chain is one kernel."""
    return fused(lambda normed, shift, scale: (normed * (1 + scale) + shift).astype(dtype))


def norm_modulate(x: Array, shift: Array, scale: Array, dtype: mx.Dtype, eps: float) -> Array:
    """LayerNorm(x) * (1 + scale) + shift for x [B L C], in the wider dtype of stream and modulation, cast to `dtype`
    once at the end."""
    normed = mx.fast.layer_norm(x, None, None, eps)
    return seen("norm_modulate", "", _modulated(dtype)(normed, shift, scale))


def gated(x: Array, gate: Array, update: Array) -> Array:
    """x + gate * update in x's dtype."""
    return seen("gated", "", _gated(x, gate, update))


@fused
def _gated(x: Array, gate: Array, update: Array) -> Array:
    return x + gate.astype(x.dtype) * update.astype(x.dtype)


def add(x: Array, update: Array) -> Array:
    """x + update in x's dtype."""
    return seen("add", "", _added(x, update))


residual = add  # MLX takes over by itself what nobody reads again


@fused
def _added(x: Array, update: Array) -> Array:
    return x + update.astype(x.dtype)


def joined(first: Array, second: Array, dtype: mx.Dtype) -> Array:
    """[B S ...] and [B L ...] as [B S+L ...] in `dtype`."""
    return mx.concatenate((first.astype(dtype), second.astype(dtype)), axis=1)


def chunks(modulation: Array, count: int, index: Array | None) -> tuple[Array, ...]:
    """`count` vectors out of modulation rows [R count*C]: each [R 1 C] (R is 1, or the batch), or [1 L C] when
    `index` [L] gives each token its row."""
    parts = mx.split(modulation, count, axis=-1)
    return tuple(part[:, None] if index is None else part[index][None] for part in parts)


def turns(cos: Array, sin: Array) -> Array:
    """The tables [L D/2] of `rotate_pairs` as [L 1 D/2 2], made once for a run."""
    return mx.stack((cos, sin), axis=-1)[:, None]


def rotate_pairs(x: Array, turns: Array, dtype: mx.Dtype) -> Array:
    """RoPE on adjacent pairs: x [B L H D]; computed in float32, given in `dtype`."""
    return _rotated(dtype)(x, turns)


@cache
def _rotated(dtype: mx.Dtype) -> Callable[..., Array]:
    @fused
    def rotated(x: Array, turns: Array) -> Array:
        """A pair (a, b) turns into (a cos - b sin, b cos + a sin), by the pair and the pair read backwards: one kernel,
        where two halves would have to be joined by another."""
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        cos, sin = turns[..., :1], turns[..., 1:] * mx.array([-1.0, 1.0])
        return (pairs * cos + pairs[..., ::-1] * sin).astype(dtype).reshape(x.shape)

    return rotated


def rotate_halves(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE on the two halves of the head: x [B L H D], tables [L D/2]; in float32, and float32 out."""
    low, high = mx.split(at_least_float32(x), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return mx.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


@fused
def silu(x: Array) -> Array:
    wide = at_least_float32(x)
    return (wide * mx.sigmoid(wide)).astype(x.dtype)


def norm_silu(norm: Callable[[Array], Array], x: Array) -> Array:
    """SiLU of a norm of x."""
    made: Array = silu(norm(x))
    return made


def swiglu(gate: Array, values: Array) -> Array:
    """`values` times SiLU of `gate` (N. Shazeer, "GLU Variants Improve Transformer", 2020)."""
    made: Array = silu(gate) * values
    return made


@fused
def gelu(x: Array) -> Array:
    """GELU by its tanh approximation."""
    wide = at_least_float32(x)
    inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + mx.tanh(inner))).astype(x.dtype)


@fused
def gelu_erf(x: Array) -> Array:
    """GELU as it is defined, by the error function."""
    wide = at_least_float32(x)
    return (0.5 * wide * (1 + mx.erf(wide * 0.7071067811865476))).astype(x.dtype)


@fused
def quick_gelu(x: Array) -> Array:
    """x sigmoid(1.702 x), an approximation of GELU (D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", 2016)."""
    wide = at_least_float32(x)
    return (wide * mx.sigmoid(1.702 * wide)).astype(x.dtype)


@fused
def _gated_gelu(values: Array, gate: Array) -> Array:
    return (at_least_float32(values) * gelu_erf(at_least_float32(gate))).astype(values.dtype)


def geglu(x: Array) -> Array:
    """[... 2C] -> [... C]: the first half times GELU of the second (N. Shazeer, "GLU Variants Improve Transformer",
    2020)."""
    values, gate = mx.split(x, 2, axis=-1)
    return seen("geglu", "", _gated_gelu(values, gate))


def shift(x: Array, rows: Array) -> Array:
    """An image [B h w C] and a number per channel [1 or B, C], in the image's dtype."""
    return seen("shift", "", x + rows.astype(x.dtype)[:, None, None])


def pad_right_bottom(x: Array) -> Array:
    """One row and one column of zeros, below and to the right."""
    return mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])


def guide(conditional: Array, unconditional: Array, scale: float) -> Array:
    """u + scale (c - u), each token [C] rescaled to the length of c, in float32."""
    c, u = at_least_float32(conditional), at_least_float32(unconditional)
    combined = u + scale * (c - u)
    return combined * (_length(c) / _length(combined))


def rescale(guided: Array, conditional: Array, share: float) -> Array:
    """`guided` with its deviation moved by `share` towards that of `conditional`, both [B C h w], in float32 (S. Lin et
    al., "Common Diffusion Noise Schedules and Sample Steps are Flawed", 2023)."""
    g, c = at_least_float32(guided), at_least_float32(conditional)
    ratio = mx.std(c, axis=(1, 2, 3), keepdims=True, ddof=1) / mx.std(g, axis=(1, 2, 3), keepdims=True, ddof=1)
    return g * (share * ratio + (1 - share))


def _length(x: Array) -> Array:
    return mx.sqrt(mx.sum(mx.square(x), axis=-1, keepdims=True))


def product_seconds(side: int, dtype: mx.Dtype) -> float:
    """Of one product of two matrices side x side."""
    x = mx.ones((side, side), dtype)
    mx.eval(x)
    begun = time.perf_counter()
    mx.eval(mx.matmul(x, x))
    return time.perf_counter() - begun
