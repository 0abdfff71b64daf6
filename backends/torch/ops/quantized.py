"""Linear layers whose weight stays quantized (`common/quant/`) and is decoded for each product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.backends.torch.ops.cpu import multiplies
from qwenimg.backends.torch.ops.layers import Linear, rotate
from qwenimg.common.quant.affine import Affine
from qwenimg.common.quant.block_float import E2M1, E8M0_BIAS, BlockFloat
from qwenimg.common.quant.quantized_tensor import QuantizedTensor, unit
from qwenimg.common.quant.rotated import RotatedInt8
from qwenimg.common.runtime.observers import seen
from qwenimg.common.weights.storage import QuantFormat, rotation_of

IN_CACHE = 1 << 18  # values that a CPU decodes at once


class DecodeBuffer:
    """The memory to which the layers of a model are decoded in turn. The system clears new memory, which takes a CPU
    longer than the decoding."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def of(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the buffer as a tensor of this shape and dtype, enlarged where it is too small."""
        size = shape[0] * shape[1]
        if (self.memory.dtype, self.memory.device) != (dtype, device) or self.memory.numel() < size:
            with torch.inference_mode(False):
                self.memory = torch.empty(size, dtype=dtype, device=device)
        return self.memory[:size].view(shape)


class QuantizedLinear(Linear):
    """A `Linear` whose weight is quantized: the same values up to rounding. With `decoded`, a decoded weight is
    valid until another layer of the model decodes its own."""

    codes: Tensor
    scales: Tensor
    biases: Tensor | None

    def __init__(self, linear: Linear, code: QuantFormat, dtype: torch.dtype, decoded: DecodeBuffer | None = None):
        torch.nn.Module.__init__(self)
        self.path, self.compute = linear.path, linear.compute
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.code, self._dtype, self.decoded = code, dtype, decoded
        self.rotation = rotation_of(code)
        self.bias = linear.bias

    def put(self, codes: Tensor, scales: Tensor, biases: Tensor | None = None) -> None:
        """Set the weight. codes: int32 [out words]; scales, biases: float16 or float32 [out groups]; or scales alone,
        uint8, or float32 [out 1] of rotated rows."""
        for name, value in (("codes", codes), ("scales", scales), ("biases", biases)):
            setattr(self, name, None if value is None else torch.nn.Parameter(value, requires_grad=False))

    def outputs(self, which: slice) -> QuantizedTensor:
        """Return the quantized weight of some outputs."""
        parts = (self.codes, self.scales, *(() if self.biases is None else (self.biases,)))
        codes, *rest = (part[which].cpu().numpy() for part in parts)
        return QuantizedTensor(codes.view("<u4"), *rest)

    def drop(self) -> None:
        biases = None if self.biases is None else self.biases.to("meta")
        self.put(self.codes.to("meta"), self.scales.to("meta"), biases)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype if self.compute is None else torch.float32

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight [out in], decoded at each call and rounded once; as the layer's `rotation` leaves it."""
        if torch.compiler.is_compiling():
            return decode(self.codes, self.scales, self.biases, self.code).to(self._dtype)
        buffer = None if torch.is_grad_enabled() else self.decoded  # which the next layer overwrites
        weight = (buffer or DecodeBuffer()).of((self.out_features, self.in_features), self._dtype, self.codes.device)
        rows = max(1, IN_CACHE // self.in_features) if weight.device.type == "cpu" else self.out_features
        parts = (self.codes, self.scales, *(() if self.biases is None else (self.biases,)))
        for out, codes, scales, *biases in zip(weight.split(rows), *(part.split(rows) for part in parts), strict=True):
            if isinstance(self.code, RotatedInt8) and out.dtype == torch.float32:
                out.copy_(codes.view(torch.int8)).mul_(scales)  # without a copy
            else:
                out.copy_(decode(codes, scales, biases[0] if biases else None, self.code))
        return weight

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the layer's result as `Linear` does. A CPU without products in 16 bit computes a layer that rotates in
        float32 as a whole, and rounds once."""
        x = x.to(self.dtype)
        if torch.is_grad_enabled() and self.compute is None and multiplies(x.dtype, x.device.type):
            x = self.turned(x)
            y = _Frozen.apply(x, self)
            return seen("linear", self.path, y if self.branch is None else y + self._branch_of(x, *self.branch))
        if not self.rotation or self.compute is not None or multiplies(x.dtype, x.device.type):
            return super().forward(x, out)
        assert out is None
        wide, parts = rotate(x.float(), self.rotation), []
        step = max(1, IN_CACHE // self.in_features)
        for start in range(0, self.out_features, step):
            rows = slice(start, start + step)
            biases = None if self.biases is None else self.biases[rows]
            bias = None if self.bias is None else self.bias[rows].float()
            weight = decode(self.codes[rows], self.scales[rows], biases, self.code)
            parts.append(F.linear(wide, weight, bias).to(x.dtype))
        y = torch.cat(parts, dim=-1)
        return seen(
            "linear", self.path, y if self.branch is None else y + self._branch_of(wide.to(x.dtype), *self.branch)
        )


class _Frozen(torch.autograd.Function):
    """The product of a layer, whose weight is decoded again for the gradient of its input: no decoded weight is kept
    for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            return gradients[0] @ ctx.layer.weight, None


def decode(codes: Tensor, scales: Tensor, biases: Tensor | None, code: QuantFormat) -> Tensor:
    """Return float32(code) * float32(scale) + float32(bias): [rows words], [rows groups] twice -> [rows in]; or
    without a bias. Rotated rows stay so."""
    if isinstance(code, RotatedInt8):
        return codes.view(torch.int8).to(torch.float32).mul_(scales)
    if not isinstance(code, Affine):
        return _block_float(codes, scales, code)
    assert biases is not None
    values = unpack(codes, code.bits).to(torch.float32).view(*scales.shape, code.group)
    values.mul_(scales.to(torch.float32)[..., None]).add_(biases.to(torch.float32)[..., None])
    return values.flatten(1)


def _block_float(codes: Tensor, scales: Tensor, code: BlockFloat) -> Tensor:
    """Return float32(code) * float32(scale): [rows words], uint8 [rows groups] -> [rows in]."""
    if code.bits == 4:
        table = torch.tensor(E2M1, dtype=torch.float32, device=codes.device)
        values = table.index_select(0, unpack(codes, 4).to(torch.int32).flatten())
    else:
        values = unpack(codes, 8).view(torch.float8_e4m3fn).to(torch.float32)
    if code.mode == "nvfp4":
        factors = scales.view(torch.float8_e4m3fn).to(torch.float32)
    else:
        factors = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.to(torch.int32) - E8M0_BIAS)
    return (values.view(*scales.shape, code.group) * factors[..., None]).flatten(1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [rows words] into codes [rows in], uint8."""
    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        return raw
    count, size = unit(bits)
    dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[count]  # a byte for each code of a unit
    units, mask = raw.view(raw.shape[0], -1, size), 2**bits - 1
    packed = units[..., 0].to(dtype)
    for i in range(1, size):
        packed |= units[..., i].to(dtype) << 8 * i
    codes = packed & mask
    for i in range(1, count):
        codes |= (packed & mask << i * bits) << i * (8 - bits)
    return codes.view(torch.uint8)
