"""Mixed precision in training: the dtype of each step, autocast, and a loss scaler for float16.

- Parameters, their averages and the optimizer stay float32; a phase's dtype is the dtype of its products.
- No step is skipped: if a float16 gradient overflows, the same step runs again with a smaller scale.
- When the scale collapses, bfloat16 replaces float16, and a line says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from qwenimg.backends.torch.ops import DTYPES
from qwenimg.backends.torch.training.threads import Workers
from qwenimg.common.base.errors import NumericsError
from qwenimg.common.training.config import MAX_STEPS, TrainingPhase, phase_at

Part = tuple[float, Callable[[], Tensor]]
"""A share of a step's batch, and a function that computes its mean loss."""
COUNT = {"min": 0, "max": 32 * MAX_STEPS}  # a step may back off more than once
MOST = 2.0**64  # the largest loss scale: scaled float32 stays far below its maximum


@dataclass
class LossScaler:
    """Dynamic loss scaling (P. Micikevicius et al., "Mixed Precision Training", 2018).

    The scale doubles after `interval` steps without overflow and halves at each overflow. It has collapsed when it
    would fall below `least`, where it no longer protects anything.
    """

    scale: float = 2.0**14
    interval: int = 200
    least: float = 1.0
    largest: float = 2.0**24
    good: int = field(default=0, metadata=COUNT)
    growths: int = field(default=0, metadata=COUNT)
    back_offs: int = field(default=0, metadata=COUNT)
    collapsed: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.scale <= self.largest <= MOST:
            raise ValueError(f"the loss scale {self.scale:g} is not between {self.least:g} and {self.largest:g}")

    def finite(self) -> None:
        """Count a step with finite gradients."""
        self.good += 1
        if self.good >= self.interval and self.scale < self.largest:
            self.scale, self.good, self.growths = self.scale * 2, 0, self.growths + 1

    def overflow(self) -> None:
        """Count a step with gradients that are not finite, and lower the scale."""
        self.good, self.back_offs = 0, self.back_offs + 1
        if self.scale / 2 < self.least:
            self.collapsed = True
        else:
            self.scale /= 2


class MixedPrecision:
    """The gradients of a run's steps in the dtypes of its phases. `scaler` is part of a checkpoint; `workers`, if there
    are any, compute parts of a step at once."""

    def __init__(
        self,
        phases: Sequence[TrainingPhase],
        device: torch.device,
        scaler: LossScaler,
        tell: Callable[[str], None],
        workers: Workers | None = None,
    ):
        self.phases, self.device, self.scaler, self.tell, self.workers = phases, device, scaler, tell, workers
        self.kept: dict[str, int] = {}  # bytes of activations for the backward, by dtype

    def dtype(self, step: int) -> str:
        """Return the dtype of this step's products."""
        dtype = phase_at(self.phases, step).dtype
        return "bfloat16" if dtype == "float16" and self.scaler.collapsed else dtype

    def gradients(self, step: int, parts: Sequence[Part], parameters: Sequence[Tensor]) -> float:
        """Put the gradients of the step into the parameters and return its mean loss.

        Raises NumericsError if the loss is not finite in float32 or bfloat16.
        """
        while True:
            dtype = self.dtype(step)
            half = dtype == "float16"
            loss = self._backward(dtype, parts, parameters, self.scaler.scale if half else 1.0)
            if not half:
                if not math.isfinite(loss):
                    raise NumericsError(f"step {step}: the loss is {loss} in {dtype}")
                return loss
            gradients = [p.grad for p in parameters if p.grad is not None]
            if all(bool(torch.isfinite(x).all()) for x in gradients) and math.isfinite(loss):
                torch._foreach_mul_(gradients, 1 / self.scaler.scale)
                self.scaler.finite()
                return loss
            self.scaler.overflow()
            if self.scaler.collapsed:
                self.tell(
                    f"step {step}: float16 overflows at loss scale {self.scaler.scale:g}; bfloat16 from here on, "
                    f"this step included"
                )

    def _backward(self, dtype: str, parts: Sequence[Part], parameters: Sequence[Tensor], scale: float) -> float:
        compute = partial(self._part, dtype, parameters, scale)
        results = map(compute, parts) if self.workers is None else self.workers.map(compute, parts)
        for parameter in parameters:
            parameter.grad = None
        total, largest = 0.0, 0
        for loss, gradients, size in results:  # in the order of the parts, so that sums are the same each time
            total, largest = total + loss, max(largest, size)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        at_once = 1 if self.workers is None else min(self.workers.count, len(parts))
        self.kept.setdefault(dtype, largest * at_once)
        return total

    def _part(
        self, dtype: str, parameters: Sequence[Tensor], scale: float, part: Part
    ) -> tuple[float, Sequence[Tensor | None], int]:
        """Return loss and gradients of one part, times its share, and, the first time that a dtype is used, the bytes
        of activations that its forward keeps for the backward."""
        share, compute = part
        storages: dict[int, int] = {}

        def count(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        counted = torch.autograd.graph.saved_tensors_hooks(count, lambda x: x)
        with nullcontext() if dtype in self.kept else counted, self._autocast(dtype):
            loss = compute()
        gradients = torch.autograd.grad(loss * (share * scale), parameters, allow_unused=True)
        return share * loss.item(), gradients, sum(storages.values())

    def _autocast(self, dtype: str) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, DTYPES[dtype], enabled=dtype != "float32")


def recommend(device: torch.device) -> tuple[str, str]:
    """Return the value of `--precision auto` on this device, and why."""
    if device.type == "cpu":
        return "fp32", "on a CPU 16-bit convolutions and small products are slower than fp32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "default", "this GPU multiplies in bf16, which needs no loss scaling; start and end stay fp32"
    return "fp16", "this GPU has no bf16; fp16 with a dynamic loss scale"
