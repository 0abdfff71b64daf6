# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""FLUX.3's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.flux3_dit`.

B batch, L image tokens, S text tokens, R tokens of reference images, K = S + R of the context, H heads, D head dim,
C = H * D. Attribute paths are checkpoint keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.denoisers.diffusion_transformer import (
    FinalNorm,
    GatedFeedForward,
    Pair,
    RotaryAttention,
    StreamModulation,
    TimestepEmbedding,
)
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.denoisers import flux3_conditioning
from qwenimg.common.networks.denoisers.flux3_conditioning import Grid
from qwenimg.common.networks.denoisers.flux3_dit import Flux3Config
from qwenimg.common.runtime.engine import NumpyArray

Ropes = tuple[Array, Array, Array]

# Layers


class ParallelBlock(mlx.nn.Module):
    """A block that computes attention and feed-forward side by side."""

    def __init__(self, config: Flux3Config):
        super().__init__()
        self.eps = config.eps
        self.attn = RotaryAttention(config.dim, config.attention_head_dim, config.eps, bias=False)
        self.ff = GatedFeedForward(config.dim, config.hidden)

    def update(self, x: Array, rope: Array) -> Array:
        """[B L C] -> [B L C]."""
        return ops.add(self.attn(x, rope), self.ff(x))


class ModeBlock(ParallelBlock):
    """A block of one stream."""

    def __call__(self, x: Array, mod: Array, rope: Array) -> Array:
        """Run the block on x [B L C], with mod [1 3C]."""
        shift, scale, gate = ops.chunks(mod, 3, None)
        y = ops.norm_modulate(x, shift, scale, self.attn.to_q.dtype, self.eps)
        return ops.gated(x, gate, self.update(y, rope))


class SingleBlock(ParallelBlock):
    """A block with the same weights for all streams, which it joins to one."""

    def __call__(self, img: Array, context: Array, mods: Pair, rope: Array, index: Array | None) -> Pair:
        """Run the block on img [B L C] and the context [B K C], with mods [1 3C] and [2 3C], of which `index` [K] gives
        the context's tokens their row. `rope` has the context first."""
        shift, scale, gate = ops.chunks(mods[0], 3, None)
        own_shift, own_scale, own_gate = ops.chunks(mods[1], 3, index)
        dtype, K = self.attn.to_q.dtype, context.shape[1]
        x = ops.joined(
            ops.norm_modulate(context, own_shift, own_scale, dtype, self.eps),
            ops.norm_modulate(img, shift, scale, dtype, self.eps),
            dtype,
        )
        update = self.update(x, rope)
        return ops.gated(img, gate, update[:, K:]), ops.gated(context, own_gate, update[:, :K])


# Model


