"""Linear layers whose weight stays in codes (`common/weights/affine.py`), decoded anew for each product."""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch.ops.layers import Linear
from qwenimg.common.weights.affine import Affine, unit


class QuantisedLinear(Linear):
    """In place of a `Linear`, and in all else like it: the same values, up to the rounding of its weight to codes."""

    codes: Tensor
    scales: Tensor
    biases: Tensor

    def __init__(self, linear: Linear, code: Affine, dtype: torch.dtype):
        torch.nn.Module.__init__(self)
        self.path, self.compute = linear.path, linear.compute
        self.code, self._dtype = code, dtype
        self.bias = linear.bias

    def put(self, codes: Tensor, scales: Tensor, biases: Tensor) -> None:
        """codes: int32 [out words]; scales, biases: float16 or float32 [out groups]."""
        for name, value in (("codes", codes), ("scales", scales), ("biases", biases)):
            setattr(self, name, torch.nn.Parameter(value, requires_grad=False))

    def drop(self) -> None:
        self.put(self.codes.to("meta"), self.scales.to("meta"), self.biases.to("meta"))

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype if self.compute is None else torch.float32

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out in], made anew each time and rounded once."""
        return decode(self.codes, self.scales, self.biases, self.code).to(self._dtype)


def decode(codes: Tensor, scales: Tensor, biases: Tensor, code: Affine) -> Tensor:
    """[rows words], [rows groups] twice -> [rows in]: float32(code) * float32(scale) + float32(bias)."""
    values = unpack(codes, code.bits).to(torch.float32).view(*scales.shape, code.group)
    values.mul_(scales.to(torch.float32)[..., None]).add_(biases.to(torch.float32)[..., None])
    return values.flatten(1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [rows words] -> codes [rows in], uint8 or int32."""
    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        return raw
    mask = 2**bits - 1
    if 8 % bits == 0:
        return torch.stack([raw >> at & mask for at in range(0, 8, bits)], dim=-1).flatten(1)
    count, size = unit(bits)
    units = raw.view(raw.shape[0], -1, size).to(torch.int64)
    whole = units[..., 0]
    for i in range(1, size):
        whole = whole | units[..., i] << 8 * i
    return torch.stack([whole >> at & mask for at in range(0, count * bits, bits)], dim=-1).flatten(1).to(torch.int32)
