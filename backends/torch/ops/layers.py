"""The layers that hold weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.backends.torch.ops import images
from qwenimg.backends.torch.ops.cpu import group_norm, multiplies
from qwenimg.backends.torch.ops.functions import DTYPES, at_least_float32
from qwenimg.common.numbers.moments import Moments, moments
from qwenimg.common.precision.precision import Compute
from qwenimg.common.quant.rotated import H4
from qwenimg.common.runtime.observers import seen

WIDE_VALUES = 2**21  # values of a linear layer's weight that are widened at once
# Bytes of a convolution's weight that oneDNN lays out at once: the fastest sizes measured
LAID_OUT = {torch.float32: 2**24, torch.bfloat16: 2**25, torch.float16: 2**25}
IN_CACHE = 2**16  # values of an input that a CPU rotates at once
FEW, MANY_WEIGHTS = range(3, 9), 2**23  # rows, and values of a weight, for which MKL reads that once for each row
WIDE_IMAGE = 2**25  # values of an image: a larger one is not widened, to save memory


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the linear layer's result with sums in float32, rounded once.

    One part of the weight at a time is widened, so that it stays in the cache.
    """
    wide = x.float()
    parts = _rows(weight, bias, max(1, WIDE_VALUES // weight.shape[1]))
    outputs = [F.linear(wide, part.float(), None if b is None else b.float()).to(x.dtype) for part, b in parts]
    return torch.cat(outputs, dim=-1)


def _rows(weight: Tensor, bias: Tensor | None, count: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Split a layer's weight and bias into parts of `count` outputs."""
    weights = weight.split(count)
    return zip(weights, [None] * len(weights) if bias is None else bias.split(count), strict=True)


def _scaled(compute: Compute, product: Callable[..., Tensor], x: Tensor, layer: Weighted) -> Tensor:
    """Return `product` of `compute.scale` times x with the layer's weight in `compute.dtype`, scaled back in
    float32, where the bias is added."""
    dtype = DTYPES[compute.dtype]
    y = product((at_least_float32(x) * compute.scale).to(dtype), layer.weight.to(dtype), None)
    y = at_least_float32(y) / compute.scale
    if layer.bias is None:
        return y
    bias = at_least_float32(layer.bias)
    return y + (bias if isinstance(layer, Linear) else bias[:, None, None])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear`, without a second rounding where the rows of a batch [B L C] are parts of longer ones: there
    torch would add the bias in a pass of its own."""
    if _are_few(x, weight):
        return _linear_of_few(x, weight, bias)
    parts = x.ndim == 3 and not x.is_contiguous() and x[0].is_contiguous()
    if bias is None or not parts or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return _linear_into(x.new_empty((*x.shape[:2], weight.shape[0])), x, weight, bias)


def _linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Write the layer's result for x [B L C] into `out` [B L C'], one product for each row of the batch."""
    for row, result in zip(x, out, strict=True):
        torch.addmm(bias, row, weight.t(), out=result)
    return out


def _are_few(x: Tensor, weight: Tensor) -> bool:
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_grad_enabled():
        return False  # first, since a compiler would compile anew for other numbers of rows
    return x.numel() // x.shape[-1] in FEW and weight.numel() >= MANY_WEIGHTS and torch.backends.mkl.is_available()


def _linear_of_few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear` of a few rows, computed as its transpose: of 4 rows in 0.4 to 0.6 of the time (an EPYC without
    16-bit products, MKL, one thread)."""
    rows = x.reshape(-1, x.shape[-1]).t()
    y = weight @ rows if bias is None else torch.addmm(bias[:, None], weight, rows)
    return y.t().contiguous().view(*x.shape[:-1], -1)


def _product(x: Tensor) -> Callable[..., Tensor]:
    return _linear if multiplies(x.dtype, x.device.type) else _wide_linear


def rotate(x: Tensor, group: int) -> Tensor:
    """Return x [... in] times the rotation of each `group` of its values (`common/quant/rotated.py`).

    A card multiplies by the whole matrix, and rounds once. A CPU multiplies by its two Kronecker factors, which takes a
    third of the time.
    """
    compiling = torch.compiler.is_compiling()
    if x.device.type != "cpu" or x.dtype.itemsize < 4 or compiling or torch.is_grad_enabled():
        matrix_of = _rotation.__wrapped__ if compiling else _rotation  # the compiler warns of a cache
        return F.linear(x.unflatten(-1, (-1, group)), matrix_of(group, x.dtype, x.device)).flatten(-2)
    first = 2 ** (group.bit_length() // 4 * 2)
    left, right = (_rotation(size, x.dtype, x.device) for size in (first, group // first))
    blocks = x.reshape(-1, first, group // first)
    turned = torch.empty_like(blocks)
    for part, out in zip(blocks.split(IN_CACHE // group), turned.split(IN_CACHE // group), strict=True):
        torch.matmul(torch.matmul(left, part), right, out=out)
    return turned.view(x.shape)


@cache
def _rotation(group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the symmetric matrix [group group] of a rotation, which every dtype holds exactly."""
    four = torch.tensor(H4, dtype=dtype, device=device)
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < group:
        matrix = torch.kron(matrix, four)
    return matrix


class Weighted:
    """A torch layer of products with a weight. It skips first values where it has no memory for them: they take longer
    than the layer."""

    path = ""
    compute: Compute | None = None
    weight: Tensor
    bias: Any

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layer's input, product and output; float32 where `compute` names another one for the
        product."""
        return self.weight.dtype if self.compute is None else torch.float32

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()  # type: ignore[misc]


class Linear(Weighted, torch.nn.Linear):
    branch: tuple[Tensor, Tensor] | None = None  # LoRAs: down [R in] and up [out R], in the layer's dtype
    rotation = 0  # values of a group of the input that are rotated first, as weight and branch are

    @property
    def plain(self) -> bool:
        """True if the layer is one product of its `turned` input in its dtype, with a bias: no LoRA branch, no other
        dtype."""
        return self.compute is None and self.branch is None and self.bias is not None

    def turned(self, x: Tensor) -> Tensor:
        """Return x [... in] as the layer's weight takes it: rotated where the layer rotates."""
        return rotate(x.to(self.dtype), self.rotation) if self.rotation else x

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the layer's result [... in] -> [... out] in its dtype. A layer with a bias writes x [B L in] into
        `out` if given."""
        x = self.turned(x)
        if self.compute is not None:
            wide = not multiplies(DTYPES[self.compute.dtype], x.device.type)
            y = _scaled(self.compute, _wide_linear if wide else F.linear, x, self)
        elif out is not None:
            return seen("linear", self.path, _linear_into(out, x.to(self.dtype), self.weight, self.bias))
        else:
            x = x.to(self.dtype)
            y = _product(x)(x, self.weight, self.bias)
        return seen(
            "linear", self.path, y if self.branch is None else y + self._branch_of(x.to(self.dtype), *self.branch)
        )

    def _branch_of(self, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Return the LoRA branch of x: [... in], [R in], [out R] -> [... out], in the layer's dtype."""
        product = _product(x)
        return product(product(x, down, None), up, None)


class Embedding(torch.nn.Module):
    """An embedding without torch.nn.Embedding's first values: on the meta device these import torch._dynamo, 800
    modules."""

    path = ""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(count, width))

    def forward(self, ids: Tensor) -> Tensor:
        return seen("embedding", self.path, F.embedding(ids, self.weight))

    def scores(self, x: Tensor) -> Tensor:
        """Return the products [... count] of x [... width] with all rows, in their dtype: a head that is tied to it."""
        x = x.to(self.weight.dtype)
        return seen("linear", self.path, _product(x)(x, self.weight, None))


class RMSNorm(torch.nn.Module):
    path = ""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) * weight over the last axis, in float32, and float32 out."""
        x = at_least_float32(x)
        return seen("rms_norm", self.path, F.rms_norm(x, x.shape[-1:], _wide(self, "weight", x.dtype), self.eps))


class CentredRMSNorm(RMSNorm):
    """An RMS norm whose gain is stored minus one."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) * (1 + weight) over the last axis, in float32, and float32 out."""
        x = at_least_float32(x)
        gain = 1 + _wide(self, "weight", x.dtype)
        return seen("rms_norm", self.path, F.rms_norm(x, x.shape[-1:], gain, self.eps))


class Conv2d(Weighted, torch.nn.Conv2d):
    @property
    def plain(self) -> bool:
        """True if the layer is one product for each pixel in its dtype, with a bias: a 1x1 kernel, no other dtype."""
        return self.compute is None and self.bias is not None and self.kernel_size == (1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B in h w] -> [B out h' w'] in the layer's dtype, padded by half the kernel unless strided."""
        if self.compute is not None:
            convolve = partial(F.conv2d, stride=self.stride, padding=self.padding, groups=self.groups)
            return seen("conv2d", self.path, _scaled(self.compute, convolve, x, self))
        x = x.to(self.dtype)
        if multiplies(x.dtype, x.device.type) or x.numel() > WIDE_IMAGE:
            return seen("conv2d", self.path, self._convolved(x, self.dtype))
        # Sums in float32, rounded once, take a third of the time at 32x32 and 64x64, and as long at 8x8. In float32 a
        # CPU would spend more on laying out the weights for channels last than it gains.
        wide = x.to(torch.float32, memory_format=torch.contiguous_format)
        return seen("conv2d", self.path, self._convolved(wide, torch.float32).to(x.dtype))

    def _convolved(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Convolve x, which is in `dtype`, with the weight in `dtype`.

        A CPU computes some output channels at a time where a large weight meets a small image: oneDNN lays a weight out
        again in every call, and a large block of memory for it is new each time (8x8, 1280 of 2560 channels: 0.6 of the
        time, the same bits).
        """

        def convolve(weight: Tensor, bias: Tensor | None) -> Tensor:
            bias = None if bias is None else bias.to(dtype)
            return F.conv2d(x, weight.to(dtype), bias, self.stride, self.padding, groups=self.groups)

        if (rows := self._at_once(x, dtype)) >= self.out_channels:
            return convolve(self.weight, self.bias)
        return torch.cat([convolve(*part) for part in _rows(self.weight, self.bias, rows)], dim=1)

    def _at_once(self, x: Tensor, dtype: torch.dtype) -> int:
        """Return the number of output channels that are computed together."""
        if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling() or self.groups > 1:
            return self.out_channels
        size = self.weight.numel() * dtype.itemsize
        most = LAID_OUT.get(dtype, size)
        if size <= most or x.numel() > self.weight.numel() or not torch.backends.mkldnn.is_available():
            return self.out_channels
        parts = -(-size // most)
        return -(-self.out_channels // (32 * parts)) * 32


class ConvTranspose2d(Weighted, torch.nn.ConvTranspose2d):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, padding: int = 0):
        super().__init__(inputs, outputs, kernel, stride, padding)
        self.margin = padding

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return [B in h w] -> [B out h' w'] in the layer's dtype."""
        if self.compute is not None:
            convolve = partial(F.conv_transpose2d, stride=self.stride, padding=self.margin)
            return seen("conv2d", self.path, _scaled(self.compute, convolve, x, self))
        wide = self.dtype if multiplies(self.dtype, x.device.type) else torch.float32
        bias = None if self.bias is None else self.bias.to(wide)
        y = F.conv_transpose2d(x.to(self.dtype).to(wide), self.weight.to(wide), bias, self.stride, self.margin)
        return seen("conv2d", self.path, y.to(self.dtype))


class ResponseNorm(torch.nn.Module):
    """The global response norm of ConvNeXt V2 (S. Woo et al., 2023), over the tokens of an image."""

    path = ""

    def __init__(self, channels: int, eps: float):
        super().__init__()
        self.eps = eps
        self.gamma = torch.nn.Parameter(torch.empty(channels))
        self.beta = torch.nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return x * (1 + gamma * share) + beta for x [B L C], where a channel's share is its length over all tokens by
        the mean length of all channels, in float32; x's dtype out."""
        wide = at_least_float32(x)
        length = wide.square().sum(1, keepdim=True).clamp_min(1e-24).sqrt()
        share = length / (length.mean(-1, keepdim=True) + self.eps)
        gamma, beta = (_wide(self, name, wide.dtype) for name in ("gamma", "beta"))
        return seen("response_norm", self.path, torch.addcmul(beta, wide, 1 + gamma * share).to(x.dtype))


class ChannelNorm(torch.nn.Module):
    path = ""

    def __init__(self, channels: int):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return x / |x| * sqrt(C) * gamma with |x| the length over channels at each pixel, in float32; x's dtype
        out. NaN where float32 does not hold the square of the length."""
        wide = at_least_float32(x)
        squares = wide.square().sum(1, keepdim=True).clamp_min(1e-24)
        scale = squares.rsqrt() * x.shape[1] ** 0.5 + 0 * squares
        gamma = _wide(self, "gamma", wide.dtype)[:, None, None]
        return seen("channel_norm", self.path, (wide * scale * gamma).to(x.dtype))


class PixelNorm(torch.nn.Module):
    """An RMS norm over the channels of each pixel, with gain and bias."""

    path = ""

    def __init__(self, channels: int, eps: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(channels))
        self.bias = torch.nn.Parameter(torch.empty(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) * weight + bias for x [B C h w], in float32; x's dtype out."""
        wide = at_least_float32(x)
        weight, bias = (_wide(self, name, wide.dtype)[:, None, None] for name in ("weight", "bias"))
        normed = wide * (wide.square().mean(1, keepdim=True) + self.eps).rsqrt()
        return seen("pixel_norm", self.path, torch.addcmul(bias, normed, weight).to(x.dtype))


class ChannelStatistics(torch.nn.Module):
    """Mean and variance of each channel of latents (a batch norm's running statistics)."""

    path = ""

    def __init__(self, channels: int, eps: float):
        super().__init__()
        self.running_mean = torch.nn.Parameter(torch.empty(channels))
        self.running_var = torch.nn.Parameter(torch.empty(channels))
        self.eps = eps

    def forward(self, moments: Tensor) -> Tensor:
        """Return standardized latents for mean and log variance [B 2C h w]; in float32, and float32 out."""
        mean, log_variance = at_least_float32(moments).chunk(2, dim=1)
        shift, variance = self._columns(mean.dtype)
        standardized = torch.cat(((mean - shift) / variance.sqrt(), log_variance - variance.log()), dim=1)
        return seen("channel_statistics", self.path, standardized)

    def inverse(self, x: Tensor) -> Tensor:
        """Return standardized latents [B C h w] in their own scale; in float32, and float32 out."""
        x = at_least_float32(x)
        shift, variance = self._columns(x.dtype)
        return seen("channel_statistics", self.path, x * variance.sqrt() + shift)

    def _columns(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return mean and variance [C 1 1] in `dtype`."""
        mean, variance = (_wide(self, name, dtype)[:, None, None] for name in ("running_mean", "running_var"))
        return mean, variance + self.eps


class BatchNorm(torch.nn.Module):
    """A batch norm by the statistics of its training, with gain and bias if it is `affine`."""

    path = ""

    def __init__(self, channels: int, eps: float, affine: bool = True):
        super().__init__()
        self.eps, self.affine = eps, affine
        self.running_mean = torch.nn.Parameter(torch.empty(channels))
        self.running_var = torch.nn.Parameter(torch.empty(channels))
        if affine:
            self.weight = torch.nn.Parameter(torch.empty(channels))
            self.bias = torch.nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return (x - mean) / deviation * weight + bias for x [B C h w], in float32; x's dtype out."""
        wide = at_least_float32(x)
        mean, variance = (_wide(self, name, wide.dtype) for name in ("running_mean", "running_var"))
        slope = (variance + self.eps).rsqrt()
        slope = slope * _wide(self, "weight", wide.dtype) if self.affine else slope
        shift = _wide(self, "bias", wide.dtype) - mean * slope if self.affine else -mean * slope
        normed = torch.addcmul(shift[:, None, None], wide, slope[:, None, None])
        return seen("batch_norm", self.path, normed.to(x.dtype))


class LayerNorm(torch.nn.Module):
    path = ""
    compute: Compute | None = None

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width))
        self.bias = torch.nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return (x - mean) / deviation * weight + bias over the last axis, in float32; the weight's dtype out, or
        float32."""
        x, weight, bias = _for_norm(x, self)
        y = F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        return seen("layer_norm", self.path, _normed(y, self))


class GroupNorm(torch.nn.Module):
    path = ""
    compute: Compute | None = None

    def __init__(self, groups: int, channels: int, eps: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(channels))
        self.bias = torch.nn.Parameter(torch.empty(channels))
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor) -> Tensor:
        """Return (x - mean) / deviation * weight + bias over each group of channels and all pixels of [B C h w], in
        float32; the weight's dtype out, or float32. NaN where float32 does not hold the sum of a group's squares."""
        x, weight, bias = _for_norm(x, self)
        y = group_norm(x, self.groups, weight, bias, self.eps)
        return seen("group_norm", self.path, _normed(y, self))

    def moments(self, x: Tensor) -> Moments:
        """Return the moments of each group of channels [B groups] over all pixels of x [B C h w]."""
        grouped = at_least_float32(x).reshape(x.shape[0], self.groups, -1)
        mean = grouped.mean(-1, keepdim=True)
        squares = (grouped - mean).square_().sum(-1)
        return moments(grouped.shape[-1], mean.squeeze(-1).cpu().numpy(), squares.cpu().numpy())

    def by(self, whole: Moments) -> Callable[[Tensor], Tensor]:
        """Return this norm for a part of an image, as a function; `whole`: the moments of the whole image."""
        return partial(self._by, whole.mean, whole.scale(self.eps))

    def _by(self, mean: np.ndarray, scale: np.ndarray, x: Tensor) -> Tensor:
        """Return (x - mean) * scale * weight + bias for mean and scale [B groups] and x [B C h w], in float32;
        dtypes as in `forward`."""
        wide = at_least_float32(x)
        weight, bias = (_wide(self, name, wide.dtype)[None, :, None, None] for name in ("weight", "bias"))
        slope = self._each_channel(scale, wide) * weight
        y = torch.addcmul(bias - self._each_channel(mean, wide) * slope, wide, slope)
        return seen("group_norm", self.path, _normed(y, self))

    def _each_channel(self, values: np.ndarray, x: Tensor) -> Tensor:
        """Return values [B groups] as [B C 1 1], in the dtype and on the device of x."""
        repeated = np.repeat(values, self.weight.shape[0] // self.groups, axis=1)[:, :, None, None]
        return torch.from_numpy(repeated).to(device=x.device, dtype=x.dtype)


class TokenNorm(GroupNorm):
    """A group norm that returns tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of [B C h w] as tokens [B L C], contiguous for a card's products in 16 bit. A CPU takes
        them as they are."""
        y = images.tokens(super().forward(x))
        return y.contiguous() if y.device.type in ("cuda", "meta") and y.element_size() == 2 else y


def _for_norm(x: Tensor, norm: LayerNorm | GroupNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and bias of a norm in one dtype: their common one (torch's norms compute in float32 inside),
    else float32."""
    if x.dtype == norm.weight.dtype:
        return x, norm.weight, norm.bias
    x = at_least_float32(x)
    return x, _wide(norm, "weight", x.dtype), _wide(norm, "bias", x.dtype)


def _wide(norm: torch.nn.Module, name: str, dtype: torch.dtype) -> Tensor:
    """Return the parameter `name` of a norm in `dtype`, and keep it for the next call: small as it is, a cast is a
    kernel."""
    weight: Tensor = getattr(norm, name)
    if weight.dtype == dtype or weight.requires_grad or torch.compiler.is_compiling():
        return weight.to(dtype)
    source, wide = norm.__dict__.get(f"_wide_{name}", (None, None))
    if source is not weight or wide.dtype != dtype:
        with torch.inference_mode(False):  # so that a training may take it
            wide = weight.to(dtype)
        norm.__dict__[f"_wide_{name}"] = weight, wide
    return wide


def _normed(y: Tensor, norm: LayerNorm | GroupNorm) -> Tensor:
    """Return y in the dtype of the next layer: the weight's, or float32 where products are computed in that."""
    return y.to(norm.weight.dtype) if norm.compute is None else at_least_float32(y)
