"""Functions of the models: dtypes, residual streams, modulation, RoPE, activations, guidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from mlx.core import array as Array

from qwenimg.backends.mlx.compile import fused
from qwenimg.backends.mlx.compile import on_gpu as on_gpu
from qwenimg.backends.mlx.ops import images
from qwenimg.common.runtime.observers import seen

Result = TypeVar("Result")
DTYPES = {name: getattr(mx, name) for name in ("float64", "float32", "bfloat16", "float16")}
FINITE = 80.0  # the largest exponent of activations: an infinite exponential would have a gradient that is not finite


def at_least_float32(x: Array) -> Array:
    return x if x.dtype in (mx.float32, mx.float64) else x.astype(mx.float32)


def pad_tokens(x: Array, length: int) -> Array:
    """Pad [B S C] with zeros at the end to [B length C]."""
    return mx.pad(x, [(0, 0), (0, length - x.shape[1]), (0, 0)])


def behind_zeros(x: Array, count: int) -> Array:
    """Put `count` tokens of zeros before x [B S C]."""
    return mx.pad(x, [(0, 0), (count, 0), (0, 0)]) if count else x


def repeated(x: Array, count: int) -> Array:
    """Repeat a batch of one `count` times, without a copy."""
    return mx.broadcast_to(x, (count, *x.shape[1:]))


def with_zeros(x: Array, count: int) -> Array:
    """Return a batch with zeros after its rows, `count` in all."""
    missing = count - x.shape[0]
    return mx.concatenate((x, mx.zeros((missing, *x.shape[1:]), x.dtype))) if missing else x


def with_rows(x: Array, places: Sequence[tuple[int, int]], rows: Array) -> Array:
    """Replace tokens of x [B S C], by (sequence, position), by `rows` [N C] in x's dtype."""
    x = mx.array(x)
    sequences, positions = zip(*places, strict=True)
    x[mx.array(sequences), mx.array(positions)] = rows.astype(x.dtype)
    return x


def channel_means(x: Array) -> Array:
    """Return the mean of each channel of an image: [B 1 1 C]."""
    return x.mean(axis=(1, 2), keepdims=True)


def stream(x: Array, dtype: mx.Dtype) -> Array:
    """Cast the start of a residual stream to the dtype that the policy gives it."""
    return x.astype(dtype)


@cache
def _modulated(dtype: mx.Dtype) -> Callable[..., Array]:
    """Return the modulation of a norm as one kernel, the cast to `dtype` included."""
    return fused(lambda normed, shift, scale: (normed * (1 + scale) + shift).astype(dtype))


def norm_modulate(x: Array, shift: Array, scale: Array, dtype: mx.Dtype, eps: float) -> Array:
    """Return LayerNorm(x) * (1 + scale) + shift for x [B L C], computed in the wider dtype of stream and modulation,
    and cast to `dtype` once at the end."""
    normed = mx.fast.layer_norm(x, None, None, eps)
    return seen("norm_modulate", "", _modulated(dtype)(normed, shift, scale))


def norm_scaled(x: Array, scale: Array, dtype: mx.Dtype, eps: float) -> Array:
    """Return LayerNorm(x) * (1 + scale) for x [B L C] and scale [1 1 C], computed in the wider dtype of both, and cast
    to `dtype` once at the end."""
    return seen("norm_scaled", "", _scaled(dtype)(mx.fast.layer_norm(x, None, None, eps), scale))


def unit_norm(x: Array, eps: float) -> Array:
    """Return LayerNorm(x) without gain and bias over the last axis, in float32, and float32 out."""
    return mx.fast.layer_norm(at_least_float32(x), None, None, eps)


def scaled(x: Array, scale: Array, dtype: mx.Dtype) -> Array:
    """Return x * (1 + scale) for x [B L C], computed in the wider dtype of both, and cast to `dtype` once at the
    end."""
    return seen("scaled", "", _scaled(dtype)(x, scale))


