"""Stable Diffusion's UNet. What is unusual about it: `qwenimg.common.networks.denoisers.unet`.

B batch, L pixels as tokens, S text tokens, H heads, D head dim, C channels, E channels of the time embedding, h w
latents. Attribute paths are checkpoint keys. Keys and values of the text come ready from `context`, since they depend
on neither step nor latents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.loaded import LoadedNetwork
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.denoisers.unet import LAYER_NORM_EPS, MLP_RATIO, TRANSFORMER_NORM_EPS, Level, UNetConfig
from qwenimg.common.runtime.engine import NumpyArray

# Keys and values, and of pictures theirs, each with the weight [1 1 1] or [1 L 1] of what they give
Pair = tuple[Any, ...]
# Keys and values of each transformer block of each attention of a level
Context = list[list[Pair]]

# Layers


def contexts(parts: Iterable[Any], text: Tensor) -> list[Any]:
    """Return the context of each of `parts` for the text states [B S in]."""
    return [part.context(text) for part in parts]


class Embedding(torch.nn.Module):
    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.linear_1 = ops.Linear(inputs, width)
        self.linear_2 = ops.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """[B in] -> [B E]."""
        return self.linear_2(ops.silu(self.linear_1(features)))


class ResidualBlock(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, config: UNetConfig):
        super().__init__()
        self.norm1 = ops.GroupNorm(config.norm_num_groups, inputs, config.norm_eps)
        self.conv1 = ops.Conv2d(inputs, outputs, 3, padding=1)
        self.time_emb_proj = ops.Linear(config.time_width, outputs)
        self.norm2 = ops.GroupNorm(config.norm_num_groups, outputs, config.norm_eps)
        self.conv2 = ops.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.conv_shortcut = ops.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        """Run the block on x [B in h w], with temb [1 or B E] after its SiLU: [B out h w]."""
        update = self.conv1(ops.norm_silu(self.norm1, x))
        update = ops.shift(update, self.time_emb_proj(temb))
        update = self.conv2(ops.norm_silu(self.norm2, update))
        if hasattr(self, "conv_shortcut"):
            return ops.add_shortcut(update, self.conv_shortcut, x)
        return ops.residual(x, update)


class Attention(torch.nn.Module):
    def __init__(self, width: int, keys: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_q = ops.Linear(width, width, bias=False)
        self.to_k = ops.Linear(keys, width, bias=False)
        self.to_v = ops.Linear(keys, width, bias=False)
        self.to_out = torch.nn.ModuleList([ops.Linear(width, width)])
        self.attend = ops.Attend()

    def split(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L H D]."""
        return x.reshape(*x.shape[:2], self.heads, -1)

    def context(self, x: Tensor) -> Pair:
        """Return keys and values [B S H D] of [B S in]."""
        return self.split(self.to_k(x)), self.attend.values(self.split(self.to_v(x)))

    def forward(self, x: Tensor, normed: Tensor, context: Pair) -> Tensor:
        """Add this attention, computed from the norm of the stream, to the stream x [B L C]."""
        k, v, *pictures = context
        q = self.split(self.to_q(normed))
        attended = self.attend.result(ops.attention(q, k, v))
        for k, v, weight in pictures:
            seen = self.attend.result(ops.attention(q, k, self.attend.values(v)))
            attended = ops.add(attended, weight * seen)
        return ops.add_linear(x, self.to_out[0], attended)


