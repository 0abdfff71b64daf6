"""Linear layers whose weight stays in codes (`common/weights/affine.py`), decoded for each product and dropped again."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx.ops.functions import on_gpu
from qwenimg.common.runtime.observers import seen
from qwenimg.common.weights.affine import Affine


class QuantisedLinear(mlx.nn.Module):
    """In place of a `Linear`: the same values out, up to the rounding of its weight."""

    def __init__(self, linear: mlx.nn.Module, code: Affine, dtype: mx.Dtype):
        super().__init__()
        self.path = linear.path
        self.bits, self.group, self.dtype = code.bits, code.group, dtype
        if "bias" in linear:
            self.bias = linear.bias

    def put(self, codes: Array, scales: Array, biases: Array) -> None:
        """codes: uint32 [out words]; scales, biases: float16 or float32 [out groups]."""
        self.weight, self.scales, self.biases = codes, scales, biases

    def drop(self) -> None:
        self.put(*(mx.zeros(part.shape, part.dtype) for part in (self.weight, self.scales, self.biases)))

    def __call__(self, x: Array) -> Array:
        """[... in] -> [... out] in the layer's dtype. On a GPU by its kernel, which does not round the weight; a CPU's
        sums 16 bit in 16 bit, so there the decoded weight, rounded once, is multiplied as usual."""
        x = x.astype(self.dtype)
        if on_gpu():
            packed = (self.weight, self.scales, self.biases)
            y = mx.quantized_matmul(x, *packed, transpose=True, group_size=self.group, bits=self.bits)
            y = y + self.bias if "bias" in self else y
            return seen("linear", self.path, y.astype(self.dtype))
        weight = decode(self.weight, self.scales, self.biases, Affine(self.bits, self.group)).astype(self.dtype)
        y = mx.addmm(self.bias, x, weight.T) if "bias" in self else mx.matmul(x, weight.T)
        return seen("linear", self.path, y)


def decode(codes: Array, scales: Array, biases: Array, code: Affine) -> Array:
    """[rows words], [rows groups] twice -> [rows in]: float32(code) * float32(scale) + float32(bias)."""
    wide = (scales.astype(mx.float32), biases.astype(mx.float32))
    return mx.dequantize(codes, *wide, group_size=code.group, bits=code.bits)
