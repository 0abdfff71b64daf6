"""What the VAEs have in common as components: two halves, each loaded when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qwenimg.backends.torch import load, ops
from qwenimg.backends.torch.ops import images
from qwenimg.common.runtime.engine import NumpyArray
from qwenimg.common.weights.plan import LoadPlan
from qwenimg.common.weights.precision import Precision

WIDE = 2**20  # a tile side that no image reaches


class VAE:
    def __init__(
        self,
        build: Callable[[], torch.nn.Module],
        decoder_only: Callable[[str], bool],
        plan: LoadPlan,
        precision: Precision,
        device: torch.device,
    ):
        self.decoder_only, self.plan = decoder_only, plan
        self.device = device
        self.dtype_of: Callable[[str], str] = lambda name: precision.weight_dtype("vae", name)
        self.dtype = ops.DTYPES[precision.compute_dtype("vae")]
        self.model: Any = load.empty(build)

    @ops.computes
    def decode(self, latents: NumpyArray, tile: int | None = None) -> NumpyArray:
        self._need(self.decoder_only)
        height, width = latents.shape[2:]
        z = ops.table(images.from_bchw(latents), self.dtype, self.device)
        return images.to_bchw(ops.numpy(self.model.decode(z, height, width, tile or WIDE)))

    @ops.computes
    def encode(self, pixels: NumpyArray) -> NumpyArray:
        self._need(lambda name: not self.decoder_only(name))
        x = ops.table(images.from_bchw(pixels), self.dtype, self.device)
        return images.to_bchw(ops.numpy(self.model.encode(x)))

    def _need(self, wanted: Callable[[str], bool]) -> None:
        """Loads the half of the model that is used, once."""
        plan = self.plan.only(wanted)
        if load.missing(self.model, plan.entries):
            load.fill(self.model, plan, self.dtype_of, self.device)
