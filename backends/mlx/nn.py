"""The operations of the MLX models. Every cast of the backend is here or in `load.py`.

A linear layer or a convolution computes in the dtype of its weight, which `load.py` chose from the precision policy:
its input is cast to that dtype. What the policy calls an FP32 place is float32 *at least*.

Shapes: B batch, L tokens, H heads, D head dim, C channels. Images are [B h w C], as MLX convolves them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps

import mlx.core as mx
import mlx.nn
import numpy as np

Array = mx.array

DTYPES = {name: getattr(mx, name) for name in ("float64", "float32", "bfloat16", "float16")}
SCORE_BYTES = 2**28  # attention without a fused kernel runs over chunks of queries whose scores take at most this much
FUSED_HEADS = (64, 72, 80, 96, 128)  # head widths for which a GPU has a fused attention kernel

_observers: list[Callable[[str, str, Array], None]] = []


@contextmanager
def observe(observer: Callable[[str, str, Array], None]) -> Iterator[None]:
    """Calls observer(operation, parameter path, result) after every operation below, for probes and traces."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _seen(operation: str, path: str, result: Array) -> Array:
    for observer in _observers:
        observer(operation, path, result)
    return result


def on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def _fused(function: Callable[..., Array]) -> Callable[..., Array]:
    """`function` as one kernel where MLX compiles cheaply. On a CPU each kernel would call the system's compiler."""
    compiled = cache(lambda: mx.compile(function) if on_gpu() and "MLX_DISABLE_COMPILE" not in os.environ else function)

    @wraps(function)
    def call(*arguments: Array) -> Array:
        return compiled()(*arguments)

    return call


def at_least_float32(x: Array) -> Array:
    return x if x.dtype in (mx.float32, mx.float64) else x.astype(mx.float32)


def table(values: np.ndarray, dtype: mx.Dtype) -> Array:
    """Numbers that were made in numpy, as float32 whatever `dtype`: float64 is the torch twin's alone."""
    return mx.array(values.astype(np.float32))


# Layers


class Linear(mlx.nn.Module):
    path = ""

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.weight = mx.zeros((outputs, inputs))
        if bias:
            self.bias = mx.zeros((outputs,))

    def __call__(self, x: Array) -> Array:
        """[... in] -> [... out] in the weight's dtype, the bias added before the one rounding."""
        x = x.astype(self.weight.dtype)
        y = mx.addmm(self.bias, x, self.weight.T) if "bias" in self else mx.matmul(x, self.weight.T)
        return _seen("linear", self.path, y)


class Embedding(mlx.nn.Module):
    path = ""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = mx.zeros((count, width))

    def __call__(self, ids: Array) -> Array:
        return _seen("embedding", self.path, self.weight[ids])


class RMSNorm(mlx.nn.Module):
    path = ""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = mx.zeros((width,))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """x / rms(x) * weight over the last axis, in float32, and float32 out."""
        x = at_least_float32(x)
        return _seen("rms_norm", self.path, mx.fast.rms_norm(x, self.weight.astype(x.dtype), self.eps))


class Conv2d(mlx.nn.Module):
    path = ""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0):
        super().__init__()
        self.weight = mx.zeros((outputs, kernel, kernel, inputs))
        self.bias = mx.zeros((outputs,))
        self.stride, self.padding = stride, padding

    def __call__(self, x: Array) -> Array:
        """[B h w in] -> [B h' w' out] in the weight's dtype, padded by half the kernel unless strided."""
        dtype = _conv_dtype(self.weight)
        y = mx.conv2d(x.astype(dtype), self.weight.astype(dtype), stride=self.stride, padding=self.padding)
        return _seen("conv2d", self.path, (y + self.bias.astype(dtype)).astype(self.weight.dtype))


class ChannelNorm(mlx.nn.Module):
    path = ""

    def __init__(self, channels: int):
        super().__init__()
        self.gamma = mx.zeros((channels,))

    def __call__(self, x: Array) -> Array:
        """x / |x| * sqrt(C) * gamma with |x| the length over channels at each pixel, in float32; x's dtype out."""
        wide = at_least_float32(x)
        squares = mx.maximum(mx.sum(mx.square(wide), axis=-1, keepdims=True), 1e-24)
        scale = mx.rsqrt(squares) * x.shape[-1] ** 0.5
        return _seen("channel_norm", self.path, (wide * scale * self.gamma.astype(wide.dtype)).astype(x.dtype))


