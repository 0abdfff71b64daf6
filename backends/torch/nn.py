"""The operations of the torch models. Every cast of the backend is here or in `load.py`.

A linear layer or a convolution computes in the dtype of its weight, which `load.py` chose from the precision policy:
its input is cast to that dtype. What the policy calls an FP32 place is float32 *at least*: float64 passes through.

Shapes: B batch, L tokens, H heads, D head dim, C channels. Images are [B C h w].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.backends.torch.cpu import multiplies

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
SCORE_BYTES = 2**28  # attention runs over chunks of queries whose scores take at most this much
WIDE_VALUES = 2**21  # of a linear layer's weight that are widened at once
WIDE_IMAGE = 2**25  # values of an image: a larger one is not widened, for its memory

_observers: list[Callable[[str, str, Tensor], None]] = []


@contextmanager
def observe(observer: Callable[[str, str, Tensor], None]) -> Iterator[None]:
    """Calls observer(operation, parameter path, result) after every operation below, for probes and traces."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _seen(operation: str, path: str, result: Tensor) -> Tensor:
    for observer in _observers:
        observer(operation, path, result)
    return result


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def table(values: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers that were made in numpy, float32 on the device, or float64 where that is the component's dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.from_numpy(values).to(device=device, dtype=wide)


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same product: sums in float32, rounded once. A part of the weight at a time is widened, so that it stays in
    the cache."""
    rows = max(1, WIDE_VALUES // weight.shape[1])
    wide = x.float()
    biases = [None] * len(weight.split(rows)) if bias is None else [part.float() for part in bias.split(rows)]
    parts = zip(weight.split(rows), biases, strict=True)
    return torch.cat([F.linear(wide, part.float(), b).to(x.dtype) for part, b in parts], dim=-1)


# Layers


class Linear(torch.nn.Linear):
    path = ""

    def forward(self, x: Tensor) -> Tensor:
        """[... in] -> [... out] in the weight's dtype."""
        x = x.to(self.weight.dtype)
        product = F.linear if multiplies(x.dtype, x.device.type) else _wide_linear
        return _seen("linear", self.path, product(x, self.weight, self.bias))


class Embedding(torch.nn.Embedding):
    path = ""

    def forward(self, ids: Tensor) -> Tensor:
        return _seen("embedding", self.path, F.embedding(ids, self.weight))


class RMSNorm(torch.nn.Module):
    path = ""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) * weight over the last axis, in float32, and float32 out."""
        x = at_least_float32(x)
        return _seen("rms_norm", self.path, F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps))


class Conv2d(torch.nn.Conv2d):
    path = ""

    def forward(self, x: Tensor) -> Tensor:
        """[B in h w] -> [B out h' w'] in the weight's dtype, padded by half the kernel unless strided."""
        x, weight, bias = x.to(self.weight.dtype), self.weight, self.bias
        if multiplies(x.dtype, x.device.type) or x.numel() > WIDE_IMAGE:
            return _seen("conv2d", self.path, F.conv2d(x, weight, bias, self.stride, self.padding))
        # The same sums, rounded once: a third of the time at 32x32 and 64x64, as much as before at 8x8. In float32 a
        # CPU would spend more on laying out the weights for channels last than it gains.
        wide = x.to(torch.float32, memory_format=torch.contiguous_format)
        sums = F.conv2d(wide, weight.float(), None if bias is None else bias.float(), self.stride, self.padding)
        return _seen("conv2d", self.path, sums.to(x.dtype))


class ChannelNorm(torch.nn.Module):
    path = ""

    def __init__(self, channels: int):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """x / |x| * sqrt(C) * gamma with |x| the length over channels at each pixel, in float32; x's dtype out."""
        wide = at_least_float32(x)
        scale = wide.square().sum(1, keepdim=True).clamp_min(1e-24).rsqrt() * x.shape[1] ** 0.5
        gamma = self.gamma.to(wide.dtype)[:, None, None]
        return _seen("channel_norm", self.path, (wide * scale * gamma).to(x.dtype))


class LayerNorm(torch.nn.Module):
    path = ""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width))
        self.bias = torch.nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(x - mean) / deviation * weight + bias over the last axis, in float32; the weight's dtype out."""
        x, weight, bias = _for_norm(x, self.weight, self.bias)
        y = F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        return _seen("layer_norm", self.path, y.to(self.weight.dtype))


class GroupNorm(torch.nn.Module):
    path = ""

    def __init__(self, groups: int, channels: int, eps: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(channels))
        self.bias = torch.nn.Parameter(torch.empty(channels))
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor) -> Tensor:
        """The same over each group of channels and all pixels of [B C h w], in float32; the weight's dtype out."""
        x, weight, bias = _for_norm(x, self.weight, self.bias)
        y = F.group_norm(x, self.groups, weight, bias, self.eps)
        return _seen("group_norm", self.path, y.to(self.weight.dtype))


def _for_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same dtype for all three: the one that they share, in which torch's norms compute in float32 inside, or else
    float32."""
    if x.dtype == weight.dtype:
        return x, weight, bias
    x = at_least_float32(x)
    return x, weight.to(x.dtype), bias.to(x.dtype)


# Functions


def pad_tokens(x: Tensor, length: int) -> Tensor:
    """[B S C] -> [B length C] with zeros at the end."""
    return F.pad(x, (0, 0, 0, length - x.shape[1]))


def stream(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The start of a residual stream in the dtype that the policy gives it."""
    return x.to(dtype)