class Modulations(mlx.nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.image = StreamModulation(dim, 3)
        self.image_cond = StreamModulation(dim, 3)
        self.txt = StreamModulation(dim, 3)


class Embedders(mlx.nn.Module):
    def __init__(self, config: Flux3Config):
        super().__init__()
        self.image = ops.Linear(config.in_channels, config.dim, bias=False)
        self.image_cond = ops.Linear(config.cond_in_channels, config.dim, bias=False)


class ModeBlocks(mlx.nn.Module):
    def __init__(self, config: Flux3Config):
        super().__init__()
        self.image = [ModeBlock(config) for _ in range(config.num_layers)]
        self.image_cond = [ModeBlock(config) for _ in range(config.num_layers)]


class Flux3Transformer(mlx.nn.Module):
    def __init__(self, config: Flux3Config, stream: mx.Dtype):
        super().__init__()
        self.stream, self.flow_map = stream, config.flow_map
        self.tokens = ops.Tokens()
        self.timestep_embedder = TimestepEmbedding(config.timestep_channels, config.dim, bias=False)
        if config.flow_map:
            self.target_timestep_embedder = TimestepEmbedding(config.timestep_channels, config.dim, bias=False)
        self.early_stream_modulations = Modulations(config.dim)
        self.single_stream_modulations = Modulations(config.dim)
        self.x_embedders = Embedders(config)
        self.context_embedder = ops.Linear(config.joint_attention_dim, config.dim, bias=False)
        self.mode_blocks = ModeBlocks(config)
        self.txt_mode_blocks = [ModeBlock(config) for _ in range(config.num_layers)]
        singles = range(config.num_single_layers)
        self.single_transformer_blocks = [SingleBlock(config) for _ in singles]
        self.norm_out = FinalNorm(config.dim, config.eps, bias=False)
        self.proj_out = ops.Linear(config.dim, config.in_channels, bias=False)

    def times(self, features: Array) -> Pair:
        """Embed the sinusoids of the time, of time 0 and in a flow map of the target, [2 or 3, channels]: for the image
        and for the other streams, [1 C] each."""
        temb = self.timestep_embedder(features[:2])
        if self.flow_map:
            temb = temb + self.target_timestep_embedder(features[2:])
        return temb[:1], temb[1:]

    def context(self, txt: Array, ref: Array | None, zero: Array, rope: Ropes) -> Pair:
        """Return text [1 S C] and references [1 R C] behind the blocks of their own, as [1 K C], and their modulation
        [1 or 2, 3C], for the embedding of time 0 [1 C]."""
        early, single = self.early_stream_modulations, self.single_stream_modulations
        mod = early.txt(zero)
        for block in self.txt_mode_blocks:
            txt = block(txt, mod, rope[1])
        if ref is None:
            return txt, single.txt(zero)
        mod = early.image_cond(zero)
        for block in self.mode_blocks.image_cond:
            ref = block(ref, mod, rope[2])
        return ops.joined(txt, ref, self.stream), mx.concatenate((single.txt(zero), single.image_cond(zero)), axis=0)

    def __call__(
        self,
        latents: Array,
        features: Array,
        txt: Array,
        references: Array | None,
        rope: Ropes,
        index: Array | None,
    ) -> Array:
        """Predict the velocity [1 L C] for packed latents [1 L C] and sinusoids [2 or 3, channels].

        txt [1 S C], references [1 R C]: the starts of their streams; rope: tables of the image, the text and the
        references; index [K]: 0 for each token of text, 1 for each of references.
        """
        temb, zero = self.times(features)
        context, own_mod = self.context(txt, references, zero, rope)
        early, mods = self.early_stream_modulations.image(temb), (self.single_stream_modulations.image(temb), own_mod)
        final, (img_rope, txt_rope, ref_rope) = self.norm_out.modulation(temb), rope

        img = self.tokens.part(ops.stream(self.x_embedders.image(latents), self.stream))
        for block in self.mode_blocks.image:
            img = block(img, early, img_rope)
            ops.async_eval(img)
        joint = mx.concatenate((txt_rope, ref_rope, img_rope), axis=0)
        for block in self.single_transformer_blocks:
            img, context = block(img, context, mods, joint, index)
            ops.async_eval(img)
        return self.proj_out(self.norm_out(self.tokens.gathered(img), final, self.proj_out.dtype))


# Runner


@dataclass(frozen=True)
class Condition:
    txt: Array
    references: Array | None
    rope: Ropes
    index: Array | None


class Runner(LoadedNetwork[Flux3Config, Flux3Transformer]):
    network, role = Flux3Transformer, "transformer"

    @ops.computes
    def condition(self, text: Array, images: tuple[Sequence[Grid], Sequence[Array]]) -> Condition:
        """Prepare text states [1 S joint]. `images`: rows and columns in tokens of the image and of each reference, and
        the packed latents [1 R C] of the references."""
        grids, references = images
        tables = flux3_conditioning.tables(self.config, grids, text.shape[1])
        img, txt, ref = map(self.rope, tables)
        model, rows = self.model, np.repeat([0, 1], [text.shape[1], ref.shape[0]])
        tokens = model.x_embedders.image_cond(mx.concatenate(list(references), axis=1)) if references else None
        return Condition(
            txt=ops.stream(model.context_embedder(text), model.stream),
            references=None if tokens is None else ops.stream(tokens, model.stream),
            rope=(model.tokens.rows(img), txt, ref),
            index=None if tokens is None else ops.placed(rows),
        )

    @ops.computes
    def predict(self, x: Array, step: NumpyArray, condition: Condition) -> Array:
        """Predict the velocity [1 L C] in float32 for packed latents x [1 L C] and sinusoids of the step
        (`flux3_conditioning.time_rows`)."""
        features = self.table(step)
        text, seen = condition.txt, condition.references
        return ops.at_least_float32(self.model(x, features, text, seen, condition.rope, condition.index))
