# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Qwen-Image-2.1's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.qwen21_dit`.

B batch, L image tokens, P tokens of text and references before them, S text states, H heads, D head dim,
C = H * D. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.denoisers.diffusion_transformer import (
    Pair,
    Rope,
    RotaryAttention,
    TimestepEmbedding,
)
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.denoisers import qwen21_conditioning
from qwenimg.common.networks.denoisers.qwen21_conditioning import Grid, SlotPlace, TokenRun
from qwenimg.common.networks.denoisers.qwen21_dit import TIME_CHANNELS, Qwen21Config
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class TimeEmbed(mlx.nn.Module):
    def __init__(self, config: Qwen21Config):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(TIME_CHANNELS, config.dim, bias=False)

    def __call__(self, features: Array) -> Array:
        """[T 256] -> [T C], with the SiLU that every use of it has in front."""
        return ops.silu(self.timestep_embedder(features))


class TextProjection(mlx.nn.Module):
    def __init__(self, config: Qwen21Config):
        super().__init__()
        self.text_norm = ops.CentredRMSNorm(config.context_in_dim, config.eps)
        self.in_layer = ops.Linear(config.context_in_dim, config.dim, bias=False)
        self.out_layer = ops.Linear(config.dim, config.dim, bias=False)

    def __call__(self, text: Array) -> Array:
        """[B S states] -> [B S C]."""
        return self.out_layer(ops.gelu(self.in_layer(self.text_norm(text))))


class Attention(RotaryAttention):
    def image(self, x: Array, rope: Array, before: Pair) -> Array:
        """Attend from image tokens [B L C] to all tokens. before: keys and values [B P H D] before them."""
        q, k, v = self.projected(x, rope)
        keys, values = ops.joined(before[0], k, v.dtype), ops.joined(before[1], v, v.dtype)
        return self.to_out[0](self.attend.result(ops.attention(q, keys, values)))

    def context(self, x: Array, rope: Array, runs: Sequence[TokenRun]) -> tuple[Array, Pair]:
        """Attend from the tokens before an image [B P C], run by run. Return the result, and keys and values."""
        q, k, v = self.projected(x, rope)
        parts = [ops.attention(q[:, start:end], k[:, :end], v[:, :end], causal=causal) for start, end, causal in runs]
        return self.to_out[0](self.attend.result(mx.concatenate(parts, axis=1))), (ops.stream(k, v.dtype), v)


class GatedFeedForward(mlx.nn.Module):
    def __init__(self, config: Qwen21Config):
        super().__init__()
        self.proj = ops.Linear(config.dim, config.hidden, bias=False)
        self.gate_layer = ops.Linear(config.dim, config.hidden, bias=False)
        self.out = ops.Linear(config.hidden, config.dim, bias=False)

    def __call__(self, x: Array) -> Array:
        """[B L C] -> [B L C]."""
        return self.out(ops.swiglu(self.gate_layer(x), self.proj(x)))


class TransformerBlock(mlx.nn.Module):
    def __init__(self, config: Qwen21Config):
        super().__init__()
        self.eps = config.eps
        self.attn = Attention(config.dim, config.attention_head_dim, config.eps, bias=False)
        self.img_mlp = GatedFeedForward(config)

    def __call__(
        self, img: Array, context: Array | None, mods: Pair, ropes: Rope, runs: Sequence[TokenRun], known: Pair | None
    ) -> tuple[Array, Array | None, Pair]:
        """Run the block on img [B L C], and on the context [B P C] before it unless its keys and values are
        `known`. mods: ([1 4C], [1 4C]). Return both streams, and keys and values of the context."""
        if known is None:
            assert context is not None
            context, known = self.run_context(context, mods[1], ropes[1], runs)
        scale1, gate1, scale2, gate2 = ops.chunks(mods[0], 4, None)
        update = self.attn.image(ops.norm_scaled(img, scale1, self.attn.to_q.dtype, self.eps), ropes[0], known)
        return self.fed_forward(ops.gated(img, ops.tanh(gate1), update), scale2, gate2), context, known

    def run_context(self, x: Array, mod: Array, rope: Array, runs: Sequence[TokenRun]) -> tuple[Array, Pair]:
        """Run the block on tokens before an image, [B P C]. Return them, and their keys and values."""
        scale1, gate1, scale2, gate2 = ops.chunks(mod, 4, None)
        update, known = self.attn.context(ops.norm_scaled(x, scale1, self.attn.to_q.dtype, self.eps), rope, runs)
        return self.fed_forward(ops.gated(x, ops.tanh(gate1), update), scale2, gate2), known

    def fed_forward(self, x: Array, scale: Array, gate: Array) -> Array:
        update = self.img_mlp(ops.norm_scaled(x, scale, self.attn.to_q.dtype, self.eps))
        return ops.gated(x, ops.tanh(gate), update)


