"""Stable Diffusion's components on torch, as `qwenimg.common.backend` wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwenimg.backends.torch import load, ops
from qwenimg.backends.torch.networks.clip import CLIPTextEncoder
from qwenimg.backends.torch.networks.unet import Context
from qwenimg.backends.torch.networks.unet import UNet as Model
from qwenimg.backends.torch.ops.cpu import computes
from qwenimg.common.backend import NumpyArray
from qwenimg.common.checkpoint import LoadPlan
from qwenimg.common.models import clip
from qwenimg.common.models.clip import CLIPConfig
from qwenimg.common.models.unet import UNetConfig
from qwenimg.common.precision import Precision


class ClipEncoder:
    def __init__(self, config: CLIPConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        self.config, self.device = config, device
        stream = ops.DTYPES[precision.residual_dtype("text")]
        self.model = load.empty(lambda: CLIPTextEncoder(config, stream))
        load.fill(self.model, plan, lambda name: precision.weight_dtype("text", name), device)

    @computes
    def encode(self, ids: Sequence[Sequence[int]], skipped: int, normed: bool) -> tuple[Tensor, Tensor]:
        """Chunks of ids [N S] -> states [N S C] and pooled vectors [N P]."""
        ends = [clip.eos_position(self.config, chunk) for chunk in ids]
        rows = torch.tensor([list(chunk) for chunk in ids], device=self.device)
        return self.model(rows, ends, skipped, normed)


@dataclass(frozen=True)
class Condition:
    context: list[Context]
    addition: Tensor | None
    branches: int


class UNet:
    def __init__(self, config: UNetConfig, plan: LoadPlan, precision: Precision, device: torch.device):
        self.device = device
        stream = ops.DTYPES[precision.residual_dtype("transformer")]
        self.dtype = ops.DTYPES[precision.compute_dtype("transformer")]
        self.model = load.empty(lambda: Model(config, stream))
        load.fill(self.model, plan, lambda name: precision.weight_dtype("transformer", name), device)

    @computes
    def condition(self, texts: NumpyArray, addition: NumpyArray | None) -> Condition:
        """Text states [B S C]; pooled text and sinusoids of the sizes [B A]."""
        extra = None if addition is None else ops.table(addition, self.dtype, self.device)
        return Condition(self.model.context(ops.table(texts, self.dtype, self.device)), extra, len(texts))

    @computes
    def predict(self, latents: Tensor, features: NumpyArray, condition: Condition) -> Tensor:
        """[1 C h w] -> [B 4 h w]."""
        x = latents.expand(condition.branches, -1, -1, -1)
        made = self.model(x, ops.table(features, self.dtype, self.device), condition.context, condition.addition)
        return ops.at_least_float32(made)
