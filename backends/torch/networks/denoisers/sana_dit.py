"""SANA's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.sana_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C channels. Attribute paths are keys of the manifest. Keys
and values of the text come ready from `context`, since they depend on no step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import (
    Pair,
    TextProjection,
    TimestepEmbedding,
    kept,
)
from qwenimg.backends.torch.networks.loaded import ImageDenoiser
from qwenimg.backends.torch.networks.mbconv import GatedConv
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.denoisers import sana_conditioning
from qwenimg.common.networks.denoisers.sana_dit import NORM_EPS, QK_EPS, TIME_CHANNELS, SanaConfig

# Layers


class PatchEmbed(torch.nn.Module):
    def __init__(self, config: SanaConfig):
        super().__init__()
        self.proj = ops.Linear(config.in_channels, config.dim)


class TimestepEmbedder(torch.nn.Module):
    def __init__(self, config: SanaConfig):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(TIME_CHANNELS, config.dim)

    def forward(self, features: Tensor) -> Tensor:
        """[1 256] -> [1 C]."""
        return self.timestep_embedder(features)


class TimeEmbed(torch.nn.Module):
    def __init__(self, config: SanaConfig):
        super().__init__()
        self.emb = TimestepEmbedder(config)
        self.linear = ops.Linear(config.dim, 6 * config.dim)

    def forward(self, features: Tensor) -> Pair:
        """Return the embedding of the time [1 C], and the modulation of all blocks [1 6C]."""
        temb = self.emb(features)
        return temb, self.linear(ops.silu(temb))


class GuidedTimeEmbed(torch.nn.Module):
    def __init__(self, config: SanaConfig):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(TIME_CHANNELS, config.dim)
        self.guidance_embedder = TimestepEmbedding(TIME_CHANNELS, config.dim)
        self.linear = ops.Linear(config.dim, 6 * config.dim)

    def forward(self, features: Tensor) -> Pair:
        """The same for the sinusoids of time and guidance [2 256]."""
        temb = ops.add(self.timestep_embedder(features[:1]), self.guidance_embedder(features[1:]))
        return temb, self.linear(ops.silu(temb))


class Attention(torch.nn.Module):
    def __init__(self, config: SanaConfig, head_dim: int, inner: int, *, bias: bool):
        super().__init__()
        self.head_dim = head_dim
        self.to_q = ops.Linear(config.dim, inner, bias=bias)
        self.to_k = ops.Linear(config.dim, inner, bias=bias)
        self.to_v = ops.Linear(config.dim, inner, bias=bias)
        self.to_out = torch.nn.ModuleList([ops.Linear(inner, config.dim)])
        if config.qk_norm:
            self.norm_q = ops.RMSNorm(inner, QK_EPS)
            self.norm_k = ops.RMSNorm(inner, QK_EPS)

    def heads(self, x: Tensor) -> Tensor:
        """[B L H*D] -> [B L H D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def queries(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L H D]."""
        q = self.to_q(x)
        return self.heads(self.norm_q(q) if hasattr(self, "norm_q") else q)

    def keys(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L H D]."""
        k = self.to_k(x)
        return self.heads(self.norm_k(k) if hasattr(self, "norm_k") else k)

    def values(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L H D]."""
        return self.heads(self.to_v(x))


class LinearAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L C]."""
        return self.to_out[0](ops.linear_attention(self.queries(x), self.keys(x), self.values(x)))


class CrossAttention(Attention):
    def __init__(self, config: SanaConfig):
        super().__init__(config, config.cross_attention_head_dim, config.cross_dim, bias=True)
        self.attend = ops.Attend()

    def context(self, text: Tensor) -> Pair:
        """Return keys and values: [B S C] -> [B S H D] each."""
        return kept(self.attend, self.keys(text), self.attend.values(self.values(text)))

    def forward(self, x: Tensor, context: Pair) -> Tensor:
        """Attend to keys and values [B S H D]: [B L C] -> [B L C]."""
        k, v = context
        return self.to_out[0](self.attend(self.queries(x), k, self.attend.values(v)))


class TransformerBlock(torch.nn.Module):
    def __init__(self, config: SanaConfig):
        super().__init__()
        self.scale_shift_table = ops.Embedding(6, config.dim)
        self.attn1 = LinearAttention(config, config.attention_head_dim, config.dim, bias=False)
        self.attn2 = CrossAttention(config)
        self.ff = GatedConv(config.dim, config.hidden)

    def context(self, text: Tensor) -> Pair:
        """Return keys and values of the text [1 S C]: [1 S H D] each."""
        return self.attn2.context(text)

    def forward(self, x: Tensor, mod: Tensor, context: Pair, plane: Tensor) -> Tensor:
        """Run the block on x [B L C], tokens of an image with the sides of `plane` [h w]. mod [1 6C]: of all blocks;
        context: of the text."""
        mod = ops.add(mod, self.scale_shift_table.weight.reshape(1, -1))
        shift1, scale1, gate1, shift2, scale2, gate2 = ops.chunks(mod, 6, None)
        dtype = self.attn1.to_q.dtype
        x = ops.gated(x, gate1, self.attn1(ops.norm_modulate(x, shift1, scale1, dtype, NORM_EPS)))
        x = ops.add(x, self.attn2(x, context))
        return ops.gated(x, gate2, self.ff(ops.norm_modulate(x, shift2, scale2, dtype, NORM_EPS), plane))


# Model


class SanaTransformer(torch.nn.Module):
    def __init__(self, config: SanaConfig, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.patch_embed = PatchEmbed(config)
        self.time_embed = GuidedTimeEmbed(config) if config.guidance_embeds else TimeEmbed(config)
        self.caption_projection = TextProjection(config.caption_channels, config.dim)
        self.caption_norm = ops.RMSNorm(config.dim, QK_EPS)
        self.transformer_blocks = torch.nn.ModuleList([TransformerBlock(config) for _ in range(config.num_layers)])
        self.scale_shift_table = ops.Embedding(2, config.dim)
        self.proj_out = ops.Linear(config.dim, config.in_channels)

    def context(self, text: Tensor) -> list[Pair]:
        """Return keys and values of text states [1 S T] in each block."""
        blocks: Any = self.transformer_blocks
        text = self.caption_norm(self.caption_projection(text))
        return [block.context(text) for block in blocks]

    def forward(self, latents: Tensor, features: Tensor, context: list[Pair], positions: Tensor | None) -> Tensor:
        """Predict the velocity [1 C h w] for latents [1 C h w] and the sinusoids of time, and of guidance, [N 256].

        context: from `self.context`; positions [1 L C]: of a model that has them.
        """
        temb, mod = self.time_embed(features)
        x = ops.stream(self.patch_embed.proj(images.tokens(latents)), self.stream)
        x = x if positions is None else ops.add(x, positions)
        plane = images.plane(latents)
        for block, pair in zip(self.transformer_blocks, context, strict=True):
            x = ops.async_eval(block(x, mod, pair, plane))
        shift, scale = ops.chunks(ops.add(temb, self.scale_shift_table.weight).reshape(1, -1), 2, None)
        x = self.proj_out(ops.norm_modulate(x, shift, scale, self.proj_out.dtype, NORM_EPS))
        return images.image(x, latents)


# Runner


class Runner(ImageDenoiser[SanaConfig, SanaTransformer]):
    network, role = SanaTransformer, "transformer"

    @ops.computes
    def condition(self, text: Tensor, grid: tuple[int, int]) -> tuple[list[Pair], Tensor | None]:
        """Prepare text states [1 S T] for an image of `grid` rows and columns of tokens."""
        table = sana_conditioning.positions(self.config, *grid)
        positions = None if table is None else self.table(table)
        return ops.eval(self.model.context(text)), positions
