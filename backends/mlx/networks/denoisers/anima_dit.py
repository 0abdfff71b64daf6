# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Anima's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.anima_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D. Attribute paths are checkpoint keys. Keys and
values of the text come ready from `context`, since they depend on no step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.denoisers import diffusion_transformer
from qwenimg.backends.mlx.networks.denoisers.diffusion_transformer import (
    Attention,
    Pair,
    RotaryAttention,
    TimestepEmbedding,
    kept,
)
from qwenimg.backends.mlx.networks.loaded import TokenDenoiser
from qwenimg.common.networks.denoisers import anima_conditioning
from qwenimg.common.networks.denoisers.anima_dit import HEAD_EPS, NORM_EPS, PATCH, AnimaConfig

# Layers


class PatchEmbed(mlx.nn.Module):
    def __init__(self, config: AnimaConfig):
        super().__init__()
        self.width = PATCH**2 * (config.in_channels + 1)
        self.proj = ops.Linear(self.width, config.dim, bias=False)

    def __call__(self, latents: Array) -> Array:
        """[B L 4*in] -> [B L C]; the last values of a patch mark padding, and are zero."""
        return self.proj(ops.pad_tokens(latents.swapaxes(1, 2), self.width).swapaxes(1, 2))


class TimeEmbed(mlx.nn.Module):
    def __init__(self, config: AnimaConfig):
        super().__init__()
        self.t_embedder = TimestepEmbedding(config.dim, config.dim, 3 * config.dim, bias=False)
        self.norm = ops.RMSNorm(config.dim, NORM_EPS)

    def __call__(self, features: Array) -> Pair:
        """Return the time as modulations take it [1 C], and what all modulations share [1 3C]."""
        return ops.silu(self.norm(features)), self.t_embedder(features)


class Modulation(mlx.nn.Module):
    def __init__(self, config: AnimaConfig, vectors: int):
        super().__init__()
        self.vectors, self.width = vectors, vectors * config.dim
        self.linear_1 = ops.Linear(config.dim, config.adaln_lora_dim, bias=False)
        self.linear_2 = ops.Linear(config.adaln_lora_dim, self.width, bias=False)

    def __call__(self, time: Array, shared: Array) -> tuple[Array, ...]:
        """Return shift and scale, and a gate in a block, [1 1 C] each."""
        mod = ops.add(self.linear_2(self.linear_1(time)), shared[:, : self.width])
        return ops.chunks(mod, self.vectors, None)


class SelfAttention(RotaryAttention):
    def turned(self, x: Array, rope: Pair, dtype: mx.Dtype) -> Array:
        """Turn the halves of heads [B L H D]; in float32, and float32 out."""
        return ops.rotate_halves(x, *rope)


class CrossAttention(Attention):
    def context(self, text: Array) -> Pair:
        """Return keys and values: [B S T] -> [B S H D] each."""
        return kept(self.attend, self.keys(text), self.values(text))

    def __call__(self, x: Array, context: Pair) -> Array:
        """Attend to keys and values [B S H D]: [B L C] -> [B L C]."""
        k, v = context
        return self.to_out[0](self.attend(self.queries(x), k, self.attend.values(v)))


class FeedForwardIn(diffusion_transformer.FeedForwardIn):
    def __call__(self, x: Array) -> Array:
        return ops.gelu_erf(self.proj(x))


class FeedForward(diffusion_transformer.FeedForward):
    start = FeedForwardIn


class TransformerBlock(mlx.nn.Module):
    def __init__(self, config: AnimaConfig):
        super().__init__()
        dim, head_dim = config.dim, config.attention_head_dim
        norm = partial(ops.RMSNorm, head_dim, HEAD_EPS)
        self.norm1 = Modulation(config, 3)
        self.attn1 = SelfAttention(dim, head_dim, HEAD_EPS, bias=False)
        self.norm2 = Modulation(config, 3)
        self.attn2 = CrossAttention(dim, head_dim, norm, bias=False, seen=config.text_embed_dim)
        self.norm3 = Modulation(config, 3)
        self.ff = FeedForward(dim, config.hidden, bias=False)

    def context(self, text: Array) -> Pair:
        """Return keys and values of text [B S T]: [B S H D] each."""
        return self.attn2.context(text)

    def __call__(self, x: Array, time: Array, shared: Array, context: Pair, rope: Pair) -> Array:
        """Run the block on x [B L C]. time, shared: as `TimeEmbed` returns them; context: of the text."""
        dtype = self.attn1.to_q.dtype
        shift, scale, gate = self.norm1(time, shared)
        x = ops.gated(x, gate, self.attn1(ops.norm_modulate(x, shift, scale, dtype, NORM_EPS), rope))
        shift, scale, gate = self.norm2(time, shared)
        x = ops.gated(x, gate, self.attn2(ops.norm_modulate(x, shift, scale, dtype, NORM_EPS), context))
        shift, scale, gate = self.norm3(time, shared)
        return ops.gated(x, gate, self.ff(ops.norm_modulate(x, shift, scale, dtype, NORM_EPS)))


# Model


class AnimaTransformer(mlx.nn.Module):
    def __init__(self, config: AnimaConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.patch_embed = PatchEmbed(config)
        self.time_embed = TimeEmbed(config)
        self.transformer_blocks = [TransformerBlock(config) for _ in range(config.num_layers)]
        self.norm_out = Modulation(config, 2)
        self.proj_out = ops.Linear(config.dim, PATCH**2 * config.out_channels, bias=False)

    def context(self, text: Array) -> list[Pair]:
        """Return keys and values of text [1 S T] in each block."""
        blocks: Any = self.transformer_blocks
        return [block.context(text) for block in blocks]

    def __call__(self, latents: Array, features: Array, context: list[Pair], rope: Pair) -> Array:
        """Predict the velocity [1 L 4*in] for packed latents [1 L 4*in] and the sinusoid [1 C] of the time.

        context: from `self.context`; rope: tables [L D/2].
        """
        time, shared = self.time_embed(features)
        x = ops.stream(self.patch_embed(latents), self.stream)
        for block, pair in zip(self.transformer_blocks, context, strict=True):
            x = ops.async_eval(block(x, time, shared, pair, rope))
        shift, scale = self.norm_out(time, shared)
        x = self.proj_out(ops.norm_modulate(x, shift, scale, self.proj_out.dtype, NORM_EPS))
        return x.reshape(*x.shape[:2], PATCH**2, -1).swapaxes(2, 3).reshape(*x.shape)


# Runner


class Runner(TokenDenoiser[AnimaConfig, AnimaTransformer]):
    network, role = AnimaTransformer, "transformer"

    @ops.computes
    def condition(self, text: Array, grid: tuple[int, int]) -> tuple[list[Pair], Pair]:
        """Prepare text [1 S T] for an image of `grid` rows and columns of tokens."""
        cos, sin = map(self.table, anima_conditioning.table(self.config, grid))
        return ops.eval(self.model.context(text)), (cos, sin)