@cache
def _scaled(dtype: mx.Dtype) -> Callable[..., Array]:
    return fused(lambda x, scale: (x * (1 + scale)).astype(dtype))


def modulated(x: Array, shift: Array, scale: Array, dtype: mx.Dtype) -> Array:
    """Return x * (1 + scale) + shift for x [B L C], computed in the wider dtype of all, and cast to `dtype` once at the
    end."""
    return seen("modulated", "", _modulated(dtype)(x, shift, scale))


def gated(x: Array, gate: Array, update: Array) -> Array:
    """Return x + gate * update in x's dtype."""
    return seen("gated", "", _gated(x, gate, update))


@fused
def _gated(x: Array, gate: Array, update: Array) -> Array:
    return x + gate.astype(x.dtype) * update.astype(x.dtype)


def add(x: Array, update: Array) -> Array:
    """Return x + update in x's dtype."""
    return seen("add", "", _added(x, update))


def add_first(x: Array, update: Array) -> Array:
    """Add `update` [1 or B, L, C] to the first L tokens of x [B M C], in x's dtype."""
    L = update.shape[1]
    return add(x, update) if x.shape[1] == L else mx.concatenate((add(x[:, :L], update), x[:, L:]), axis=1)


residual = add  # MLX reuses by itself the memory of arrays that are not read again


@fused
def _added(x: Array, update: Array) -> Array:
    return x + update.astype(x.dtype)


def clipped(x: Array) -> Array:
    """Return x with infinities as float16's largest numbers, if it is in float16."""
    return mx.clip(x, -65504.0, 65504.0) if x.dtype == mx.float16 else x


def joined(first: Array, second: Array, dtype: mx.Dtype) -> Array:
    """Concatenate [B S ...] and [B L ...] to [B S+L ...] in `dtype`."""
    return mx.concatenate((first.astype(dtype), second.astype(dtype)), axis=1)


def apart(function: Callable[[Array], Result], x: Array, count: int) -> Result:
    """Return function(x), computed for each of `count` equal parts of the rows of x by itself: the bits of a product's
    rows may depend on how many there are."""
    parts = [function(part) for part in mx.split(x, count)]
    if isinstance(parts[0], mx.array):
        return cast(Result, mx.concatenate(cast(list[Array], parts), axis=0))
    return cast(Result, tuple(mx.concatenate(some, axis=0) for some in zip(*cast(list[Any], parts), strict=True)))


def stretched(x: Array, height: int, width: int) -> Array:
    """Stretch an image [B h w C] bilinearly to height x width, its corners kept, in float32, and float32 out."""
    return _stretched(_stretched(at_least_float32(x), 1, height), 2, width)


def _stretched(x: Array, axis: int, size: int) -> Array:
    count = x.shape[axis]
    places = np.arange(size) * ((count - 1) / max(size - 1, 1))
    low = np.minimum(places.astype(np.int32), max(count - 2, 0))
    share = mx.array((places - low).astype(np.float32)).reshape([size if i == axis else 1 for i in range(4)])
    below, above = (mx.take(x, mx.array(at), axis=axis) for at in (low, np.minimum(low + 1, count - 1)))
    return below + share * (above - below)


def chunks(modulation: Array, count: int, index: Array | None) -> tuple[Array, ...]:
    """Split modulation rows [R count*C] into `count` vectors: each [R 1 C] (R is 1 or the batch), or [1 L C] when
    `index` [L] gives each token its row."""
    parts = mx.split(modulation, count, axis=-1)
    return tuple(part[:, None] if index is None else part[index][None] for part in parts)


def rope_freqs(cos: Array, sin: Array) -> Array:
    """Stack the tables [L D/2] of `rotate_pairs` to [L 1 D/2 2], once for a run."""
    return mx.stack((cos, sin), axis=-1)[:, None]


def rotate_pairs(x: Array, freqs: Array, dtype: mx.Dtype) -> Array:
    """Apply RoPE to adjacent pairs of x [B L H D], in float32. Return the result in `dtype`."""
    return _rotated(dtype)(x, freqs)