class GEGLU(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.proj = ops.Linear(width, 2 * MLP_RATIO * width)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear_geglu(self.proj, x)


class FeedForward(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        layers = [GEGLU(width), torch.nn.Identity(), ops.Linear(MLP_RATIO * width, width)]
        self.net = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor, normed: Tensor) -> Tensor:
        """Add the feed-forward of the stream's norm to the stream x [B L C]."""
        return ops.add_linear(x, self.net[2], self.net[0](normed))


class TransformerBlock(torch.nn.Module):
    def __init__(self, width: int, heads: int, config: UNetConfig):
        super().__init__()
        self.norm1 = ops.LayerNorm(width, LAYER_NORM_EPS)
        self.attn1 = Attention(width, width, heads)
        self.norm2 = ops.LayerNorm(width, LAYER_NORM_EPS)
        self.attn2 = Attention(width, config.cross_attention_dim, heads)
        self.norm3 = ops.LayerNorm(width, LAYER_NORM_EPS)
        self.ff = FeedForward(width)

    def context(self, text: Tensor) -> Pair:
        return self.attn2.context(text)

    def forward(self, x: Tensor, context: Pair) -> Tensor:
        """Run the block on x [B L C], with keys and values of the text."""
        normed = self.norm1(x)
        x = self.attn1(x, normed, self.attn1.context(normed))
        x = self.attn2(x, self.norm2(x), context)
        return self.ff(x, self.norm3(x))


class SpatialTransformer(torch.nn.Module):
    def __init__(self, level: Level, config: UNetConfig):
        super().__init__()
        self.norm = ops.TokenNorm(config.norm_num_groups, level.width, TRANSFORMER_NORM_EPS)
        self.proj_in = ops.Linear(level.width, level.width)
        blocks = [TransformerBlock(level.width, level.heads, config) for _ in range(level.depth)]
        self.transformer_blocks = torch.nn.ModuleList(blocks)
        self.proj_out = ops.Linear(level.width, level.width)

    def context(self, text: Tensor) -> list[Pair]:
        return contexts(self.transformer_blocks, text)

    def forward(self, x: Tensor, context: list[Pair]) -> Tensor:
        """[B C h w] -> [B C h w]."""
        tokens = ops.stream(self.proj_in(self.norm(x)), x.dtype)
        for block, pair in zip(self.transformer_blocks, context, strict=True):
            tokens = block(tokens, pair)
        return images.image(ops.add_linear(images.tokens(x), self.proj_out, tokens), x)


class Resample(torch.nn.Module):
    def __init__(self, width: int, stride: int):
        super().__init__()
        self.conv = ops.Conv2d(width, width, 3, stride, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class DownBlock(torch.nn.Module):
    def __init__(self, level: Level, config: UNetConfig):
        super().__init__()
        self.resnets = torch.nn.ModuleList([ResidualBlock(i, o, config) for i, o in level.resnets])
        attentions = [SpatialTransformer(level, config) for _ in level.resnets] if level.depth else []
        self.attentions = torch.nn.ModuleList(attentions)
        self.feature_last = level.resampled and not level.depth
        self.downsamplers = torch.nn.ModuleList([Resample(level.width, 2)] if level.resampled else [])

    def context(self, text: Tensor) -> Context:
        return contexts(self.attentions, text)

    def forward(
        self,
        x: Tensor,
        states: list[list[Tensor]],
        temb: Tensor,
        context: Context,
        feature: Tensor | None = None,
    ) -> Tensor:
        """Run the block before its downsampler: [B in h w] -> [B out h w]. Adds x and what follows on it to `states`:
        the up block of the same level joins them. feature: of a T2I-Adapter, added to the last result, or after the
        downsampler of a block without attention."""
        joined = [x]
        for i, resnet in enumerate(self.resnets):
            x = resnet(x, temb)
            x = self.attentions[i](x, context[i]) if context else x
            joined.append(ops.async_eval(x))
        if feature is not None and not self.feature_last:
            x = joined[-1] = ops.add(x, feature)
        states.append(joined)
        return x

    def downsampled(self, x: Tensor, feature: Tensor | None = None) -> Tensor:
        """[B out h w] -> [B out h' w'], or x on the last level. feature: as for the block."""
        for sampler in self.downsamplers:
            x = ops.stream(sampler(x), x.dtype)
        return ops.add(x, feature) if feature is not None and self.feature_last else x


class MidBlock(torch.nn.Module):
    def __init__(self, level: Level, config: UNetConfig):
        super().__init__()
        self.resnets = torch.nn.ModuleList([ResidualBlock(i, o, config) for i, o in level.resnets])
        self.attentions = torch.nn.ModuleList([SpatialTransformer(level, config)])

    def context(self, text: Tensor) -> Context:
        return contexts(self.attentions, text)

    def forward(self, x: Tensor, temb: Tensor, context: Context) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x, temb), context[0]), temb)


@dataclass(frozen=True)
class Changes:
    """The changes that a ControlNet or a T2I-Adapter adds to the results of a UNet."""

    down: list[list[Tensor]]  # to the states that the up blocks join, by level
    mid: Tensor | None  # to the result of the mid block
    features: list[Tensor]  # of a T2I-Adapter: to those of the down blocks, on which the next depend, and the mid block


