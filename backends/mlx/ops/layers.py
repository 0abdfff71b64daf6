"""The layers that hold weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx.core import array as Array

from qwenimg.backends.mlx.compile import fused
from qwenimg.backends.mlx.ops import images
from qwenimg.backends.mlx.ops.functions import DTYPES, at_least_float32, on_gpu
from qwenimg.common.numbers.moments import Moments, moments
from qwenimg.common.precision.precision import Compute
from qwenimg.common.quant.rotated import H4
from qwenimg.common.runtime.observers import seen


def _scaled(compute: Compute, product: Callable[[Array, Array], Array], x: Array, layer: Weighted) -> Array:
    """Return `product` of `compute.scale` times x with the layer's weight in `compute.dtype`, scaled back in
    float32, where the bias is added."""
    dtype = DTYPES[compute.dtype]
    y = at_least_float32(product((at_least_float32(x) * compute.scale).astype(dtype), layer.weight.astype(dtype)))
    y = y / compute.scale
    return y + at_least_float32(layer.bias) if "bias" in layer else y


def rotate(x: Array, group: int) -> Array:
    """Return x [... in] with each `group` of its values rotated (`common/quant/rotated.py`). A GPU multiplies by the
    rotation's matrix and rounds once. A CPU multiplies by its two Kronecker factors, with shorter sums."""
    if on_gpu():
        return mx.matmul(x.reshape(*x.shape[:-1], -1, group), _rotation(group).astype(x.dtype)).reshape(x.shape)
    first = 2 ** (group.bit_length() // 4 * 2)
    left, right = _rotation(first).astype(x.dtype), _rotation(group // first).astype(x.dtype)
    return mx.matmul(mx.matmul(left, x.reshape(-1, first, group // first)), right).reshape(x.shape)


@cache
def _rotation(group: int) -> Array:
    """Return the symmetric matrix [group group] of a rotation, which every dtype holds exactly."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < group:
        matrix = np.kron(matrix, np.array(H4, np.float32))
    return mx.array(matrix)


class Weighted(mlx.nn.Module):
    """A layer of products with a weight."""

    path = ""
    compute: Compute | None = None

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the layer's input, product and output; float32 where `compute` names another one for the
        product."""
        return self.weight.dtype if self.compute is None else mx.float32


class Linear(Weighted):
    rotation = 0  # values of a group of the input that are rotated first, as weight and branch are

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.weight = mx.zeros((outputs, inputs))
        self.branch: tuple[Array, ...] = ()  # LoRAs: down [R in] and up [out R], in the layer's dtype
        if bias:
            self.bias = mx.zeros((outputs,))

    @property
    def plain(self) -> bool:
        """True if the layer is one product in its dtype with a bias: no LoRA branch, no other dtype, no rotation."""
        return self.compute is None and not self.branch and "bias" in self and not self.rotation

    def __call__(self, x: Array) -> Array:
        """Return [... in] -> [... out] in the layer's dtype; the bias is added before the one rounding."""
        if self.rotation:
            x = rotate(x.astype(self.dtype), self.rotation)
        if self.compute is not None:
            y = _scaled(self.compute, lambda x, w: mx.matmul(x, w.T), x, self)
        else:
            x = x.astype(self.dtype)
            y = mx.addmm(self.bias, x, self.weight.T) if "bias" in self else mx.matmul(x, self.weight.T)
        return seen("linear", self.path, self.with_branch(x, y))

    def with_branch(self, x: Array, y: Array) -> Array:
        """Add the LoRA branch of x, if there is one, to y [... out]."""
        if not self.branch:
            return y
        down, up = self.branch
        return y + mx.matmul(mx.matmul(x.astype(down.dtype), down.T), up.T)


class Embedding(mlx.nn.Module):
    path = ""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = mx.zeros((count, width))

    def __call__(self, ids: Array) -> Array:
        return seen("embedding", self.path, self.weight[ids])

    def scores(self, x: Array) -> Array:
        """Return the products [... count] of x [... width] with all rows, in their dtype: a head that is tied to it."""
        return seen("linear", self.path, mx.matmul(x.astype(self.weight.dtype), self.weight.T))


class RMSNorm(mlx.nn.Module):
    path = ""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = mx.zeros((width,))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Return x / rms(x) * weight over the last axis, in float32, and float32 out."""
        x = at_least_float32(x)
        return seen("rms_norm", self.path, mx.fast.rms_norm(x, self.weight.astype(x.dtype), self.eps))


class CentredRMSNorm(RMSNorm):
    """An RMS norm whose gain is stored minus one."""

    def __call__(self, x: Array) -> Array:
        """Return x / rms(x) * (1 + weight) over the last axis, in float32, and float32 out."""
        x = at_least_float32(x)
        return seen("rms_norm", self.path, mx.fast.rms_norm(x, 1 + self.weight.astype(x.dtype), self.eps))


class Conv2d(Weighted):
    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
        groups: int = 1,
    ):
        super().__init__()
        self.weight = mx.zeros((outputs, kernel, kernel, inputs // groups))
        if bias:
            self.bias = mx.zeros((outputs,))
        self.stride, self.padding, self.groups = stride, padding, groups

    @property
    def plain(self) -> bool:
        """True if the layer is one product for each pixel in its dtype, with a bias: a 1x1 kernel, no other dtype."""
        return self.compute is None and "bias" in self and self.weight.shape[1:3] == (1, 1)

    def __call__(self, x: Array) -> Array:
        """Return [B h w in] -> [B h' w' out] in the layer's dtype, padded by half the kernel unless strided."""
        if self.compute is not None:
            convolve = partial(mx.conv2d, stride=self.stride, padding=self.padding, groups=self.groups)
            return seen("conv2d", self.path, _scaled(self.compute, convolve, x, self))
        dtype = _conv_dtype(self, x)
        form = {"stride": self.stride, "padding": self.padding, "groups": self.groups}
        y = mx.conv2d(x.astype(dtype), self.weight.astype(dtype), **form)
        y = _biased(self.dtype)(y, self.bias) if "bias" in self else y.astype(self.dtype)
        return seen("conv2d", self.path, y)


class ConvTranspose2d(Weighted):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0):
        super().__init__()
        self.weight = mx.zeros((inputs, kernel, kernel, outputs))  # as any kernel is laid out, inputs first
        self.bias = mx.zeros((outputs,))
        self.stride, self.padding = stride, padding

    def __call__(self, x: Array) -> Array:
        """Return [B h w in] -> [B h' w' out] in the layer's dtype."""

        def convolve(x: Array, weight: Array) -> Array:
            return mx.conv_transpose2d(x, weight.transpose(3, 1, 2, 0), stride=self.stride, padding=self.padding)

        if self.compute is not None:
            return seen("conv2d", self.path, _scaled(self.compute, convolve, x, self))
        y = convolve(x.astype(self.dtype), self.weight)
        return seen("conv2d", self.path, _biased(self.dtype)(y, self.bias))


class ResponseNorm(mlx.nn.Module):
    """The global response norm of ConvNeXt V2 (S. Woo et al., 2023), over the tokens of an image."""

    path = ""

    def __init__(self, channels: int, eps: float):
        super().__init__()
        self.eps = eps
        self.gamma = mx.zeros((channels,))
        self.beta = mx.zeros((channels,))

    def __call__(self, x: Array) -> Array:
        """Return x * (1 + gamma * share) + beta for x [B L C], where a channel's share is its length over all tokens by
        the mean length of all channels, in float32; x's dtype out."""
        wide = at_least_float32(x)
        length = mx.sqrt(mx.maximum(mx.sum(mx.square(wide), axis=1, keepdims=True), 1e-24))
        share = length / (mx.mean(length, axis=-1, keepdims=True) + self.eps)
        gamma, beta = self.gamma.astype(wide.dtype), self.beta.astype(wide.dtype)
        return seen("response_norm", self.path, (wide * (1 + gamma * share) + beta).astype(x.dtype))


@cache
def _biased(dtype: mx.Dtype) -> Callable[..., Array]:
    """Return a function that adds a bias in y's dtype and casts the sum to `dtype`."""
    return fused(lambda y, bias: (y + bias.astype(y.dtype)).astype(dtype))


class ChannelNorm(mlx.nn.Module):
    path = ""

    def __init__(self, channels: int):
        super().__init__()
        self.gamma = mx.zeros((channels,))

    def __call__(self, x: Array) -> Array:
        """Return x / |x| * sqrt(C) * gamma with |x| the length over channels at each pixel, in float32; x's dtype
        out. NaN where float32 does not hold the square of the length."""
        wide = at_least_float32(x)
        squares = mx.maximum(mx.sum(mx.square(wide), axis=-1, keepdims=True), 1e-24)
        scale = mx.rsqrt(squares) * x.shape[-1] ** 0.5 + 0 * squares
        return seen("channel_norm", self.path, (wide * scale * self.gamma.astype(wide.dtype)).astype(x.dtype))


class PixelNorm(mlx.nn.Module):
    """An RMS norm over the channels of each pixel, with gain and bias."""

    path = ""

    def __init__(self, channels: int, eps: float):
        super().__init__()
        self.weight = mx.zeros((channels,))
        self.bias = mx.zeros((channels,))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Return x / rms(x) * weight + bias for x [B h w C], in float32; x's dtype out."""
        wide = at_least_float32(x)
        normed = mx.fast.rms_norm(wide, self.weight.astype(wide.dtype), self.eps) + self.bias.astype(wide.dtype)
        return seen("pixel_norm", self.path, normed.astype(x.dtype))


class ChannelStatistics(mlx.nn.Module):
    """Mean and variance of each channel of latents (a batch norm's running statistics)."""

    path = ""

    def __init__(self, channels: int, eps: float):
        super().__init__()
        self.running_mean = mx.zeros((channels,))
        self.running_var = mx.zeros((channels,))
        self.eps = eps

    def __call__(self, moments: Array) -> Array:
        """Return standardized latents for mean and log variance [B h w 2C]; in float32, and float32 out."""
        mean, log_variance = mx.split(at_least_float32(moments), 2, axis=-1)
        shift, variance = self._rows(mean.dtype)
        standardized = mx.concatenate(((mean - shift) / mx.sqrt(variance), log_variance - mx.log(variance)), axis=-1)
        return seen("channel_statistics", self.path, standardized)

    def inverse(self, x: Array) -> Array:
        """Return standardized latents [B h w C] in their own scale; in float32, and float32 out."""
        x = at_least_float32(x)
        shift, variance = self._rows(x.dtype)
        return seen("channel_statistics", self.path, x * mx.sqrt(variance) + shift)

    def _rows(self, dtype: mx.Dtype) -> tuple[Array, Array]:
        """Return mean and variance [C] in `dtype`."""
        return self.running_mean.astype(dtype), self.running_var.astype(dtype) + self.eps


class BatchNorm(mlx.nn.Module):
    """A batch norm by the statistics of its training, with gain and bias if it is `affine`."""

    path = ""

    def __init__(self, channels: int, eps: float, affine: bool = True):
        super().__init__()
        self.eps, self.affine = eps, affine
        self.running_mean = mx.zeros((channels,))
        self.running_var = mx.zeros((channels,))
        if affine:
            self.weight = mx.zeros((channels,))
            self.bias = mx.zeros((channels,))

    def __call__(self, x: Array) -> Array:
        """Return (x - mean) / deviation * weight + bias for x [B h w C], in float32; x's dtype out."""
        wide = at_least_float32(x)
        mean, variance = self.running_mean.astype(wide.dtype), self.running_var.astype(wide.dtype)
        slope = mx.rsqrt(variance + self.eps)
        slope = slope * self.weight.astype(wide.dtype) if self.affine else slope
        shift = self.bias.astype(wide.dtype) - mean * slope if self.affine else -mean * slope
        return seen("batch_norm", self.path, (wide * slope + shift).astype(x.dtype))


class LayerNorm(mlx.nn.Module):
    path = ""
    compute: Compute | None = None

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = mx.zeros((width,))
        self.bias = mx.zeros((width,))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Return (x - mean) / deviation * weight + bias over the last axis, in float32; the weight's dtype out, or
        float32."""
        x = at_least_float32(x)
        weight, bias = self.weight.astype(x.dtype), self.bias.astype(x.dtype)
        y = mx.fast.layer_norm(x, weight, bias, self.eps)
        return seen("layer_norm", self.path, _normed(y, self))


class GroupNorm(mlx.nn.Module):
    path = ""
    compute: Compute | None = None

    def __init__(self, groups: int, channels: int, eps: float):
        super().__init__()
        self.weight = mx.zeros((channels,))
        self.bias = mx.zeros((channels,))
        self.groups, self.eps = groups, eps

    def __call__(self, x: Array) -> Array:
        """Return (x - mean) / deviation * weight + bias over each group of channels and all pixels of [B h w C], in
        float32; the weight's dtype out, or float32. NaN where float32 does not hold the sum of a group's squares."""
        out = self.weight.dtype if self.compute is None else at_least_float32(x).dtype
        normed = self._in_one_row if on_gpu() else self._row_by_row
        return seen("group_norm", self.path, normed(x, _by_channel(out)))

    def _in_one_row(self, x: Array, affine: Callable[..., Array]) -> Array:
        """Return the norm of x [B h w C], each group as one long row of MLX's own kernel."""
        B, h, w, C = x.shape
        grouped = x.reshape(B, h * w, self.groups, -1).swapaxes(1, 2)
        normed = mx.fast.layer_norm(at_least_float32(grouped.reshape(B, self.groups, -1)), None, None, self.eps)
        by_group = (self.groups, C // self.groups)
        weight, bias = self.weight.reshape(by_group), self.bias.reshape(by_group)
        return affine(normed.reshape(grouped.shape).swapaxes(1, 2), weight, bias).reshape(B, h, w, C)

    def _row_by_row(self, x: Array, affine: Callable[..., Array]) -> Array:
        """Return the norm of x [B h w C] by means of short rows: on a CPU, `mx.fast.layer_norm` adds up a long one
        number by number, which costs a nearly flat group its digits."""
        mean, _, centered = self._centered(x)
        variance = self._mean(mx.square(centered))
        overflow = 0 * (variance * (x.size // mean.size))  # 0, or NaN
        scale = mx.rsqrt(variance + self.eps) + overflow
        return affine(centered * self._each_channel(scale), self.weight, self.bias)

    def moments(self, x: Array) -> Moments:
        """Return the moments of each group of channels [B groups] over all pixels of x [B h w C]."""
        mean, rest, centered = self._centered(x)
        count = x.size // mean.size
        whole = np.array(mean).astype(np.float64) + np.array(rest)
        return moments(count, whole, np.array(self._mean(mx.square(centered))).astype(np.float64) * count)

    def _centered(self, x: Array) -> tuple[Array, Array, Array]:
        """Return the means of groups [B groups], and what rounding left of them, and x [B h w C] less both, in float32:
        rounded sums of equal numbers are all off to one side."""
        wide = at_least_float32(x)
        mean = self._mean(wide)
        centered = wide - self._each_channel(mean)
        rest = self._mean(centered)
        return mean, rest, centered - self._each_channel(rest)

    def _mean(self, x: Array) -> Array:
        """Return the means of groups, [B h w C] -> [B groups], row by row: a long sum in float32 loses digits that
        short ones keep."""
        rows = mx.mean(mx.mean(x, axis=2), axis=1)
        return mx.mean(rows.reshape(x.shape[0], self.groups, -1), axis=2)

    def by(self, whole: Moments) -> Callable[[Array], Array]:
        """Return this norm for a part of an image, as a function; `whole`: the moments of the whole image."""
        return partial(self._by, whole.mean, whole.scale(self.eps))

    def _by(self, mean: np.ndarray, scale: np.ndarray, x: Array) -> Array:
        """Return (x - mean) * scale * weight + bias for mean and scale [B groups] and x [B h w C], in float32;
        dtypes as in `__call__`."""
        wide, near = at_least_float32(x), mean.astype(np.float32)
        first, rest, factor = (
            self._each_channel(mx.array(values).astype(wide.dtype)) for values in (near, mean - near, scale)
        )
        normed = (wide - first - rest) * factor
        out = self.weight.dtype if self.compute is None else wide.dtype
        return seen("group_norm", self.path, _by_channel(out)(normed, self.weight, self.bias))

    def _each_channel(self, values: Array) -> Array:
        """Repeat values of groups [B groups] for their channels, [B 1 1 C]."""
        return mx.repeat(values, self.weight.shape[0] // self.groups, axis=1)[:, None, None]


class TokenNorm(GroupNorm):
    """A group norm that returns tokens."""

    def __call__(self, x: Array) -> Array:
        """Return the norm of [B h w C] as tokens [B L C]."""
        return images.tokens(super().__call__(x))


@cache
def _by_channel(dtype: mx.Dtype) -> Callable[..., Array]:
    """Return a function that computes x weight + bias in x's dtype and casts the result to `dtype`."""
    return fused(lambda x, weight, bias: (x * weight.astype(x.dtype) + bias.astype(x.dtype)).astype(dtype))


def _conv_dtype(conv: Conv2d, x: Array) -> mx.Dtype:
    """Return the dtype in which a convolution of x [B h w in] computes.

    Metal's Winograd kernels round their transforms in the storage dtype, which costs 16 bit a thousand times the error
    of a direct convolution: convolutions that would take them run in float32. MLX takes them for 3x3 with stride 1
    where the images of the batch have 4,096 pixels together (its conv.cpp, v0.20 to v0.32), but not for few or odd
    channels, which does not matter here.
    """
    winograd = conv.weight.shape[1] == 3 and conv.stride == 1 and x.shape[0] * x.shape[1] * x.shape[2] >= 4096
    return mx.float32 if on_gpu() and conv.weight.itemsize == 2 and winograd else conv.weight.dtype


def _normed(y: Array, norm: LayerNorm) -> Array:
    """Return y in the dtype of the next layer: the weight's, or float32 where products are computed in that."""
    return y.astype(norm.weight.dtype) if norm.compute is None else at_least_float32(y)