def norm_modulate(x: Tensor, shift: Tensor, scale: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """LayerNorm(x) * (1 + scale) + shift for x [B L C], in the wider dtype of stream and modulation, cast to `dtype`
    once at the end."""
    if scale.shape[:2] == (1, 1) and scale.dtype == x.dtype:  # the same for all tokens: the norm's own gain and bias
        result = F.layer_norm(x, x.shape[-1:], 1 + scale[0, 0], shift[0, 0], eps)
    else:
        result = torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=eps), 1 + scale)
    return _seen("norm_modulate", "", result.to(dtype))


def gated(x: Tensor, gate: Tensor, update: Tensor) -> Tensor:
    """x + gate * update in x's dtype."""
    return _seen("gated", "", torch.addcmul(x, gate.to(x.dtype), update.to(x.dtype)))


def add(x: Tensor, update: Tensor) -> Tensor:
    """x + update in x's dtype."""
    return _seen("add", "", x + update.to(x.dtype))


def chunks(modulation: Tensor, count: int, index: Tensor | None) -> tuple[Tensor, ...]:
    """`count` vectors out of modulation rows [R count*C]: each [R 1 C] (R is 1, or the batch), or [1 L C] when
    `index` [L] gives each token its row."""
    parts = modulation.chunk(count, dim=-1)
    return tuple(part[:, None] if index is None else part[index][None] for part in parts)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on adjacent pairs: x [B L H D], tables [L D/2]; float32 in and out.

    A pair (a, b) turns into (a cos - b sin, a sin + b cos): the product of two complex numbers, in one pass.
    """
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the two halves of the head: x [B L H D], tables [L D/2]; in float32, and float32 out."""
    low, high = at_least_float32(x).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for q [B L H D] and k, v [B S Hk D] -> [B L H*D] in v's dtype.

    torch's kernels keep scores and softmax in float32. `mask` [B 1 1 S] is True where a key counts. Fewer key heads
    than query heads are shared.
    """
    q, k, v = (x.to(v.dtype).transpose(1, 2) for x in (q, k, v))
    shared = k.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared)
    return _seen("attention", "", out.transpose(1, 2).flatten(-2))


def spatial_attention(qkv: Tensor) -> Tensor:
    """Single-head attention over all pixels: [B 3C h w] -> [B C h w]."""
    B, _, h, w = qkv.shape
    # [B L C], channels last in memory: a condition of the kernels that keep no scores at all
    q, k, v = qkv.flatten(2).transpose(1, 2).contiguous().chunk(3, dim=-1)
    return single_head_attention(q, k, v).transpose(1, 2).reshape(B, -1, h, w)


def single_head_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B L C] each -> [B L C], in chunks of queries so that the scores of all pairs are never in memory."""
    q, k, v = q[:, None], k[:, None], v[:, None]
    rows = max(1, SCORE_BYTES // (4 * k.shape[2]))
    parts = [F.scaled_dot_product_attention(chunk, k, v) for chunk in q.split(rows, dim=2)]
    return _seen("attention", "", torch.cat(parts, dim=2)[:, 0])


def silu(x: Tensor) -> Tensor:
    return F.silu(x)


def gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def gelu_erf(x: Tensor) -> Tensor:
    """GELU as it is defined, by the error function."""
    return F.gelu(x)


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), an approximation of GELU (D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", 2016)."""
    wide = at_least_float32(x)
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


def geglu(x: Tensor) -> Tensor:
    """[... 2C] -> [... C]: the first half times GELU of the second (N. Shazeer, "GLU Variants Improve Transformer",
    2020)."""
    values, gate = x.chunk(2, dim=-1)
    return _seen("geglu", "", values * F.gelu(gate))


def shift(x: Tensor, rows: Tensor) -> Tensor:
    """An image [B C h w] and a number per channel [1 or B, C], in the image's dtype."""
    return _seen("shift", "", x + rows.to(x.dtype)[:, :, None, None])


def pad_right_bottom(x: Tensor) -> Tensor:
    """One row and one column of zeros, below and to the right."""
    return F.pad(x, (0, 1, 0, 1))


def faded(x: Tensor, rows: list[float], columns: list[float]) -> Tensor:
    """An image [B C h w] times a weight for each row and for each column, in float32."""
    down, across = torch.tensor(rows, device=x.device), torch.tensor(columns, device=x.device)
    return at_least_float32(x) * down[:, None] * across


def submit(x: Tensor) -> Tensor:
    """Nothing here; MLX hands what led to x to the device."""
    return x


def settle(x: Tensor) -> Tensor:
    """Nothing here; MLX evaluates, so that what led to x can be freed."""
    return x


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """u + scale (c - u), each token [C] rescaled to the length of c, in float32."""
    c, u = at_least_float32(conditional), at_least_float32(unconditional)
    combined = u + scale * (c - u)
    return combined * (_length(c) / _length(combined))


def rescale(guided: Tensor, conditional: Tensor, share: float) -> Tensor:
    """`guided` with its deviation moved by `share` towards that of `conditional`, both [B C h w], in float32 (S. Lin et
    al., "Common Diffusion Noise Schedules and Sample Steps are Flawed", 2023)."""
    g, c = at_least_float32(guided), at_least_float32(conditional)
    ratio = torch.std(c, dim=(1, 2, 3), keepdim=True) / torch.std(g, dim=(1, 2, 3), keepdim=True)
    return g * (share * ratio + (1 - share))


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def product_seconds(side: int, dtype: torch.dtype, device: torch.device) -> float:
    """Of one product of two matrices side x side."""
    x = torch.ones((side, side), dtype=dtype, device=device)
    begun = time.perf_counter()
    torch.matmul(x, x)[0, 0].item()
    return time.perf_counter() - begun