class LayerNorm(mlx.nn.Module):
    path = ""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = mx.zeros((width,))
        self.bias = mx.zeros((width,))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """(x - mean) / deviation * weight + bias over the last axis, in float32; the weight's dtype out."""
        x = at_least_float32(x)
        weight, bias = self.weight.astype(x.dtype), self.bias.astype(x.dtype)
        y = mx.fast.layer_norm(x, weight, bias, self.eps)
        return _seen("layer_norm", self.path, y.astype(self.weight.dtype))


class GroupNorm(mlx.nn.Module):
    path = ""

    def __init__(self, groups: int, channels: int, eps: float):
        super().__init__()
        self.weight = mx.zeros((channels,))
        self.bias = mx.zeros((channels,))
        self.groups, self.eps = groups, eps

    def __call__(self, x: Array) -> Array:
        """The same over each group of channels and all pixels of [B h w C], in float32; the weight's dtype out."""
        B, h, w, C = x.shape
        grouped = at_least_float32(x).reshape(B, h * w, self.groups, -1).swapaxes(1, 2)
        normed = mx.fast.layer_norm(grouped.reshape(B, self.groups, -1), None, None, self.eps)
        normed = normed.reshape(grouped.shape).swapaxes(1, 2).reshape(B, h, w, C)
        weight, bias = self.weight.astype(normed.dtype), self.bias.astype(normed.dtype)
        return _seen("group_norm", self.path, (normed * weight + bias).astype(self.weight.dtype))


def _conv_dtype(weight: Array) -> mx.Dtype:
    """What a convolution computes in. Metal's Winograd kernels for 3x3 round in the storage dtype, which costs 16 bit a
    thousand times the error of a direct convolution: there, those run in float32."""
    return mx.float32 if on_gpu() and weight.itemsize == 2 and weight.shape[1] == 3 else weight.dtype


# Functions


def pad_tokens(x: Array, length: int) -> Array:
    """[B S C] -> [B length C] with zeros at the end."""
    return mx.pad(x, [(0, 0), (0, length - x.shape[1]), (0, 0)])


def stream(x: Array, dtype: mx.Dtype) -> Array:
    """The start of a residual stream in the dtype that the policy gives it."""
    return x.astype(dtype)


@_fused
def _modulated(normed: Array, shift: Array, scale: Array) -> Array:
    return normed * (1 + scale) + shift


def norm_modulate(x: Array, shift: Array, scale: Array, dtype: mx.Dtype, eps: float) -> Array:
    """LayerNorm(x) * (1 + scale) + shift for x [B L C], in the wider dtype of stream and modulation, cast to `dtype`
    once at the end."""
    normed = mx.fast.layer_norm(x, None, None, eps)
    return _seen("norm_modulate", "", _modulated(normed, shift, scale).astype(dtype))


def gated(x: Array, gate: Array, update: Array) -> Array:
    """x + gate * update in x's dtype."""
    return _seen("gated", "", x + gate.astype(x.dtype) * update.astype(x.dtype))


def add(x: Array, update: Array) -> Array:
    """x + update in x's dtype."""
    return _seen("add", "", x + update.astype(x.dtype))


def chunks(modulation: Array, count: int, index: Array | None) -> tuple[Array, ...]:
    """`count` vectors out of modulation rows [R count*C]: each [R 1 C] (R is 1, or the batch), or [1 L C] when
    `index` [L] gives each token its row."""
    parts = mx.split(modulation, count, axis=-1)
    return tuple(part[:, None] if index is None else part[index][None] for part in parts)


