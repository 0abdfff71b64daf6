# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Anima's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.anima_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D. Attribute paths are checkpoint keys. Keys and
values of the text come ready from `context`, since they depend on no step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.denoisers.diffusion_transformer import Pair, kept
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.denoisers import anima_conditioning
from qwenimg.common.networks.denoisers.anima_dit import HEAD_EPS, NORM_EPS, PATCH, AnimaConfig
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class PatchEmbed(mlx.nn.Module):
    def __init__(self, config: AnimaConfig):
        super().__init__()
        self.width = PATCH**2 * (config.in_channels + 1)
        self.proj = ops.Linear(self.width, config.dim, bias=False)

    def __call__(self, latents: Array) -> Array:
        """[B L 4*in] -> [B L C]; the last values of a patch mark padding, and are zero."""
        return self.proj(ops.pad_tokens(latents.swapaxes(1, 2), self.width).swapaxes(1, 2))


class TimestepEmbedding(mlx.nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.linear_1 = ops.Linear(dim, dim, bias=False)
        self.linear_2 = ops.Linear(dim, 3 * dim, bias=False)

    def __call__(self, features: Array) -> Array:
        """[1 C] -> [1 3C]."""
        return self.linear_2(ops.silu(self.linear_1(features)))


class TimeEmbed(mlx.nn.Module):
    def __init__(self, config: AnimaConfig):
        super().__init__()
        self.t_embedder = TimestepEmbedding(config.dim)
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


class Attention(mlx.nn.Module):
    def __init__(self, config: AnimaConfig, context: int):
        super().__init__()
        dim, self.head_dim = config.dim, config.attention_head_dim
        self.to_q = ops.Linear(dim, dim, bias=False)
        self.to_k = ops.Linear(context, dim, bias=False)
        self.to_v = ops.Linear(context, dim, bias=False)
        self.to_out = [ops.Linear(dim, dim, bias=False)]
        self.norm_q = ops.RMSNorm(self.head_dim, HEAD_EPS)
        self.norm_k = ops.RMSNorm(self.head_dim, HEAD_EPS)
        self.attend = ops.Attend()

    def heads(self, x: Array) -> Array:
        """[B L C] -> [B L H D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def queries(self, x: Array) -> Array:
        """[B L C] -> [B L H D]."""
        return self.norm_q(self.heads(self.to_q(x)))

    def context(self, x: Array) -> Pair:
        """Return keys and values: [B S C'] -> [B S H D] each."""
        return self.norm_k(self.heads(self.to_k(x))), self.attend.values(self.heads(self.to_v(x)))


class SelfAttention(Attention):
    def __call__(self, x: Array, rope: Pair) -> Array:
        """[B L C] -> [B L C]."""
        k, v = self.context(x)
        q, k = ops.rotate_halves(self.queries(x), *rope), ops.rotate_halves(k, *rope)
        return self.to_out[0](self.attend(q, k, v))


class CrossAttention(Attention):
    def __call__(self, x: Array, context: Pair) -> Array:
        """Attend to keys and values [B S H D]: [B L C] -> [B L C]."""
        k, v = context
        return self.to_out[0](self.attend(self.queries(x), k, self.attend.values(v)))


class FeedForwardIn(mlx.nn.Module):
    def __init__(self, config: AnimaConfig):
        super().__init__()
        self.proj = ops.Linear(config.dim, config.hidden, bias=False)

    def __call__(self, x: Array) -> Array:
        return ops.gelu_erf(self.proj(x))


class FeedForward(mlx.nn.Module):
    def __init__(self, config: AnimaConfig):
        super().__init__()
        out = ops.Linear(config.hidden, config.dim, bias=False)
        self.net = [FeedForwardIn(config), mlx.nn.Identity(), out]

    def __call__(self, x: Array) -> Array:
        """[B L C] -> [B L C]."""
        return self.net[2](self.net[0](x))


class TransformerBlock(mlx.nn.Module):
    def __init__(self, config: AnimaConfig):
        super().__init__()
        self.norm1 = Modulation(config, 3)
        self.attn1 = SelfAttention(config, config.dim)
        self.norm2 = Modulation(config, 3)
        self.attn2 = CrossAttention(config, config.text_embed_dim)
        self.norm3 = Modulation(config, 3)
        self.ff = FeedForward(config)

    def context(self, text: Array) -> Pair:
        """Return keys and values of text [B S T]: [B S H D] each."""
        return kept(self.attn2.attend, *self.attn2.context(text))

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


@dataclass(frozen=True)
class Condition:
    context: list[Pair]
    rope: Pair


class Runner(LoadedNetwork[AnimaConfig, AnimaTransformer]):
    network, role = AnimaTransformer, "transformer"

    @ops.computes
    def condition(self, text: Array, grid: tuple[int, int]) -> Condition:
        """Prepare text [1 S T] for an image of `grid` rows and columns of tokens."""
        tables = anima_conditioning.table(self.config, grid)
        cos, sin = (ops.table(part, self.table_dtype) for part in tables)
        return Condition(context=ops.eval(self.model.context(text)), rope=(cos, sin))

    @ops.computes
    def predict(self, x: Array, step: NumpyArray, condition: Condition) -> Array:
        """Predict the velocity [1 L 4*in] in float32 for packed latents x [1 L 4*in] and the sinusoid of the time."""
        features = ops.table(step, self.table_dtype)
        return ops.at_least_float32(self.model(x, features, condition.context, condition.rope))
