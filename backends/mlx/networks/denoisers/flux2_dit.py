# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Flux.2's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.flux2_dit`.

B batch, L image tokens (references included), S text tokens, H heads, D head dim, C = H * D, M width of the
feed-forward. Attribute paths are checkpoint keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.denoisers.diffusion_transformer import (
    FinalNorm,
    GatedFeedForward,
    JointBlock,
    Pair,
    Rope,
    StreamModulation,
    TimestepEmbedding,
    with_known,
)
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.denoisers import flux2_conditioning
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class TimeGuidanceEmbed(mlx.nn.Module):
    def __init__(self, config: Flux2Config):
        super().__init__()
        channels, dim = config.timestep_guidance_channels, config.dim
        self.timestep_embedder = TimestepEmbedding(channels, dim, bias=False)
        if config.guidance_embeds:
            self.guidance_embedder = TimestepEmbedding(channels, dim, bias=False)

    def __call__(self, features: Array) -> Array:
        """Embed the sinusoids of the time and, if the model has `guidance_embeds`, of the guidance: [1 or 2, channels]
        -> [1 C]."""
        temb = self.timestep_embedder(features[:1])
        return temb + self.guidance_embedder(features[1:]) if hasattr(self, "guidance_embedder") else temb


class DoubleBlock(JointBlock):
    """A block of two streams."""

    def __init__(self, config: Flux2Config):
        super().__init__(config.dim, config.attention_head_dim, config.eps, bias=False)
        self.ff = GatedFeedForward(config.dim, config.hidden)
        self.ff_context = GatedFeedForward(config.dim, config.hidden)

    def __call__(self, img: Array, txt: Array, mods: Pair, rope: Rope) -> Pair:
        """Run the block on img [B L C] and txt [B S C], with mods ([1 6C], [1 6C])."""
        img, txt = self.streams(img, txt, mods, rope, (self.ff, self.ff_context))
        return img, ops.clipped(txt)


class ParallelAttention(mlx.nn.Module):
    """Attention and feed-forward in parallel, with a shared layer in and a shared layer out."""

    def __init__(self, config: Flux2Config):
        super().__init__()
        self.dim, self.head_dim, self.hidden = config.dim, config.attention_head_dim, config.hidden
        self.to_qkv_mlp_proj = ops.Linear(config.dim, 3 * config.dim + 2 * config.hidden, bias=False)
        self.to_out = ops.Linear(config.dim + config.hidden, config.dim, bias=False)
        self.norm_q = ops.RMSNorm(config.attention_head_dim, config.eps)
        self.norm_k = ops.RMSNorm(config.attention_head_dim, config.eps)
        self.attend = ops.Attend()

    def heads(self, y: Array, number: int) -> Array:
        """Return q, k or v, by its `number`: [B L 3C+2M] -> [B L H D]."""
        part = y[..., number * self.dim : (number + 1) * self.dim]
        return part.reshape(*part.shape[:2], -1, self.head_dim)

    def projected(self, y: Array, rope: Array) -> tuple[Array, Array, Array]:
        """Return queries, keys and values: [B L 3C+2M] -> [B L H D] each."""
        v = self.attend.values(self.heads(y, 2))
        q = ops.rotate_pairs(self.norm_q(self.heads(y, 0)), rope, v.dtype)
        k = ops.rotate_pairs(self.norm_k(self.heads(y, 1)), rope, v.dtype)
        return q, k, v

    def out(self, attended: Array, y: Array) -> Array:
        """Return the layer out of the attention's result [B L C] and the feed-forward's of [B L 3C+2M]."""
        gate = 3 * self.dim
        hidden = ops.swiglu(y[..., gate : gate + self.hidden], y[..., gate + self.hidden :])
        return self.to_out(mx.concatenate((attended, hidden), axis=-1))

    def __call__(self, x: Array, rope: Array, known: Pair | None = None) -> Array:
        """[B S+L C] -> [B S+L C]. known: further keys and values."""
        y = self.to_qkv_mlp_proj(x)
        q, k, v = self.projected(y, rope)
        return self.out(self.attend(q, *with_known(self.attend, k, v, known)), y)