class FinalNorm(mlx.nn.Module):
    """The last norm, which has a scale and no shift."""

    def __init__(self, config: Qwen21Config):
        super().__init__()
        self.eps = config.eps
        self.linear = ops.Linear(config.dim, config.dim, bias=False)

    def __call__(self, x: Array, time: Array, dtype: mx.Dtype) -> Array:
        """Return the norm of x [B L C] for the embedded time [1 C], in `dtype`."""
        [scale] = ops.chunks(self.linear(time), 1, None)
        return ops.norm_scaled(x, scale, dtype, self.eps)


# Model


class Qwen21Transformer(mlx.nn.Module):
    def __init__(self, config: Qwen21Config, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.time_text_embed = TimeEmbed(config)
        self.txt_in = TextProjection(config)
        self.img_in = ops.Linear(config.in_channels, config.dim, bias=False)
        self.modulation = [mlx.nn.Identity(), ops.Linear(config.dim, 4 * config.dim, bias=False)]
        self.transformer_blocks = [TransformerBlock(config) for _ in range(config.num_layers)]
        self.norm_out = FinalNorm(config)
        self.proj_out = ops.Linear(config.dim, config.in_channels, bias=False)

    def start(self, text: Array, places: Sequence[SlotPlace], references: Sequence[Array]) -> Array:
        """Return the start of the stream before the image [1 P C], for text states [1 S states] with the latent
        tokens [1 L_i channels] of references at `places`."""
        txt, parts, token = ops.stream(self.txt_in(text), self.stream), [], 0
        for (first, rows, columns), latents in zip(places, references, strict=True):
            parts += [txt[:, token:first], ops.stream(self.img_in(latents), self.stream)]
            token = first + rows * columns
        return mx.concatenate([*parts, txt[:, token:]], axis=1)

    def __call__(
        self,
        latents: Array,
        features: Array,
        context: tuple[Array | None, Array],
        ropes: Rope,
        runs: Sequence[TokenRun],
        known: Sequence[Pair],
        keeps: bool,
    ) -> tuple[Array, list[Pair]]:
        """Predict the velocity [1 L channels] for latent tokens [1 L channels] and the sinusoid [1 256] of the time.

        context: the start of the stream before the image [1 P C], and its modulation [1 4C]; ropes: tables [L 1 D/2 2]
        and [P 1 D/2 2]; known: the context's keys and values by block, if an earlier call returned them. A call that
        `keeps` them returns them with the velocity."""
        time = self.time_text_embed(features)
        x, mods = context[0], (self.modulation[1](time), context[1])
        img, pairs = ops.stream(self.img_in(latents), self.stream), []
        for i, block in enumerate(self.transformer_blocks):
            img, x, pair = block(img, x, mods, ropes, runs, known[i] if known else None)
            pairs += [pair] if keeps else []
            ops.async_eval(img)
        return self.proj_out(self.norm_out(img, time, self.proj_out.dtype)), pairs


# Runner


@dataclass(frozen=True)
class Condition:
    context: Pair  # the start of the stream in front of the image, and its modulation
    ropes: Rope
    runs: tuple[TokenRun, ...]
    keeps: bool
    known: list[Pair] = field(default_factory=list)  # keys and values of the context, kept by the first prediction


class Runner(LoadedNetwork[Qwen21Config, Qwen21Transformer]):
    network, role = Qwen21Transformer, "transformer"

    @ops.computes
    def condition(
        self, text: Array, images: tuple[Grid, Sequence[SlotPlace], Sequence[Array]], keeps: bool = True
    ) -> Condition:
        """Prepare text states [1 S states]. `images`: rows and columns of the image's tokens, the places of references
        among the states, and their latent tokens [1 L_i channels], row by row. keeps: whether keys and values of all
        this are kept between predictions, or made again for each."""
        grid, places, references = images
        layout = qwen21_conditioning.layout(text.shape[1], places, grid)
        img, txt = map(self.rope, qwen21_conditioning.tables(self.config, layout))
        still = self.table(qwen21_conditioning.time_row(0.0, "float32"))
        mod = self.model.modulation[1](self.model.time_text_embed(still))
        context = ops.eval((self.model.start(text, places, references), mod))
        return Condition(context=context, ropes=(img, txt), runs=layout.runs, keeps=keeps)

    @ops.computes
    def predict(self, x: Array, step: NumpyArray, condition: Condition) -> Array:
        """Predict the velocity [1 L channels] in float32 for latent tokens x [1 L channels] and the sinusoid of the
        time."""
        features, one = self.table(step), condition
        keeps = one.keeps and not one.known
        velocity, pairs = self.model(x, features, one.context, one.ropes, one.runs, one.known, keeps)
        one.known.extend(ops.eval(pairs))
        return ops.at_least_float32(velocity)
