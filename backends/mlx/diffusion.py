"""Stable Diffusion's components on MLX, as `qwenimg.common.backend` wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx.core import array as Array

from qwenimg.backends.mlx import load, ops
from qwenimg.backends.mlx.networks.clip import CLIPTextEncoder
from qwenimg.backends.mlx.networks.unet import Context
from qwenimg.backends.mlx.networks.unet import UNet as Model
from qwenimg.common.backend import NumpyArray
from qwenimg.common.checkpoint import LoadPlan
from qwenimg.common.models import clip
from qwenimg.common.models.clip import CLIPConfig
from qwenimg.common.models.unet import UNetConfig
from qwenimg.common.precision import Precision


class ClipEncoder:
    def __init__(self, config: CLIPConfig, plan: LoadPlan, precision: Precision):
        self.config = config
        stream = ops.DTYPES[precision.residual_dtype("text")]
        self.model = load.empty(lambda: CLIPTextEncoder(config, stream))
        load.fill(self.model, plan, lambda name: precision.weight_dtype("text", name))

    def encode(self, ids: Sequence[Sequence[int]], skipped: int, normed: bool) -> tuple[Array, Array]:
        """Chunks of ids [N S] -> states [N S C] and pooled vectors [N P]."""
        ends = [clip.eos_position(self.config, chunk) for chunk in ids]
        rows = mx.array([list(chunk) for chunk in ids])
        return self.model(rows, ends, skipped, normed)


@dataclass(frozen=True)
class Condition:
    context: list[Context]
    addition: Array | None
    branches: int


class UNet:
    def __init__(self, config: UNetConfig, plan: LoadPlan, precision: Precision):
        stream = ops.DTYPES[precision.residual_dtype("transformer")]
        self.dtype = ops.DTYPES[precision.compute_dtype("transformer")]
        self.model = load.empty(lambda: Model(config, stream))
        load.fill(self.model, plan, lambda name: precision.weight_dtype("transformer", name))

    def condition(self, texts: NumpyArray, addition: NumpyArray | None) -> Condition:
        """Text states [B S C]; pooled text and sinusoids of the sizes [B A]."""
        extra = None if addition is None else ops.table(addition, self.dtype)
        return Condition(self.model.context(ops.table(texts, self.dtype)), extra, len(texts))

    def predict(self, latents: Array, features: NumpyArray, condition: Condition) -> Array:
        """[1 C h w] -> [B 4 h w]."""
        x = mx.broadcast_to(latents, (condition.branches, *latents.shape[1:])).transpose(0, 2, 3, 1)
        made = self.model(x, ops.table(features, self.dtype), condition.context, condition.addition)
        return ops.at_least_float32(made).transpose(0, 3, 1, 2)
