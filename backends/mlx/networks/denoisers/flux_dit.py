# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Flux.1's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.flux_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D. Attribute paths are checkpoint keys.
Modulation rows come ready from `modulation`, since they depend on timestep, guidance and pooled text alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import load, ops
from qwenimg.backends.mlx.networks.denoisers.diffusion_transformer import (
    FeedForward,
    FinalNorm,
    JointBlock,
    Pair,
    RotaryAttention,
    TimestepEmbedding,
)
from qwenimg.common.networks.denoisers import flux_conditioning
from qwenimg.common.networks.denoisers.flux_dit import NORM_EPS, TIME_CHANNELS, FluxConfig
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.runtime.engine import NumpyArray
from qwenimg.common.weights.plan import LoadPlan

# Layers


class TimeTextEmbed(mlx.nn.Module):
    def __init__(self, config: FluxConfig):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(TIME_CHANNELS, config.dim)
        if config.guidance_embeds:
            self.guidance_embedder = TimestepEmbedding(TIME_CHANNELS, config.dim)
        self.text_embedder = TimestepEmbedding(config.pooled_projection_dim, config.dim)

    def __call__(self, times: Array, guidance: Array, pooled: Array) -> Array:
        """Embed sinusoids of times [T 256] and of a guidance [1 256], and pooled text [1 P]: [T C]."""
        temb = self.timestep_embedder(times)
        if hasattr(self, "guidance_embedder"):
            temb = temb + self.guidance_embedder(guidance)
        return temb + self.text_embedder(pooled)


class BlockModulation(mlx.nn.Module):
    def __init__(self, dim: int, count: int):
        super().__init__()
        self.linear = ops.Linear(dim, count * dim)


# Blocks


class TransformerBlock(JointBlock):
    """A block with weights of its own for each stream."""

    def __init__(self, config: FluxConfig):
        dim, hidden = config.dim, config.hidden
        super().__init__(dim, config.attention_head_dim, NORM_EPS)
        self.norm1 = BlockModulation(dim, 6)
        self.norm1_context = BlockModulation(dim, 6)
        self.ff = FeedForward(dim, hidden)
        self.ff_context = FeedForward(dim, hidden)

    def modulation(self, temb: Array) -> Pair:
        """Return the modulation [T 6C] of the image stream and of the text stream for [T C]."""
        temb = ops.silu(temb)
        return self.norm1.linear(temb), self.norm1_context.linear(temb)

    def __call__(self, img: Array, txt: Array, mods: Pair, rope: Pair) -> Pair:
        """Run the block on img [B L C] and txt [B S C], with mods ([1 6C], [1 6C])."""
        img, txt = self.streams(img, txt, mods, rope, (self.ff, self.ff_context))
        return img, ops.clipped(txt)


class SingleTransformerBlock(mlx.nn.Module):
    """A block with the same weights for both streams: attention and feed-forward side by side."""

    def __init__(self, config: FluxConfig):
        super().__init__()
        dim, hidden = config.dim, config.hidden
        self.norm = BlockModulation(dim, 3)
        self.attn = RotaryAttention(dim, config.attention_head_dim, NORM_EPS)
        self.proj_mlp = ops.Linear(dim, hidden)
        self.proj_out = ops.Linear(dim + hidden, dim)

    def modulation(self, temb: Array) -> Array:
        """[T C] -> [T 3C]."""
        return self.norm.linear(ops.silu(temb))

    def __call__(self, img: Array, txt: Array, mod: Array, rope: Array) -> Pair:
        """Run the block on img [B L C] and txt [B S C], with mod [1 3C]. `rope` has the text first."""
        shift, scale, gate = ops.chunks(mod, 3, None)
        dtype, S = self.proj_mlp.dtype, txt.shape[1]

        x = ops.joined(
            ops.norm_modulate(txt, shift, scale, dtype, NORM_EPS),
            ops.norm_modulate(img, shift, scale, dtype, NORM_EPS),
            dtype,
        )
        update = self.proj_out(mx.concatenate((self.attn(x, rope), ops.linear_gelu(self.proj_mlp, x)), axis=-1))
        return ops.clipped(ops.gated(img, gate, update[:, S:])), ops.clipped(ops.gated(txt, gate, update[:, :S]))


# Model


