# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""The part that the networks of this room share as components."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn

from qwenimg.backends.mlx import load, ops
from qwenimg.backends.mlx.ops import images
from qwenimg.common.precision.precision import Precision
from qwenimg.common.runtime.engine import NumpyArray
from qwenimg.common.weights.plan import LoadPlan


class UpscalerComponent:
    def __init__(self, build: Callable[[], mlx.nn.Module], plan: LoadPlan, precision: Precision):
        self.dtype = ops.DTYPES[precision.compute_dtype("vae")]
        self.model: Any = load.empty(build, precision, "vae")
        load.fill(self.model, plan)

    @ops.computes
    def upscale(self, pixels: NumpyArray, rows: int) -> NumpyArray:
        x = ops.table(images.from_bchw(pixels), self.dtype)
        return images.to_bchw(ops.numpy(self.model(images.laid_out(x, self.dtype), rows)))
