"""Linear layers whose weight stays quantized (`common/quant/`) and is decoded for each product."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.backends.torch.ops.cpu import multiplies, multiplies_int8
from qwenimg.backends.torch.ops.layers import Linear, rotate
from qwenimg.common.quant.affine import Affine
from qwenimg.common.quant.block_float import E2M1, E8M0_BIAS, BlockFloat
from qwenimg.common.quant.quantized_tensor import QuantizedTensor, unit
from qwenimg.common.quant.rotated import MOST, ROWS, RotatedInt8
from qwenimg.common.runtime.observers import seen
from qwenimg.common.weights.storage import QuantFormat, rotation_of

IN_CACHE = 1 << 18  # values that a CPU decodes at once
EXACT = 1024  # products of 8-bit whole numbers, each up to 127 * 127, of which float32 holds every sum


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
    int8 = False  # whether the input is rounded to 8 bits, and whole numbers are multiplied

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
    def plain(self) -> bool:
        return super().plain and not self.int8

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
        if self.int8:
            assert out is None
            return seen("linear", self.path, self._in_8_bits(x))
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

    def _in_8_bits(self, x: Tensor) -> Tensor:
        """Return the result of a layer that rounds its input. Compiled, all rows are multiplied at once."""
        turned = rotate(x if multiplies(x.dtype, x.device.type) else x.float(), self.rotation)
        rows, codes = turned.reshape(-1, self.in_features), self.codes.view(torch.int8)
        parts = (rows,) if torch.compiler.is_compiling() else rows.split(ROWS)
        results = [linear_in_8_bits(part, codes, self.scales, self.bias).to(x.dtype) for part in parts]
        y = (results[0] if len(results) == 1 else torch.cat(results)).view(*x.shape[:-1], self.out_features)
        return y if self.branch is None else y + self._branch_of(turned.to(x.dtype), *self.branch)


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


def linear_in_8_bits(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [rows in], rounded to 8 bits, times int8 codes [out in] as whole numbers, scaled back in float32 by the
    rows' scales and by `scales` [out 1], plus the bias: [rows out], float32."""
    whole, steps = rounded(x)
    y = _sums(whole, codes).to(torch.float32).mul_(steps).mul_(scales.t())
    return y if bias is None else y.add_(bias)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [rows in] as whole numbers, int8, half to even, and the scale [rows 1] of each row, float32: its largest
    value is 127. A row of zeros has the scale 0, and one with a value that is not finite a scale that is not."""
    largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    scales = largest.to(torch.float32) / MOST
    whole = (x / torch.where(scales > 0, scales, 1)).round_().clamp_(-MOST, MOST)  # a scale may round towards zero
    return whole.to(torch.int8), scales


def _sums(x: Tensor, codes: Tensor) -> Tensor:
    """Return x codes^T of int8 x [rows in] and codes [out in], exact in int32 [rows out]: in float32 where the device
    has no instructions for it."""
    if not multiplies_int8(x.device.type):
        pairs = zip(x.split(EXACT, 1), codes.split(EXACT, 1), strict=True)
        return reduce(torch.add, (F.linear(a.float(), b.float()).to(torch.int32) for a, b in pairs))
    if x.device.type == "cpu":
        return torch._int_mm(x, codes.t())
    wider, more = padded(x, codes)
    return torch._int_mm(wider, more.t())[: len(x), : len(codes)]


def padded(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 x [rows in] and codes [out in] with the zeros that a card's product needs: it takes more than 16
    rows, and inputs and outputs in multiples of 8."""
    rows, inputs, outputs = max(0, 32 - len(x)), -x.shape[1] % 8, -len(codes) % 8
    x = F.pad(x, (0, inputs, 0, rows)) if rows or inputs else x
    return x, F.pad(codes, (0, inputs, 0, outputs)) if inputs or outputs else codes


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
