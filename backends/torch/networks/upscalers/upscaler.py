"""The part that the networks of this room share as components."""

from __future__ import annotations

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.loaded import PixelNetwork
from qwenimg.backends.torch.ops import images
from qwenimg.common.runtime.engine import NumpyArray


class UpscalerRunner(PixelNetwork):
    @ops.computes
    def upscale(self, pixels: NumpyArray, rows: int) -> NumpyArray:
        x = ops.table(images.from_bchw(pixels), self.dtype, self.device)
        return images.to_bchw(ops.numpy(self.model(images.laid_out(x, self.dtype), rows)))
