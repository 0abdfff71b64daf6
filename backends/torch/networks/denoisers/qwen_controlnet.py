"""A ControlNet for Qwen-Image. What is unusual about it: `qwenimg.common.networks.denoisers.qwen_controlnet`.

B batch, L image tokens, S text tokens, C channels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qwenimg.backends.torch import load, ops
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import Pair, Residual, Rope, residuals
from qwenimg.backends.torch.networks.denoisers.qwen_dit import TimeTextEmbed, TransformerBlock, block_rows
from qwenimg.backends.torch.networks.loaded import LoadedNetwork
from qwenimg.common.networks.denoisers import qwen_conditioning
from qwenimg.common.networks.denoisers.qwen_controlnet import QwenControlNetConfig
from qwenimg.common.networks.denoisers.qwen_dit import NORM_EPS
from qwenimg.common.runtime.engine import NumpyArray


class QwenImageControlNet(torch.nn.Module):
    def __init__(self, config: QwenControlNetConfig, stream: torch.dtype):
        super().__init__()
        self.stream, dim = stream, config.dim
        self.time_text_embed = TimeTextEmbed(config)
        self.txt_norm = ops.RMSNorm(config.joint_attention_dim, NORM_EPS)
        self.img_in = ops.Linear(config.in_channels, dim)
        self.txt_in = ops.Linear(config.joint_attention_dim, dim)
        self.transformer_blocks = torch.nn.ModuleList([TransformerBlock(config) for _ in range(config.num_layers)])
        self.controlnet_blocks = torch.nn.ModuleList([ops.Linear(dim, dim) for _ in self.transformer_blocks])
        self.controlnet_x_embedder = ops.Linear(config.picture_channels, dim)

    def picture(self, latents: Tensor) -> Tensor:
        """Embed the packed latents of a picture, with the patches of its mask after them: [1 L in] -> [1 L C]."""
        return ops.stream(self.controlnet_x_embedder(latents), self.stream)

    def context(self, text: Tensor) -> Tensor:
        """Return the start of the text stream [1 S C] for text states [1 S 3584]; the same in every step."""
        return ops.stream(self.txt_in(self.txt_norm(text)), self.stream)

    def forward(
        self, latents: Tensor, picture: Tensor, txt: Tensor, block_mods: list[Pair], rope: Rope
    ) -> list[Tensor]:
        """Return a residual [1 L C] after each block, for packed latents [1 L in], an embedded picture [1 L C] and the
        text stream [1 S C]. block_mods, rope: as for the transformer."""
        img = ops.add(ops.stream(self.img_in(latents), self.stream), picture)
        made = []
        for block, linear, mods in zip(self.transformer_blocks, self.controlnet_blocks, block_mods, strict=True):
            img, txt = block(img, txt, mods, rope, None, None)
            made.append(linear(img))
            ops.async_eval(made[-1])
        return made


# Runner


@dataclass(frozen=True)
class Condition:
    picture: Tensor
    txt: Tensor
    rope: Rope


class Runner(LoadedNetwork[QwenControlNetConfig, QwenImageControlNet]):
    network, role = QwenImageControlNet, "transformer"

    @ops.computes
    def modulate(self, features: NumpyArray) -> list[Pair]:
        """Return the rows of every block for sinusoids [T 256], as the transformer does."""
        rows = self.table(features)
        briefly = partial(load.briefly, self.model, self.plan, self.device)
        temb = briefly("time_text_embed.", lambda: self.model.time_text_embed(rows, None))
        return block_rows(briefly, self.model.transformer_blocks, temb)

    @ops.computes
    def condition(self, text: Tensor, grid: tuple[int, int], picture: Tensor) -> Condition:
        """Prepare a text [1 S C], rows and columns of tokens, and a picture [1 L in] once."""
        shapes = [(1, *grid)]
        tables = qwen_conditioning.image_and_text_rope(self.config, shapes, text.shape[1])
        img, txt = ([self.table(part) for part in pair] for pair in tables)
        return Condition(
            picture=self.model.picture(picture),
            txt=self.model.context(text),
            rope=(ops.rope_freqs(*img), ops.rope_freqs(*txt)),
        )

    @ops.computes
    def predict(
        self, x: Tensor, step: tuple[list[Pair], int], condition: Condition, scale: float
    ) -> Sequence[Residual]:
        """Return the changes after each of its blocks, times `scale`, for packed latents x [1 L in] at a row of the
        modulation."""
        modulation, row = step
        one = slice(row, row + 1)
        mods = [(img[one], txt[one]) for img, txt in modulation]
        return residuals(self.model(x, condition.picture, condition.txt, mods, condition.rope), scale)