@_fused
def rotate_pairs(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE on adjacent pairs: x [B L H D], tables [L D/2]; float32 in and out."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, None], sin[:, None]
    return mx.stack((even * cos - odd * sin, even * sin + odd * cos), axis=-1).reshape(x.shape)


def rotate_halves(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE on the two halves of the head: x [B L H D], tables [L D/2]; in float32, and float32 out."""
    low, high = mx.split(at_least_float32(x), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return mx.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def attention(q: Array, k: Array, v: Array, mask: Array | None = None, causal: bool = False) -> Array:
    """softmax(q k^T / sqrt(D)) v for q [B L H D] and k, v [B S Hk D] -> [B L H*D] in v's dtype.

    Scores and softmax are float32: by the fused kernel where there is one, else by computing in float32. `mask`
    [B 1 1 S] is True where a key counts. Fewer key heads than query heads are shared.
    """
    D, scale = v.shape[-1], q.shape[-1] ** -0.5
    fused = _has_kernel(v)
    dtype, width = (v.dtype, padded_width(D)) if fused else (mx.float32, D)
    q, k, v_ = (pad_heads(x.astype(v.dtype).astype(dtype), width).transpose(0, 2, 1, 3) for x in (q, k, v))
    out = _attend(q, k, v_, scale, "causal") if causal else _in_chunks(q, k, v_, scale, fused, mask)
    return _seen("attention", "", out[..., :D].astype(v.dtype).transpose(0, 2, 1, 3).flatten(2))


def spatial_attention(qkv: Array) -> Array:
    """Single-head attention over all pixels: [B h w 3C] -> [B h w C]."""
    B, h, w, _ = qkv.shape
    q, k, v = mx.split(qkv.reshape(B, h * w, -1), 3, axis=-1)
    return single_head_attention(q, k, v).reshape(B, h, w, -1)


def single_head_attention(q: Array, k: Array, v: Array) -> Array:
    """[B L C] each -> [B L C], in chunks of queries so that the scores of all pairs are never in memory."""
    dtype = q.dtype
    q, k, v = (at_least_float32(x)[:, None] for x in (q, k, v))
    out = _in_chunks(q, k, v, q.shape[-1] ** -0.5, False, None)
    return _seen("attention", "", out.astype(dtype)[:, 0])


def padded_width(width: int) -> int:
    """The narrowest head with a fused kernel that holds one of `width`, or `width` where none does."""
    return next((fused for fused in FUSED_HEADS if fused >= width), width)


def pad_heads(x: Array, width: int) -> Array:
    """[B L H D] -> [B L H width] with zeros, which change no score and whose own sums are cut off: exact."""
    return mx.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) if width > x.shape[-1] else x


def _has_kernel(v: Array) -> bool:
    """Metal has one for widths up to 128 in every dtype; MLX's CUDA build only in 16 bit."""
    return on_gpu() and v.shape[-1] <= FUSED_HEADS[-1] and (mx.metal.is_available() or v.itemsize == 2)


def _in_chunks(q: Array, k: Array, v: Array, scale: float, fused: bool, mask: Array | None) -> Array:
    """[B H L D] -> [B H L D] over chunks of queries, unless a fused kernel keeps the scores out of memory."""
    B, H, L, _ = q.shape
    rows = L if fused else max(1, SCORE_BYTES // (4 * B * H * k.shape[2]))
    parts = []
    for start in range(0, L, rows):
        parts.append(_attend(q[:, :, start : start + rows], k, v, scale, mask))
        if rows < L:
            mx.eval(parts[-1])
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]


def _attend(q: Array, k: Array, v: Array, scale: float, mask: Array | str | None) -> Array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


@_fused
def silu(x: Array) -> Array:
    wide = at_least_float32(x)
    return (wide * mx.sigmoid(wide)).astype(x.dtype)


@_fused
def gelu(x: Array) -> Array:
    """GELU by its tanh approximation."""
    wide = at_least_float32(x)
    inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + mx.tanh(inner))).astype(x.dtype)


@_fused
def gelu_erf(x: Array) -> Array:
    """GELU as it is defined, by the error function."""
    wide = at_least_float32(x)
    return (0.5 * wide * (1 + mx.erf(wide * 0.7071067811865476))).astype(x.dtype)


@_fused
def quick_gelu(x: Array) -> Array:
    """x sigmoid(1.702 x), an approximation of GELU (D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", 2016)."""
    wide = at_least_float32(x)
    return (wide * mx.sigmoid(1.702 * wide)).astype(x.dtype)


@_fused
def _gated_gelu(values: Array, gate: Array) -> Array:
    return (at_least_float32(values) * gelu_erf(at_least_float32(gate))).astype(values.dtype)


def geglu(x: Array) -> Array:
    """[... 2C] -> [... C]: the first half times GELU of the second (N. Shazeer, "GLU Variants Improve Transformer",
    2020)."""
    values, gate = mx.split(x, 2, axis=-1)
    return _seen("geglu", "", _gated_gelu(values, gate))


def shift(x: Array, rows: Array) -> Array:
    """An image [B h w C] and a number per channel [1 or B, C], in the image's dtype."""
    return _seen("shift", "", x + rows.astype(x.dtype)[:, None, None])


def pad_right_bottom(x: Array) -> Array:
    """One row and one column of zeros, below and to the right."""
    return mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])


def faded(x: Array, rows: list[float], columns: list[float]) -> Array:
    """An image [B h w C] times a weight for each row and for each column, in float32."""
    return at_least_float32(x) * mx.array(rows)[:, None, None] * mx.array(columns)[:, None]


def submit(x: Array) -> Array:
    """Hands what led to x to the device without waiting, so that no graph grows past one block: a very long command
    buffer is killed by Metal's watchdog."""
    mx.async_eval(x)
    return x


def settle(x: Array) -> Array:
    """Evaluates x, so that what led to it can be freed."""
    mx.eval(x)
    return x


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
