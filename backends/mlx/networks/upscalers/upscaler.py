# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""The part that the networks of this room share as components."""

from __future__ import annotations

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.loaded import PixelNetwork
from qwenimg.backends.mlx.ops import images
from qwenimg.common.runtime.engine import NumpyArray


class UpscalerRunner(PixelNetwork):
    @ops.computes
    def upscale(self, pixels: NumpyArray, rows: int) -> NumpyArray:
        x = ops.table(images.from_bchw(pixels), self.dtype)
        return images.to_bchw(ops.numpy(self.model(images.laid_out(x, self.dtype), rows)))