@cache
def _rotated(dtype: mx.Dtype) -> Callable[..., Array]:
    @fused
    def rotated(x: Array, freqs: Array) -> Array:
        """Turn a pair (a, b) into (a cos - b sin, b cos + a sin), from the pair and the pair read backwards: one
        kernel, where two halves would need another one to join them."""
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        cos, sin = freqs[..., :1], freqs[..., 1:] * mx.array([-1.0, 1.0])
        return (pairs * cos + pairs[..., ::-1] * sin).astype(dtype).reshape(x.shape)

    return rotated


def rotate_halves(x: Array, cos: Array, sin: Array) -> Array:
    """Apply RoPE to the two halves of each head of x [B L H D], tables [L D/2]; in float32, and float32 out."""
    low, high = mx.split(at_least_float32(x), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return mx.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


@fused
def silu(x: Array) -> Array:
    wide = at_least_float32(x)
    return (wide / (1 + mx.exp(mx.minimum(-wide, FINITE)))).astype(x.dtype)


def damped(x: Array, update: Array, scale: float) -> Array:
    """Return x + scale * update."""
    return seen("add", "", x + update * scale)


def tanh(x: Array) -> Array:
    return mx.tanh(x)


def norm_silu(norm: Callable[[Array], Array], x: Array) -> Array:
    """Return SiLU of a norm of x."""
    result: Array = silu(norm(x))
    return result


def swiglu(gate: Array, values: Array) -> Array:
    """Return `values` times SiLU of `gate` (N. Shazeer, "GLU Variants Improve Transformer", 2020)."""
    result: Array = silu(gate) * values
    return result


@fused
def gelu(x: Array) -> Array:
    """Return GELU by its tanh approximation, 0.5 x (1 + tanh u), as x / (1 + exp(-2u)): one exponential costs less, and
    far below zero 1 + tanh u loses its digits."""
    wide = at_least_float32(x)
    exponent = -1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    return (wide / (1 + mx.exp(mx.minimum(exponent, FINITE)))).astype(x.dtype)


@fused
def gelu_erf(x: Array) -> Array:
    """Return GELU by its definition with the error function."""
    wide = at_least_float32(x)
    return (0.5 * wide * (1 + mx.erf(wide * 0.7071067811865476))).astype(x.dtype)


@fused
def quick_gelu(x: Array) -> Array:
    """Return x sigmoid(1.702 x), an approximation of GELU (D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units",
    2016)."""
    wide = at_least_float32(x)
    return (wide / (1 + mx.exp(mx.minimum(-1.702 * wide, FINITE)))).astype(x.dtype)


@fused
def _gated_gelu(values: Array, gate: Array) -> Array:
    return (at_least_float32(values) * gelu_erf(at_least_float32(gate))).astype(values.dtype)


@fused
def sigmoid_gated(x: Array, gate: Array) -> Array:
    """Return x times the sigmoid of `gate`, one for each value of x or for several."""
    return x * mx.sigmoid(gate)


def geglu(x: Array) -> Array:
    """Return the first half of x [... 2C] times GELU of the second, [... C] (N. Shazeer, "GLU Variants Improve
    Transformer", 2020)."""
    values, gate = mx.split(x, 2, axis=-1)
    return seen("geglu", "", _gated_gelu(values, gate))


def gated_gelu_erf(gate: Array, values: Array) -> Array:
    """Return `values` times GELU, by its definition, of `gate`. Neither is read again."""
    return seen("geglu", "", _gated_gelu(values, gate))


@cache
def _gelu_product(dtype: mx.Dtype) -> Callable[..., Array]:
    return fused(lambda gate, values: (gelu(at_least_float32(gate)) * at_least_float32(values)).astype(dtype))


def gated_gelu(gate: Array, values: Array, dtype: mx.Dtype) -> Array:
    """Return `values` times GELU, by its tanh approximation, of `gate`, in float32 and rounded to `dtype` once: the
    product may exceed float16 where neither factor does."""
    return seen("gated_gelu", "", _gelu_product(dtype)(gate, values))


def shift(x: Array, rows: Array) -> Array:
    """Add a number per channel [1 or B, C] to an image [B h w C], in the image's dtype."""
    return seen("shift", "", x + rows.astype(x.dtype)[:, None, None])


def pad_right_bottom(x: Array) -> Array:
    """Pad an image with one row of zeros below and one column to the right."""
    return mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])