def changed(states: list[Tensor], changes: list[Tensor]) -> list[Tensor]:
    """Return the states of a level with what a ControlNet adds to each."""
    return [ops.residual(state, change) for state, change in zip(states, changes, strict=True)]


class UpBlock(torch.nn.Module):
    def __init__(self, level: Level, config: UNetConfig):
        super().__init__()
        self.resnets = torch.nn.ModuleList([ResidualBlock(i, o, config) for i, o in level.resnets])
        attentions = [SpatialTransformer(level, config) for _ in level.resnets] if level.depth else []
        self.attentions = torch.nn.ModuleList(attentions)
        self.upsamplers = torch.nn.ModuleList([Resample(level.width, 1)] if level.resampled else [])

    def context(self, text: Tensor) -> Context:
        return contexts(self.attentions, text)

    def forward(self, x: Tensor, states: list[list[Tensor]], temb: Tensor, context: Context) -> Tensor:
        """Run the block: [B in h w] -> [B out h' w']. Takes the states that it joins from the end of `states`; h' w'
        are the sides of the state that is then last."""
        joined = states.pop()
        for i, resnet in enumerate(self.resnets):
            x = resnet(images.beside(x, joined.pop()), temb)
            x = ops.async_eval(self.attentions[i](x, context[i]) if context else x)
        for sampler in self.upsamplers:
            x = ops.stream(sampler(images.upsample_like(x, states[-1][-1])), x.dtype)
        return x


# Model


