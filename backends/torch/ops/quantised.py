"""Linear layers whose weight stays in codes (`common/weights/affine.py`), decoded for each product and dropped again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.backends.torch.ops.cpu import multiplies
from qwenimg.common.runtime.observers import seen
from qwenimg.common.weights.affine import Affine

AT_ONCE = 2**21  # values of a weight that a CPU decodes at a time, which stay in its cache


class QuantisedLinear(torch.nn.Module):
    """In place of a `Linear`: the same values out, up to the rounding of its weight."""

    weight: Tensor
    scales: Tensor
    biases: Tensor

    def __init__(self, linear: torch.nn.Module, code: Affine, dtype: torch.dtype):
        super().__init__()
        self.path = str(linear.path)
        self.code, self.dtype = code, dtype
        self.bias: Tensor | None = linear.bias  # type: ignore[assignment]
        for name in ("weight", "scales", "biases"):
            self.register_parameter(name, None)

    def put(self, codes: Tensor, scales: Tensor, biases: Tensor) -> None:
        """codes: int32 [out words]; scales, biases: float16 or float32 [out groups]."""
        for name, value in (("weight", codes), ("scales", scales), ("biases", biases)):
            setattr(self, name, torch.nn.Parameter(value, requires_grad=False))

    def drop(self) -> None:
        self.put(self.weight.to("meta"), self.scales.to("meta"), self.biases.to("meta"))

    def forward(self, x: Tensor) -> Tensor:
        """[... in] -> [... out] in the layer's dtype, in which the decoded weight is rounded once."""
        x = x.to(self.dtype)
        outputs, at_once = self.weight.shape[0], AT_ONCE // x.shape[-1] if x.device.type == "cpu" else 2**62
        parts = [min(max(1, at_once), outputs - at) for at in range(0, outputs, max(1, at_once))]
        wide = not multiplies(x.dtype, x.device.type)
        given = x.float() if wide else x
        made = []
        for codes, scales, biases, bias in self._split(parts):
            weight = decode(codes, scales, biases, self.code).to(x.dtype)
            if wide:
                weight, bias = weight.float(), None if bias is None else bias.float()
            made.append(F.linear(given, weight, bias).to(x.dtype))
        return seen("linear", self.path, made[0] if len(made) == 1 else torch.cat(made, dim=-1))

    def _split(self, parts: list[int]) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        added = [None] * len(parts) if self.bias is None else self.bias.split(parts)
        packed = (part.split(parts) for part in (self.weight, self.scales, self.biases))
        return list(zip(*packed, added, strict=True))


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
    count, size = (4, 3) if bits == 6 else (8, bits)
    units = raw.view(raw.shape[0], -1, size).to(torch.int64)
    whole = units[..., 0]
    for i in range(1, size):
        whole = whole | units[..., i] << 8 * i
    return torch.stack([whole >> at & mask for at in range(0, count * bits, bits)], dim=-1).flatten(1).to(torch.int32)
