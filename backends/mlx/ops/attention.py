"""Attention, computed in chunks of queries where the scores of all pairs would take too much memory."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx.ops import device
from qwenimg.backends.mlx.ops.functions import DTYPES, at_least_float32, on_gpu
from qwenimg.backends.workspaces import SCORE_BYTES
from qwenimg.common.precision.precision import Compute
from qwenimg.common.runtime.observers import seen

FUSED_HEADS = (64, 72, 80, 96, 128)  # head widths for which a GPU has a fused attention kernel


LEAST = 1e-15  # is added to the sum of weights of a linear attention
# Keys that are added in order on a CPU: of an attention with a bias, which has the same value hundreds of times, and of
# a long one without
PART, RUN = 32, 1024


def attention(q: Array, k: Array, v: Array, mask: Array | None = None, causal: bool = False) -> Array:
    """Return softmax(q k^T / sqrt(D)) v for q [B L H D] and k, v [B S Hk D] -> [B L H*D], in v's dtype.

    Scores and softmax are float32: in the fused kernel where there is one, else by computing in float32. `mask` [B 1 1
    S] is True where a key counts. `causal` queries are the last L of the S tokens, and see those before them, with a
    mask those that count. Fewer key heads than query heads are shared.
    """
    if causal and mask is not None:
        L, S = q.shape[1], k.shape[1]
        mask, causal = mask & (mx.arange(S) <= mx.arange(S - L, S)[:, None]), False
    D, scale = v.shape[-1], q.shape[-1] ** -0.5
    fused = has_kernel(v)
    dtype, width = (v.dtype, padded_width(D)) if fused else (mx.float32, D)
    q, k, v_ = (pad_heads(x.astype(v.dtype).astype(dtype), width).transpose(0, 2, 1, 3) for x in (q, k, v))
    out = _attend(q, k, v_, scale, "causal") if causal else _in_chunks(q, k, v_, scale, fused, mask)
    return seen("attention", "", out[..., :D].astype(v.dtype).transpose(0, 2, 1, 3).flatten(2))


def linear_attention(q: Array, k: Array, v: Array) -> Array:
    """Return attention with ReLU kernels and no softmax, [B L H D] each -> [B L H*D] in v's dtype: the values weighed
    by relu(q) relu(k)^T, which is never made, since the sum of k^T v over all keys comes first (A. Katharopoulos et
    al., "Transformers are RNNs", 2020). All of it is float32."""
    return seen("linear_attention", "", linear_result(q, linear_sums(k, v), v.dtype))


def linear_sums(k: Array, v: Array) -> Array:
    """Return relu(k)^T v [B H D D+1] of keys and values [B L H D], in float32, with the sum of relu(k) last."""
    ones = mx.pad(at_least_float32(v), [(0, 0)] * 3 + [(0, 1)], constant_values=1.0)
    return mx.maximum(at_least_float32(k), 0).transpose(0, 2, 3, 1) @ ones.transpose(0, 2, 1, 3)


def linear_result(q: Array, sums: Array, dtype: mx.Dtype) -> Array:
    """Return the linear attention [B L H*D] of queries [B L H D] by the `sums` over all keys, in `dtype`."""
    y = mx.maximum(at_least_float32(q), 0).transpose(0, 2, 1, 3) @ sums
    out = y[..., :-1] / (y[..., -1:] + LEAST)
    return out.astype(dtype).transpose(0, 2, 1, 3).flatten(2)


def score_bias(table: Array) -> Array:
    """Turn a number for each pair of positions and each head [S S H] into the bias of `biased_attention` [1 H S S], in
    float32."""
    return at_least_float32(table).transpose(2, 0, 1)[None]


def biased_attention(q: Array, k: Array, v: Array, bias: Array) -> Array:
    """Return softmax(q k^T + bias) v for q, k and v [B S H D] and bias [1 H S S] -> [B S H*D], in v's dtype.

    All of it is float32, since kernels take the bias in the dtype of q. Scores are not divided by sqrt(D).
    """
    q, k, wide = (at_least_float32(x).transpose(0, 2, 1, 3) for x in (q, k, v))
    out = _attend(q, k, wide, 1.0, bias) if on_gpu() else _in_parts(q, k, wide, bias)
    return seen("attention", "", out.astype(v.dtype).transpose(0, 2, 1, 3).flatten(2))


class Attend(mlx.nn.Module):
    """The dtype in which an attention computes, where it differs from the dtype of its values. Holds no weights."""

    path = ""
    compute: Compute | None = None

    def values(self, v: Array) -> Array:
        """Return the values as `attention` takes them: scaled, in the dtype in which it computes."""
        if self.compute is None:
            return v
        return (at_least_float32(v) * self.compute.scale).astype(DTYPES[self.compute.dtype])

    def result(self, out: Array) -> Array:
        """Return the result of `attention` on such values, scaled back in float32."""
        return out if self.compute is None else at_least_float32(out) / self.compute.scale

    def __call__(self, q: Array, k: Array, v: Array, mask: Array | None = None, text_last: bool = False) -> Array:
        """Return `attention` on such values, scaled back in float32. text_last: the image's tokens come before the
        text's."""
        return self.result(attention(q, k, v, mask))


