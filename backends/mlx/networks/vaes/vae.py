# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""The part that both VAEs share as components. A component has either the encoder or the decoder loaded, and only
that half may be used."""

from __future__ import annotations

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.loaded import PixelNetwork
from qwenimg.backends.mlx.ops import images
from qwenimg.common.runtime.engine import NumpyArray

WIDE = 2**20  # more rows than any image has


class VAERunner(PixelNetwork):
    @ops.computes
    def decode(self, latents: NumpyArray, rows: int | None = None) -> NumpyArray:
        height, width = latents.shape[2:]
        z = ops.table(images.from_bchw(latents), self.dtype)
        return images.to_bchw(ops.numpy(self.model.decode(z, height, width, rows or WIDE)))

    @ops.computes
    def encode(self, pixels: NumpyArray, rows: int | None = None) -> NumpyArray:
        x = ops.table(images.from_bchw(pixels), self.dtype)
        return images.to_bchw(ops.numpy(self.model.encode(x, rows or WIDE)))
