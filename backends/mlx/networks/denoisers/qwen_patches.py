# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Block-wise patches for Qwen-Image. What is unusual about them: `qwenimg.common.networks.denoisers.qwen_patches`.

B batch, L image tokens, C channels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.denoisers.qwen_patches import NORM_EPS, QwenPatchesConfig
from qwenimg.common.runtime.engine import TimeStep


class Patch(mlx.nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.x_rms = ops.RMSNorm(dim, NORM_EPS)
        self.y_rms = ops.RMSNorm(dim, NORM_EPS)
        self.input_proj = ops.Linear(dim, dim)
        self.output_proj = ops.Linear(dim, dim)

    def __call__(self, img: Array, picture: Array) -> Array:
        """Return the update of an image stream [B L C] for an embedded picture [1 L C]."""
        hidden = self.input_proj(self.x_rms(img) + self.y_rms(picture))
        return self.output_proj(ops.gelu_erf(hidden))


class QwenImagePatches(mlx.nn.Module):
    def __init__(self, config: QwenPatchesConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.img_in = ops.Linear(config.picture_channels, config.dim)
        self.controlnet_blocks = [Patch(config.dim) for _ in range(config.num_layers)]

    def __call__(self, latents: Array) -> Array:
        """Embed the packed latents of a picture, with the patches of its mask after them: [1 L in] -> [1 L C]."""
        return ops.stream(self.img_in(latents), self.stream)


# Runner


@dataclass(frozen=True)
class Patched:
    """A `Change` by one patch."""

    patch: Callable[[Array, Array], Array]
    picture: Array  # [1 L C]
    scale: float

    def __call__(self, img: Array) -> Array:
        update = self.patch(img[:, : self.picture.shape[1]], self.picture)
        return update if self.scale == 1 else update * self.scale


class Runner(LoadedNetwork[QwenPatchesConfig, QwenImagePatches]):
    network, role = QwenImagePatches, "transformer"

    @ops.computes
    def condition(self, text: Array, grid: tuple[int, int], picture: Array) -> Array:
        """Embed a picture [1 L in] once. They see neither text nor grid."""
        return self.model(picture)

    @ops.computes
    def predict(self, x: Array, step: TimeStep, condition: Array, scale: float) -> Sequence[Patched]:
        """Return the changes after each block of the transformer, times `scale`. They see neither latents nor step."""
        return [Patched(patch, condition, scale) for patch in self.model.controlnet_blocks]