class FluxTransformer(mlx.nn.Module):
    def __init__(self, config: FluxConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.tokens = ops.Tokens()
        self.time_text_embed = TimeTextEmbed(config)
        self.context_embedder = ops.Linear(config.joint_attention_dim, config.dim)
        self.x_embedder = ops.Linear(config.in_channels, config.dim)
        double, single = config.num_layers, config.num_single_layers
        self.transformer_blocks = [TransformerBlock(config) for _ in range(double)]
        self.single_transformer_blocks = [SingleTransformerBlock(config) for _ in range(single)]
        self.norm_out = FinalNorm(config.dim, NORM_EPS)
        self.proj_out = ops.Linear(config.dim, config.out_features)

    def context(self, text: Array) -> Array:
        """Return the start of the text stream [B S C] for text states [B S 4096]; the same in every step."""
        return ops.stream(self.context_embedder(text), self.stream)

    def __call__(
        self,
        latents: Array,
        mask: Array | None,
        txt: Array,
        references: Array | None,
        double_mods: list[Pair],
        single_mods: list[Array],
        final_mod: Array,
        rope: Pair,
        joint_rope: Array,
    ) -> Array:
        """Predict the velocity [1 L' out] for packed latents [1 L' in] and the text stream [1 S C].

        mask: further channels [1 L' M], Fill's or a control picture's; references [1 L-L' C]: embedded tokens.
        double_mods: per block ([1 6C], [1 6C]); single_mods: per block [1 3C]; final_mod [1 2C]; rope: tables
        [L 1 D/2 2] of image and references, and of the text; joint_rope: the same with the text first, [S+L 1 D/2 2].
        """
        tokens = latents if mask is None else mx.concatenate((latents, mask), axis=-1)
        img = ops.stream(self.x_embedder(tokens), self.stream)
        img = self.tokens.part(img if references is None else ops.joined(img, references, self.stream))
        for block, mods in zip(self.transformer_blocks, double_mods, strict=True):
            img, txt = block(img, txt, mods, rope)
            ops.async_eval(img)
        for block, mod in zip(self.single_transformer_blocks, single_mods, strict=True):
            img, txt = block(img, txt, mod, joint_rope)
            ops.async_eval(img)
        img = self.tokens.gathered(img)[:, : latents.shape[1]]
        return self.proj_out(self.norm_out(img, final_mod, self.proj_out.dtype))


# Runner


@dataclass(frozen=True)
class Condition:
    txt: Array
    references: Array | None  # embedded tokens
    mask: Array | None  # channels of each token
    rope: Pair
    joint_rope: Array


@dataclass(frozen=True)
class Modulation:
    """The rows of a schedule's steps, for one pooled text after the other."""

    double: list[Pair]  # per block: image [T, 6C], text [T, 6C]
    single: list[Array]  # per block [T, 3C]
    final: Array  # [T, 2C]

    def at(self, row: int) -> tuple[list[Pair], list[Array], Array]:
        one = slice(row, row + 1)
        double = [(img[one], txt[one]) for img, txt in self.double]
        return double, [mod[one] for mod in self.single], self.final[one]


class Runner:
    def __init__(self, config: FluxConfig, plan: LoadPlan, precision: Precision):
        self.config, self.plan = config, plan
        stream = ops.DTYPES[precision.residual_dtype("transformer")]
        self.table_dtype = ops.DTYPES[precision.compute_dtype("transformer")]
        self.model = load.empty(lambda: FluxTransformer(config, stream), precision, "transformer")
        load.fill(self.model, plan.when(ALWAYS))

    @ops.computes
    def modulate(self, features: NumpyArray, guidance: NumpyArray, pooled: Sequence[Array]) -> Modulation:
        """Return the rows of every block for sinusoids of times [T 256] and of a guidance [1 256], which schnell does
        not read, and each of `pooled`, texts [1 P]. Each block's weights are read, used and freed in turn."""
        times, scale = (ops.table(values, self.table_dtype) for values in (features, guidance))
        embed = self.model.time_text_embed
        briefly = partial(load.briefly, self.model, self.plan)
        temb = briefly(
            "time_text_embed.", lambda: mx.concatenate([embed(times, scale, text) for text in pooled], axis=0)
        )
        count = len(pooled)
        final = briefly("norm_out.", lambda: ops.apart(self.model.norm_out.modulation, temb, count))
        double, single = (
            [
                briefly(f"{path}.{i}.", partial(ops.apart, block.modulation, temb, count))
                for i, block in enumerate(blocks)
            ]
            for path, blocks in self._blocks()
        )
        return Modulation(double, single, final)

    def _blocks(self) -> list[tuple[str, Iterable[Any]]]:
        model = self.model
        return [
            ("transformer_blocks", model.transformer_blocks),
            ("single_transformer_blocks", model.single_transformer_blocks),
        ]

    @ops.computes
    def condition(
        self,
        text: Array,
        grids: Sequence[flux_conditioning.Grid],
        references: Sequence[Array] = (),
        mask: Array | None = None,
    ) -> Condition:
        """Prepare text states [1 S 4096]. grids: rows and columns in tokens of the image and of each reference;
        references: their packed latents [1 L C]; mask: further channels [1 L C] of the image, Fill's or a control
        picture's."""
        tables = flux_conditioning.image_and_text_rope(self.config, grids, text.shape[1])
        img, txt = (ops.rope_freqs(*(ops.table(part, self.table_dtype) for part in table)) for table in tables)
        img = self.model.tokens.rows(img)
        tokens = self.model.x_embedder(mx.concatenate(list(references), axis=1)) if references else None
        return Condition(
            txt=self.model.context(text),
            references=None if tokens is None else ops.stream(tokens, self.model.stream),
            mask=mask,
            rope=(img, txt),
            joint_rope=mx.concatenate((txt, img), axis=0),
        )

    @ops.computes
    def predict(self, x: Array, step: tuple[Modulation, int], condition: Condition) -> Array:
        """Predict the velocity [1 L out] in float32 for packed latents x [1 L in] at a row of the modulation."""
        modulation, row = step
        c = condition
        velocity = self.model(x, c.mask, c.txt, c.references, *modulation.at(row), c.rope, c.joint_rope)
        return ops.at_least_float32(velocity)