def spatial_attention(qkv: Array) -> Array:
    """Compute single-head attention over all pixels: [B h w 3C] -> [B h w C]."""
    B, h, w, _ = qkv.shape
    q, k, v = mx.split(qkv.reshape(B, h * w, -1), 3, axis=-1)
    return single_head_attention(q, k, v).reshape(B, h, w, -1)


def single_head_attention(q: Array, k: Array, v: Array) -> Array:
    """Compute attention [B L C] each -> [B L C] in chunks of queries, so that memory never holds the scores of all
    pairs."""
    dtype = q.dtype
    q, k, v = (at_least_float32(x)[:, None] for x in (q, k, v))
    out = _in_chunks(q, k, v, q.shape[-1] ** -0.5, False, None)
    return seen("attention", "", out.astype(dtype)[:, 0])


def padded_width(width: int) -> int:
    """Return the narrowest head width with a fused kernel that is at least `width`, or `width` where there is none."""
    return next((fused for fused in FUSED_HEADS if fused >= width), width)


def pad_heads(x: Array, width: int) -> Array:
    """Pad heads [B L H D] with zeros to [B L H width]. Exact: zeros change no score, and their own sums are cut off."""
    return mx.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) if width > x.shape[-1] else x


def has_kernel(v: Array) -> bool:
    """Return whether a fused kernel exists: Metal has one for widths up to 128 in every dtype, MLX's CUDA build only
    in 16 bit."""
    return on_gpu() and v.shape[-1] <= FUSED_HEADS[-1] and (mx.metal.is_available() or v.itemsize == 2)


def _attend(q: Array, k: Array, v: Array, scale: float, mask: Array | str | None) -> Array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def _in_chunks(q: Array, k: Array, v: Array, scale: float, fused: bool, mask: Array | None) -> Array:
    """Attend [B H L D] -> [B H L D] over chunks of queries, unless a fused kernel keeps the scores out of memory."""
    B, H, L, _ = q.shape
    runs = not on_gpu() and mask is None and k.shape[1] == H and k.shape[2] > 2 * RUN
    rows = L if fused else max(1, SCORE_BYTES // (4 * B * H * k.shape[2]))
    parts = []
    for start in range(0, L, rows):
        some = q[:, :, start : start + rows]
        parts.append(_in_runs(some, k, v, scale) if runs else _attend(some, k, v, scale, mask))
        if rows < L:
            device.eval(parts[-1])
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]


def _in_parts(q: Array, k: Array, v: Array, bias: Array) -> Array:
    """Return softmax(q k^T + bias) v, summed over PART keys and then over these parts.

    MLX's products and sums on a CPU add in order. Padding has the same value hundreds of times, which are then all
    rounded the same way: the error grows with their number."""
    scores = q @ k.swapaxes(-1, -2) + bias
    weights = mx.exp(scores - mx.max(scores, axis=-1, keepdims=True))
    parts = [(weights[..., i : i + PART], v[:, :, i : i + PART]) for i in range(0, k.shape[2], PART)]
    total = sum((part.sum(axis=-1, keepdims=True) for part, _ in parts[1:]), parts[0][0].sum(axis=-1, keepdims=True))
    return sum((part @ values for part, values in parts[1:]), parts[0][0] @ parts[0][1]) / total


def _in_runs(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Return softmax(scale q k^T) v, summed over RUN keys and then over these runs.

    MLX's products and sums on a CPU add in order: over 16,384 keys at once the error is five times as large."""
    q, top = q * scale, mx.full((*q.shape[:3], 1), -mx.inf)
    total, out = mx.zeros(top.shape), mx.zeros((*q.shape[:3], v.shape[-1]))
    for start in range(0, k.shape[2], RUN):
        scores = q @ k[:, :, start : start + RUN].swapaxes(-1, -2)
        higher = mx.maximum(top, mx.max(scores, axis=-1, keepdims=True))
        weights, shrunk = mx.exp(scores - higher), mx.exp(top - higher)
        total = total * shrunk + weights.sum(axis=-1, keepdims=True)
        out, top = out * shrunk + weights @ v[:, :, start : start + RUN], higher
        device.eval((out, total, top))  # so that memory holds the scores of one run
    return out / total
