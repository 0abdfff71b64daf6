"""Linear layers whose weight stays quantized (`common/quant/`) and is decoded for each product."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx.core import array as Array

from qwenimg.backends.mlx.ops import device
from qwenimg.backends.mlx.ops.functions import on_gpu
from qwenimg.backends.mlx.ops.layers import Linear, rotate
from qwenimg.common.quant.affine import Affine
from qwenimg.common.quant.block_float import BlockFloat
from qwenimg.common.quant.quantized_tensor import QuantizedTensor
from qwenimg.common.quant.rotated import RotatedInt8
from qwenimg.common.runtime.observers import seen
from qwenimg.common.weights.storage import QuantFormat, rotation_of

IN_CACHE = 1 << 18  # values that a CPU decodes at once


class QuantizedLinear(Linear):
    """A `Linear` whose weight is quantized: the same values up to rounding."""

    def __init__(self, linear: Linear, code: QuantFormat, dtype: mx.Dtype):
        mlx.nn.Module.__init__(self)
        self.path, self.compute = linear.path, linear.compute
        self.code, self._dtype = code, dtype
        self.rotation = rotation_of(code)
        self.branch: tuple[Array, ...] = ()
        if "bias" in linear:
            self.bias = linear.bias

    def put(self, codes: Array, scales: Array, biases: Array | None = None) -> None:
        """Set the weight. codes: uint32 [out words]; scales, biases: float16 or float32 [out groups]; or scales alone,
        uint8, or float32 [out 1] of rotated rows."""
        self.codes, self.scales = codes, scales
        if biases is not None:
            self.biases = biases

    def outputs(self, which: slice) -> QuantizedTensor:
        """Return the quantized weight of some outputs."""
        return QuantizedTensor(*(np.array(part[which]) for part in self.packed))

    def drop(self) -> None:
        self.put(*(mx.zeros(part.shape, part.dtype) for part in self.packed))

    @property
    def packed(self) -> list[Array]:
        return [self[name] for name in ("codes", "scales", "biases") if name in self]

    @property
    def dtype(self) -> mx.Dtype:
        return self._dtype if self.compute is None else mx.float32

    @property
    def plain(self) -> bool:
        """False, since the layer's kernel multiplies codes."""
        return False

    @property
    def weight(self) -> Array:  # type: ignore[override]
        """The weight [out in], decoded at each call and rounded once; as the layer's `rotation` leaves it.

        A CPU decodes it in parts, since MLX makes several arrays of its size on the way, in 6 bits one for every bit.
        """
        parts, step = [], self._step
        for i in range(0, self.codes.shape[0], step):
            parts.append(self._decoded(i).astype(self._dtype))
            if step < self.codes.shape[0]:
                device.eval(parts[-1])
        return mx.concatenate(parts) if len(parts) > 1 else parts[0]

    @property
    def _step(self) -> int:
        """The number of rows that are decoded at once."""
        rows = self.codes.shape[0]
        return rows if on_gpu() else max(1, IN_CACHE * rows * self.code.bits // (32 * self.codes.size))

    def _decoded(self, start: int) -> Array:
        """Return the rows from `start` that are decoded at once, in float32."""
        return decode(*(part[start : start + self._step] for part in self.packed), code=self.code)

    def __call__(self, x: Array) -> Array:
        """Return [... in] -> [... out].

        A GPU has a kernel, which does not round the weight, but none for whole rows of one scale. A CPU's kernel sums
        16 bit in 16 bit. Where there is none, the decoded weight is multiplied as usual.
        """
        if not on_gpu() or self.compute is not None or isinstance(self.code, RotatedInt8):
            wide = self.rotation and self.compute is None and not on_gpu()
            y = self._wide(x.astype(self.dtype)) if wide else super().__call__(x)
            if not on_gpu():
                device.eval(y)  # or MLX decodes the weights of many layers before it multiplies one
            return y
        x = rotate(x.astype(self.dtype), self.rotation) if self.rotation else x.astype(self.dtype)
        y = mx.quantized_matmul(x, *self.packed, transpose=True, **_as_keywords(self.code))
        y = y + self.bias if "bias" in self else y
        return seen("linear", self.path, self.with_branch(x, y.astype(self.dtype)))

    def _wide(self, x: Array) -> Array:
        """Return the result of a layer that rotates, in float32 as a whole and rounded once."""
        turned, parts, step = rotate(x.astype(mx.float32), self.rotation), [], self._step
        for i in range(0, self.codes.shape[0], step):
            y = mx.matmul(turned, self._decoded(i).T)
            y = y + self.bias[i : i + step].astype(mx.float32) if "bias" in self else y
            parts.append(y.astype(x.dtype))
            device.eval(parts[-1])
        return seen("linear", self.path, self.with_branch(turned, mx.concatenate(parts, axis=-1)))


def decode(codes: Array, scales: Array, biases: Array | None = None, *, code: QuantFormat) -> Array:
    """Return float32(code) * float32(scale) + float32(bias): [rows words], [rows groups] twice -> [rows in]; or
    scales alone, and no bias. Rotated rows stay so."""
    if isinstance(code, RotatedInt8):
        return codes.view(mx.int8).astype(mx.float32) * scales
    if biases is None:
        return mx.dequantize(codes, scales, dtype=mx.float32, **_as_keywords(code))
    return mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), **_as_keywords(code))


def _as_keywords(code: Affine | BlockFloat) -> dict[str, Any]:
    mode = "affine" if isinstance(code, Affine) else code.mode
    return {"group_size": code.group, "bits": code.bits, "mode": mode}
