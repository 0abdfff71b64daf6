"""A ControlNet for Flux.1. What is unusual about it: `qwenimg.common.networks.denoisers.flux_controlnet`.

B batch, L image tokens, S text tokens, C channels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import Pair, Residual, Rope, residuals
from qwenimg.backends.torch.networks.denoisers.flux_dit import Rows, Trunk, TrunkRunner
from qwenimg.common.networks.denoisers.flux_conditioning import Grid
from qwenimg.common.networks.denoisers.flux_controlnet import FluxControlNetConfig
from qwenimg.common.runtime.engine import NumpyArray


class FluxControlNet(Trunk):
    def __init__(self, config: FluxControlNetConfig, stream: torch.dtype):
        super().__init__(config, stream)
        dim = config.dim
        self.controlnet_blocks = torch.nn.ModuleList([ops.Linear(dim, dim) for _ in self.transformer_blocks])
        singles = self.single_transformer_blocks
        self.controlnet_single_blocks = torch.nn.ModuleList([ops.Linear(dim, dim) for _ in singles])
        if config.num_mode:
            self.controlnet_mode_embedder = ops.Embedding(config.num_mode, dim)
        self.controlnet_x_embedder = ops.Linear(config.in_channels, dim)

    def picture(self, latents: Tensor) -> Tensor:
        """Embed the packed latents of a picture: [1 L in] -> [1 L C]."""
        return ops.stream(self.controlnet_x_embedder(latents), self.stream)

    def with_kind(self, txt: Tensor, kind: Tensor) -> Tensor:
        """Put the token of a kind [1 1] of pictures before the text stream: [1 S C] -> [1 S+1 C]."""
        return ops.joined(self.controlnet_mode_embedder(kind), txt, self.stream)

    def forward(
        self,
        latents: Tensor,
        picture: Tensor,
        txt: Tensor,
        double_mods: list[Pair],
        single_mods: list[Tensor],
        rope: Rope,
        joint_rope: Tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return a residual [1 L C] after each block of two streams, and after each of one, for packed latents
        [1 L in], an embedded picture [1 L C] and the text stream [1 S C]. double_mods to joint_rope: as for the
        transformer."""
        img = ops.add(ops.stream(self.x_embedder(latents), self.stream), picture)
        double, single = [], []
        for block, linear, mods in zip(self.transformer_blocks, self.controlnet_blocks, double_mods, strict=True):
            img, txt = block(img, txt, mods, rope)
            double.append(ops.async_eval(linear(img)))
        singles = self.single_transformer_blocks
        for block, linear, mod in zip(singles, self.controlnet_single_blocks, single_mods, strict=True):
            img, txt = block(img, txt, mod, joint_rope)
            single.append(ops.async_eval(linear(img)))
        return double, single


# Runner


@dataclass(frozen=True)
class Condition:
    picture: Tensor
    txt: Tensor
    rope: Rope
    joint_rope: Tensor


class Runner(TrunkRunner[FluxControlNetConfig, FluxControlNet]):
    network, role = FluxControlNet, "transformer"

    @ops.computes
    def modulate(self, features: NumpyArray, guidance: NumpyArray, pooled: Sequence[Tensor]) -> Rows:
        """Return the rows of every block; arguments as for `time`."""
        return self.rows(self.time(features, guidance, pooled), len(pooled))

    @ops.computes
    def condition(self, text: Tensor, extra: tuple[Grid, int | None], picture: Tensor) -> Condition:
        """Prepare text states [1 S 4096] and a picture [1 L in] once. extra: rows and columns of tokens, and the kind
        of the picture for a Union."""
        grid, kind = extra
        txt = self.model.context(text)
        if kind is not None:
            txt = self.model.with_kind(txt, ops.placed([[kind]], self.device))
        img_rope, txt_rope = self.tables([grid], txt.shape[1])
        return Condition(
            picture=self.model.picture(picture),
            txt=txt,
            rope=(img_rope, txt_rope),
            joint_rope=torch.cat((txt_rope, img_rope), dim=0),
        )

    @ops.computes
    def predict(
        self, x: Tensor, step: tuple[Rows, int], condition: Condition, scale: float
    ) -> tuple[list[Residual], list[Residual]]:
        """Return the changes after its blocks of two streams, and after those of one, times `scale`, for packed latents
        x [1 L in] at a row of the modulation."""
        modulation, row = step
        c = condition
        double, single = self.model(x, c.picture, c.txt, *modulation.at(row), c.rope, c.joint_rope)
        return residuals(double, scale), residuals(single, scale)
