"""The part that the networks of this room share as components."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qwenimg.backends.torch import load, ops
from qwenimg.backends.torch.ops import images
from qwenimg.common.precision.precision import Precision
from qwenimg.common.runtime.engine import NumpyArray
from qwenimg.common.weights.plan import LoadPlan


class UpscalerComponent:
    def __init__(
        self, build: Callable[[], torch.nn.Module], plan: LoadPlan, precision: Precision, device: torch.device
    ):
        self.device = device
        self.dtype = ops.DTYPES[precision.compute_dtype("vae")]
        self.model: Any = load.empty(build, precision, "vae")
        load.fill(self.model, plan, device)

    @ops.computes
    def upscale(self, pixels: NumpyArray, rows: int) -> NumpyArray:
        x = ops.table(images.from_bchw(pixels), self.dtype, self.device)
        return images.to_bchw(ops.numpy(self.model(images.laid_out(x, self.dtype), rows)))
