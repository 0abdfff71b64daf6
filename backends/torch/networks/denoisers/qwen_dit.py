"""Qwen-Image's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.qwen_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D. Attribute paths are checkpoint keys.
Modulation rows come ready from `modulation`, since they depend on the timestep alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch import load, ops
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import (
    Change,
    FeedForward,
    FinalNorm,
    JointBlock,
    Pair,
    Rope,
    TimestepEmbedding,
)
from qwenimg.backends.torch.networks.loaded import LoadedNetwork
from qwenimg.common.networks.denoisers import qwen_conditioning
from qwenimg.common.networks.denoisers.qwen_dit import MLP_RATIO, NORM_EPS, TIME_CHANNELS, QwenDiTConfig
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class TimeTextEmbed(torch.nn.Module):
    def __init__(self, config: QwenDiTConfig):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(TIME_CHANNELS, config.dim)
        if config.use_additional_t_cond:
            self.addition_t_embedding = ops.Embedding(2, config.dim)

    def forward(self, features: Tensor, addition: Tensor) -> Tensor:
        """Embed sinusoids [T 256] and one index [1] into the additional embedding: [T C]."""
        temb = self.timestep_embedder(features)
        return temb + self.addition_t_embedding(addition) if hasattr(self, "addition_t_embedding") else temb


class TransformerBlock(JointBlock):
    def __init__(self, config: QwenDiTConfig):
        dim = config.dim
        super().__init__(dim, config.attention_head_dim, NORM_EPS)
        self.img_mod = torch.nn.ModuleList([torch.nn.Identity(), ops.Linear(dim, 6 * dim)])
        self.txt_mod = torch.nn.ModuleList([torch.nn.Identity(), ops.Linear(dim, 6 * dim)])
        self.img_mlp = FeedForward(dim, MLP_RATIO * dim)
        self.txt_mlp = FeedForward(dim, MLP_RATIO * dim)

    def modulation(self, temb: Tensor) -> Pair:
        """Return the modulation [T 6C] of the image stream and of the text stream for [T C]."""
        temb = ops.silu(temb)
        return self.img_mod[1](temb), self.txt_mod[1](temb)

    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        mods: Pair,
        rope: Rope,
        index: Tensor | None,
        mask: Tensor | None,
        *control: Change,
    ) -> Pair:
        """Run the block on img [B L C] and txt [B S C], with mods ([R 6C], [1 6C]). `index` [L] gives image tokens
        their row. control: the changes of the image stream after it."""
        behind, txt = self.streams(img, txt, mods, rope, (self.img_mlp, self.txt_mlp), index, mask)
        img = behind
        for change in control:
            img = ops.add_first(img, change(behind))
        return img, txt


# Model


class QwenImageTransformer(torch.nn.Module):
    def __init__(self, config: QwenDiTConfig, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.tokens = ops.Tokens()
        self.time_text_embed = TimeTextEmbed(config)
        self.txt_norm = ops.RMSNorm(config.joint_attention_dim, NORM_EPS)
        self.img_in = ops.Linear(config.in_channels, config.dim)
        self.txt_in = ops.Linear(config.joint_attention_dim, config.dim)
        self.transformer_blocks = torch.nn.ModuleList([TransformerBlock(config) for _ in range(config.num_layers)])
        self.norm_out = FinalNorm(config.dim, NORM_EPS)
        self.proj_out = ops.Linear(config.dim, config.out_features)

    def image(self, latents: Tensor) -> Tensor:
        """Return the start of the image stream [B L C] for packed latents [B L in]."""
        return ops.stream(self.img_in(latents), self.stream)

    def context(self, text: Tensor) -> Tensor:
        """Return the start of the text stream [B S C] for text states [B S 3584]; the same in every step."""
        return ops.stream(self.txt_in(self.txt_norm(text)), self.stream)

    def forward(
        self,
        latents: Tensor,
        txt: Tensor,
        block_mods: list[Pair],
        final_mod: Tensor,
        rope: Rope,
        index: Tensor | None = None,
        mask: Tensor | None = None,
        references: Tensor | None = None,
        control: Sequence[Sequence[Change]] | None = None,
    ) -> Tensor:
        """Predict the velocity [B L out] for packed latents [B L in] and the text stream [B S C].

        block_mods: per block ([R 6C], [1 6C]); final_mod [1 2C]; rope: tables [L 1 D/2 2] of image and text;
        index [L]: the row of each image token where R > 1; mask [B 1 1 S+L]: True where a key counts; references
        [1 M C]: the start of the stream of images that the model sees, whose tokens follow the latents'; control: the
        changes of the image stream after each block, by control networks.
        """
        img, L = self.image(latents), latents.shape[1]
        if references is not None:
            img = ops.joined(img, ops.repeated(references, img.shape[0]), self.stream)
        img = self.tokens.part(img)
        changes = [()] * len(block_mods) if control is None else control
        for block, mods, behind in zip(self.transformer_blocks, block_mods, changes, strict=True):
            img, txt = block(img, txt, mods, rope, index, mask, *behind)
            ops.async_eval(img)
        return self.proj_out(self.norm_out(self.tokens.gathered(img)[:, :L], final_mod, self.proj_out.dtype))


# Runner


@dataclass(frozen=True)
class Condition:
    txt: Tensor
    rope: Rope
    index: Tensor | None
    mask: Tensor | None
    references: Tensor | None


@dataclass(frozen=True)
class Modulation:
    blocks: list[Pair]  # per block: image [T or T+1, 6C], text [T, 6C]
    final: Tensor  # [T, 2C]

    def at(self, step: int, with_zero: bool) -> tuple[list[Pair], Tensor]:
        """Return one step's rows; with_zero adds the last row, of timestep 0, to the image stream's."""
        one = slice(step, step + 1)
        rows = [(torch.cat((img[one], img[-1:])) if with_zero else img[one], txt[one]) for img, txt in self.blocks]
        return rows, self.final[one]


def block_rows(briefly: Callable[[str, Callable[[], Pair]], Pair], blocks: Iterable[Any], temb: Tensor) -> list[Pair]:
    """Return the modulation of each of `blocks` for [T C]; `briefly` loads the weights of one after the other."""
    return [briefly(f"transformer_blocks.{i}.", partial(block.modulation, temb)) for i, block in enumerate(blocks)]


class Runner(LoadedNetwork[QwenDiTConfig, QwenImageTransformer]):
    network, role = QwenImageTransformer, "transformer"

    @ops.computes
    def modulate(self, features: NumpyArray, addition: int = 0) -> Modulation:
        """Return the rows of every block for sinusoids [T 256] (`qwen_conditioning.time_rows`). Each block's weights
        are read, used and freed in turn."""
        rows = self.table(features)
        chosen = ops.placed([addition], self.device)
        briefly = partial(load.briefly, self.model, self.plan, self.device)
        temb = briefly("time_text_embed.", lambda: self.model.time_text_embed(rows, chosen))
        final = briefly("norm_out.", lambda: self.model.norm_out.modulation(temb))
        return Modulation(block_rows(briefly, self.model.transformer_blocks, temb), final)

    @ops.computes
    def condition(
        self, texts: Sequence[Tensor], shapes: Sequence[tuple[int, int, int]], references: Sequence[Tensor] = ()
    ) -> Condition:
        lengths = [text.shape[1] for text in texts]
        longest = max(lengths)
        padded = [ops.pad_tokens(text, longest) for text in texts]
        tables = qwen_conditioning.image_and_text_rope(self.config, shapes, longest)
        img, txt = ([self.table(part) for part in pair] for pair in tables)
        mask = qwen_conditioning.key_mask(lengths, sum(f * h * w for f, h, w in shapes))
        index = qwen_conditioning.zero_index(self.config, shapes)
        rows = self.model.tokens.rows
        return Condition(
            txt=self.model.context(torch.cat(padded, dim=0)),
            rope=(rows(ops.rope_freqs(*img)), ops.rope_freqs(*txt)),
            index=None if index is None else rows(ops.placed(index, self.device)),
            mask=None if mask is None else ops.placed(mask, self.device),
            references=self.model.image(torch.cat(list(references), dim=1)) if references else None,
        )

    @ops.computes
    def predict(
        self,
        x: Tensor,
        step: tuple[Modulation, int],
        condition: Condition,
        control: Sequence[Sequence[Change]] | None = None,
    ) -> Tensor:
        """Predict the velocity [B L out] for packed latents x [1 or B, L, in] at a row of the modulation. control: the
        changes after each block."""
        modulation, row = step
        mods, final = modulation.at(row, condition.index is not None)
        latents = ops.repeated(x, condition.txt.shape[0])
        fixed = condition.rope, condition.index, condition.mask, condition.references
        more = () if control is None else (control,)
        return ops.at_least_float32(self.model(latents, condition.txt, mods, final, *fixed, *more))