class SingleBlock(mlx.nn.Module):
    """A block with the same weights for both streams, which it joins to one."""

    def __init__(self, config: Flux2Config):
        super().__init__()
        self.eps = config.eps
        self.attn = ParallelAttention(config)

    def __call__(self, img: Array, txt: Array, mod: Array, rope: Array) -> Pair:
        """Run the block on img [B L C] and txt [B S C], with mod [1 3C]. `rope` has the text first."""
        return self.streams(img, txt, mod, rope)

    def streams(self, img: Array, txt: Array, mod: Array, rope: Array, known: Pair | None = None) -> Pair:
        """Update both streams. known: further keys and values, which both see."""
        shift, scale, gate = ops.chunks(mod, 3, None)
        dtype, S = self.attn.to_qkv_mlp_proj.dtype, txt.shape[1]
        x = ops.joined(
            ops.norm_modulate(txt, shift, scale, dtype, self.eps),
            ops.norm_modulate(img, shift, scale, dtype, self.eps),
            dtype,
        )
        update = self.attn(x, rope, known)
        return ops.clipped(ops.gated(img, gate, update[:, S:])), ops.clipped(ops.gated(txt, gate, update[:, :S]))


# Model


class Flux2Transformer(mlx.nn.Module):
    double_block: Any = DoubleBlock  # the classes of its blocks
    single_block: Any = SingleBlock

    def __init__(self, config: Flux2Config, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.tokens = ops.Tokens()
        self.time_guidance_embed = TimeGuidanceEmbed(config)
        self.double_stream_modulation_img = StreamModulation(config.dim, 6)
        self.double_stream_modulation_txt = StreamModulation(config.dim, 6)
        self.single_stream_modulation = StreamModulation(config.dim, 3)
        self.x_embedder = ops.Linear(config.in_channels, config.dim, bias=False)
        self.context_embedder = ops.Linear(config.joint_attention_dim, config.dim, bias=False)
        self.transformer_blocks = [self.double_block(config) for _ in range(config.num_layers)]
        singles = range(config.num_single_layers)
        self.single_transformer_blocks = [self.single_block(config) for _ in singles]
        self.norm_out = FinalNorm(config.dim, config.eps, bias=False)
        self.proj_out = ops.Linear(config.dim, config.in_channels, bias=False)

    def context(self, text: Array) -> Array:
        """Return the start of the text stream [1 S C] for text states [1 S joint]; the same in every step."""
        return ops.stream(self.context_embedder(text), self.stream)

    def __call__(self, latents: Array, features: Array, txt: Array, references: Array | None, rope: Rope) -> Array:
        """Predict the velocity [1 L' out] for packed latents [1 L' in] and sinusoids [1 or 2, channels].

        txt [1 S C]: the start of the text stream; references [1 L-L' C]: embedded tokens of reference images; rope:
        tables [L 1 D/2 2] of image and references, and of the text.
        """
        temb = self.time_guidance_embed(features)
        mods = self.double_stream_modulation_img(temb), self.double_stream_modulation_txt(temb)
        mod, final = self.single_stream_modulation(temb), self.norm_out.modulation(temb)

        img = ops.stream(self.x_embedder(latents), self.stream)
        img = self.tokens.part(img if references is None else ops.joined(img, references, self.stream))
        for block in self.transformer_blocks:
            img, txt = block(img, txt, mods, rope)
            ops.async_eval(img)
        joint = mx.concatenate((rope[1], rope[0]), axis=0)
        for block in self.single_transformer_blocks:
            img, txt = block(img, txt, mod, joint)
            ops.async_eval(img)
        img = self.tokens.gathered(img)[:, : latents.shape[1]]
        return self.proj_out(self.norm_out(img, final, self.proj_out.dtype))


# Runner


@dataclass(frozen=True)
class Condition:
    txt: Array
    references: Array | None  # embedded tokens
    rope: Rope


class Runner(LoadedNetwork[Flux2Config, Flux2Transformer]):
    network, role = Flux2Transformer, "transformer"

    @ops.computes
    def condition(self, text: Array, images: tuple[Sequence[flux2_conditioning.Grid], Sequence[Array]]) -> Condition:
        """Prepare text states [1 S joint]. `images`: rows and columns in tokens of the image and of each reference, and
        the packed latents [1 L C] of the references."""
        grids, references = images
        tables = flux2_conditioning.image_and_text_rope(self.config, grids, text.shape[1])
        img, txt = map(self.rope, tables)
        tokens = self.model.x_embedder(mx.concatenate(list(references), axis=1)) if references else None
        return Condition(
            txt=self.model.context(text),
            references=None if tokens is None else ops.stream(tokens, self.model.stream),
            rope=(self.model.tokens.rows(img), txt),
        )

    @ops.computes
    def predict(self, x: Array, step: NumpyArray, condition: Condition) -> Array:
        """Predict the velocity [1 L' C] in float32 for packed latents x [1 L' C] and sinusoids of the step
        (`flux2_conditioning.time_rows`)."""
        features = self.table(step)
        return ops.at_least_float32(self.model(x, features, condition.txt, condition.references, condition.rope))