def averaged_pairs(x: Array) -> Array:
    """Return the means of 2 x 2 pixels, of fewer at an odd edge: [B h w C] -> [B ceil(h/2) ceil(w/2) C]."""
    B, h, w, C = x.shape
    x = mx.pad(x, [(0, 0), (0, h % 2), (0, w % 2), (0, 0)], mode="edge") if h % 2 or w % 2 else x
    return x.reshape(B, (h + 1) // 2, 2, (w + 1) // 2, 2, C).mean((2, 4))


def averaged_patches(x: Array, channels: int, frames: int) -> Array:
    """Return an image with half the sides, [B 2h 2w C] -> [B h w channels]: each channel is the mean of equal groups of
    values in the order (c, frame, dy, dx). x is the last of the frames; earlier ones are zeros."""
    y = images.patches(x)
    y = y.reshape(*y.shape[:3], -1, 1, 4)
    y = mx.pad(y, [(0, 0)] * 4 + [(frames - 1, 0), (0, 0)]) if frames > 1 else y
    return y.reshape(*y.shape[:3], channels, -1).mean(-1)


def averaged_channels(x: Array, channels: int) -> Array:
    """Return an image [B h w C] -> [B h w channels], each channel the mean of as many neighbours."""
    return x.reshape(*x.shape[:3], channels, -1).mean(-1)


def repeated_channels(x: Array, count: int) -> Array:
    """Return an image with each channel `count` times, [B h w C] -> [B h w count*C]."""
    return mx.repeat(x, count, axis=-1)


def spread_channels(x: Array, channels: Sequence[int]) -> Array:
    """Return an image with twice the sides, [B h w C] -> [B 2h 2w C']. `channels` [4C'] selects the channel of x for
    each pixel of a patch, in the order (c, dy, dx)."""
    return images.unpatched(x[..., mx.array(channels)])


def guide(conditional: Array, unconditional: Array, scale: float) -> Array:
    """Return u + scale (c - u) with each token [C] rescaled to the length of c, in float32."""
    c, u = at_least_float32(conditional), at_least_float32(unconditional)
    combined = u + scale * (c - u)
    return combined * (_length(c) / _length(combined))


def rescale(guided: Array, conditional: Array, share: float) -> Array:
    """Return `guided` with its standard deviation moved by the fraction `share` towards `conditional`'s, both [B C h
    w], in float32 (S. Lin et al., "Common Diffusion Noise Schedules and Sample Steps are Flawed", 2023)."""
    g, c = at_least_float32(guided), at_least_float32(conditional)
    ratio = mx.std(c, axis=(1, 2, 3), keepdims=True, ddof=1) / mx.std(g, axis=(1, 2, 3), keepdims=True, ddof=1)
    return g * (share * ratio + (1 - share))


def shortened(guided: Array, conditional: Array, most: float, each: bool = False) -> Array:
    """Return `guided` with at most `most` times the length of `conditional`, both as one vector, or token by token
    [C] if `each`, in float32."""
    g, c = at_least_float32(guided), at_least_float32(conditional)
    ratio = _length(c) / _length(g) if each else mx.sqrt(mx.sum(mx.square(c)) / mx.sum(mx.square(g)))
    return g * mx.minimum(most * ratio, 1)


def _length(x: Array) -> Array:
    return mx.sqrt(mx.sum(mx.square(x), axis=-1, keepdims=True))