class UNetHalf(torch.nn.Module):
    """The UNet up to its mid block."""

    def __init__(self, config: UNetConfig, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.conv_in = ops.Conv2d(config.in_channels, config.block_out_channels[0], 3, padding=1)
        self.time_embedding = Embedding(config.time_channels, config.time_width)
        if config.addition_embed_type and config.projection_class_embeddings_input_dim:
            self.add_embedding = Embedding(config.projection_class_embeddings_input_dim, config.time_width)
        self.down_blocks = torch.nn.ModuleList([DownBlock(level, config) for level in config.down])
        self.mid_block = MidBlock(config.mid, config)

    def time(self, features: Tensor, addition: Tensor | None, kinds: Tensor | None = None) -> Tensor:
        """Embed sinusoids of the time [1 or B, C], and for SDXL pooled text and sinusoids of the sizes [B A]: [1 or B,
        E], after the SiLU. kinds [1 E]: the embedding of a union's kinds, which is added."""
        temb = self.time_embedding(features)
        temb = temb if kinds is None else ops.add(temb, kinds)
        return ops.silu(temb if addition is None else ops.add(temb, self.add_embedding(addition)))

    def down(
        self, x: Tensor, temb: Tensor, context: list[Context], features: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[list[Tensor]]]:
        """Run the down blocks on x [B C h w]. Return the result and the states that the up blocks join, by level.
        features: of a T2I-Adapter, one for each block."""
        states: list[list[Tensor]] = []
        blocks: Iterable[Any] = self.down_blocks
        for i, (block, pairs) in enumerate(zip(blocks, context, strict=False)):
            feature = features[i] if features else None
            x = block.downsampled(block(x, states, temb, pairs, feature), feature)
        return x, states


class UNetModel(UNetHalf):
    def __init__(self, config: UNetConfig, stream: torch.dtype):
        super().__init__(config, stream)
        self.up_blocks = torch.nn.ModuleList([UpBlock(level, config) for level in config.up])
        width = config.block_out_channels[0]
        self.conv_norm_out = ops.GroupNorm(config.norm_num_groups, width, config.norm_eps)
        self.conv_out = ops.Conv2d(width, config.out_channels, 3, padding=1)

    def context(self, text: Tensor) -> list[Context]:
        """Return keys and values of the text states [B S in] in every block; the same in every step."""
        return contexts([*self.down_blocks, self.mid_block, *self.up_blocks], text)

    def forward(
        self,
        latents: Tensor,
        features: Tensor,
        context: list[Context],
        addition: Tensor | None = None,
        changes: Changes | None = None,
    ) -> Tensor:
        """Predict [B out h w] for latents [B in h w] and sinusoids of the time [1 or B, C].

        context: from `self.context`; addition [B A]: pooled text and the sinusoids of the sizes, for SDXL; changes: of
        a ControlNet.
        """
        count = len(self.down_blocks)
        temb = self.time(features, addition)
        keys = context[count][0][0][0]  # in the dtype of most convolutions
        x = ops.stream(self.conv_in(images.laid_out(latents, keys.dtype)), self.stream)
        added = [] if changes is None else changes.features
        x, states = self.down(x, temb, context, added)
        x = self.mid_block(x, temb, context[count])
        skipped = len(states) < count  # by a step cache, whose stored output has earlier changes
        if len(added) > count and not skipped:
            x = ops.add(x, added[count])
        if changes is not None and changes.mid is not None:
            x = x if skipped else ops.residual(x, changes.mid)
            states = [changed(joined, level) for joined, level in zip(states, changes.down, strict=False)]
        for block, pairs in zip(self.up_blocks, context[count + 1 :], strict=True):
            x = block(x, states, temb, pairs)
        return self.conv_out(ops.norm_silu(self.conv_norm_out, x))


# Runner


@dataclass(frozen=True)
class Pictures:
    """Keys and values of pictures by an IP-Adapter in each cross attention: down, up, mid."""

    pairs: list[tuple[Tensor, Tensor]]  # [2 T C] each: of the pictures, and of empty ones
    weights: list[NumpyArray | None]  # [1 1 1] or [1 L 1] of each cross attention; None: the pictures do not count


def together(control: Sequence[Changes]) -> Changes:
    """Return the sum of the changes of several ControlNets and T2I-Adapters."""
    first, *others = control
    for other in others:
        down, mid = first.down or other.down, other.mid if first.mid is None else first.mid
        if first.mid is not None and other.mid is not None:
            down = [changed(a, b) for a, b in zip(first.down, other.down, strict=True)]
            mid = ops.residual(first.mid, other.mid)
        features = first.features or other.features
        if first.features and other.features:  # these are the same in every step, and not changed in place
            features = [ops.add(a, b) for a, b in zip(first.features, other.features, strict=True)]
        first = Changes(down, mid, features)
    return first


@dataclass(frozen=True)
class Condition:
    context: list[Context]
    addition: Tensor | None
    branches: int


class Runner(LoadedNetwork[UNetConfig, UNetModel]):
    network, role = UNetModel, "transformer"

    @ops.computes
    def condition(self, texts: NumpyArray, addition: NumpyArray | None) -> Condition:
        """Return the condition for text states [B S C], and pooled text and sinusoids of the sizes [B A]."""
        extra = None if addition is None else self.table(addition)
        return Condition(self.model.context(self.table(texts)), extra, len(texts))

    @ops.computes
    def with_pictures(self, condition: Condition, pictures: Sequence[Pictures], rows: Sequence[int]) -> Condition:
        """Return the condition with pictures as prompts. rows: for each branch, 0 for the pictures and 1 for empty
        ones."""
        count, context = len(self.model.down_blocks), condition.context
        order, numbers = [*context[:count], *context[count + 1 :], context[count]], itertools.count()
        *blocks, mid = [
            [[self.joined(pair, next(numbers), pictures, rows) for pair in pairs] for pairs in level] for level in order
        ]
        return Condition([*blocks[:count], mid, *blocks[count:]], condition.addition, condition.branches)

    def joined(self, pair: Pair, number: int, pictures: Sequence[Pictures], rows: Sequence[int]) -> Pair:
        """Return the context of a cross attention with its keys and values of pictures."""
        keys, values = pair
        more = []
        for one in pictures:
            weight = one.weights[number]
            if weight is not None:
                k, v = (torch.cat([part[row : row + 1] for row in rows], dim=0) for part in one.pairs[number])
                k, v = (ops.stream(part.reshape(*part.shape[:2], keys.shape[2], -1), keys.dtype) for part in (k, v))
                more.append((k, v, self.table(weight)))
        return (keys, values, *more)

    @ops.computes
    def predict(
        self, x: Tensor, step: NumpyArray, condition: Condition, control: Sequence[Changes] | None = None
    ) -> Tensor:
        """Predict [B 4, h, w] for x [1 C, h, w], both in the order of the pipeline, and sinusoids of the time. control:
        the changes of each ControlNet."""
        latents, features = ops.repeated(x, condition.branches), self.table(step)
        changes = together(control) if control else None
        prediction = self.model(images.from_bchw(latents), features, condition.context, condition.addition, changes)
        return images.to_bchw(ops.at_least_float32(prediction))
