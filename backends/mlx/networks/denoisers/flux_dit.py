# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Flux.1's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.flux_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D. Attribute paths are checkpoint keys.
Modulation rows come ready from `modulation`, since they depend on timestep, guidance and pooled text alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import load, ops
from qwenimg.backends.mlx.networks.denoisers.diffusion_transformer import (
    Change,
    FeedForward,
    FinalNorm,
    JointBlock,
    Pair,
    Rope,
    RotaryAttention,
    TimestepEmbedding,
)
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.denoisers import flux_conditioning
from qwenimg.common.networks.denoisers.flux_dit import NORM_EPS, TIME_CHANNELS, FluxConfig
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class TimeTextEmbed(mlx.nn.Module):
    def __init__(self, config: FluxConfig):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(TIME_CHANNELS, config.dim)
        if config.guidance_embeds:
            self.guidance_embedder = TimestepEmbedding(TIME_CHANNELS, config.dim)
        if config.pooled_projection_dim:
            self.text_embedder = TimestepEmbedding(config.pooled_projection_dim, config.dim)

    def __call__(self, times: Array, guidance: Array, pooled: Array | None) -> Array:
        """Embed sinusoids of times [T 256] and of a guidance [1 256], and pooled text [1 P], where the model takes
        these: [T C]."""
        temb = self.timestep_embedder(times)
        if hasattr(self, "guidance_embedder"):
            temb = temb + self.guidance_embedder(guidance)
        return temb if pooled is None else temb + self.text_embedder(pooled)


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
        if config.modulates:
            self.norm1 = BlockModulation(dim, 6)
            self.norm1_context = BlockModulation(dim, 6)
        self.ff = FeedForward(dim, hidden)
        self.ff_context = FeedForward(dim, hidden)

    def modulation(self, temb: Array) -> Pair:
        """Return the modulation [T 6C] of the image stream and of the text stream for [T C]."""
        temb = ops.silu(temb)
        return self.norm1.linear(temb), self.norm1_context.linear(temb)

    def __call__(self, img: Array, txt: Array, mods: Pair, rope: Rope, *control: Change) -> Pair:
        """Run the block on img [B L C] and txt [B S C], with mods ([1 6C], [1 6C]). control: the changes of the image
        stream after it."""
        img, txt = self.streams(img, txt, mods, rope, (self.ff, self.ff_context))
        return changed(img, control), ops.clipped(txt)


class SingleTransformerBlock(mlx.nn.Module):
    """A block with the same weights for both streams: attention and feed-forward side by side."""

    def __init__(self, config: FluxConfig):
        super().__init__()
        dim, hidden = config.dim, config.hidden
        if config.modulates:
            self.norm = BlockModulation(dim, 3)
        self.attn = RotaryAttention(dim, config.attention_head_dim, NORM_EPS, projects=False)
        self.proj_mlp = ops.Linear(dim, hidden)
        self.proj_out = ops.Linear(dim + hidden, dim)

    def modulation(self, temb: Array) -> Array:
        """[T C] -> [T 3C]."""
        return self.norm.linear(ops.silu(temb))

    def hidden(self, x: Array) -> Array:
        """Return the feed-forward's channels, as its last layer takes them: [B L C] -> [B L hidden]."""
        return ops.linear_gelu(self.proj_mlp, x)

    def __call__(self, img: Array, txt: Array, mod: Array, rope: Array, *control: Change) -> Pair:
        """Run the block on img [B L C] and txt [B S C], with mod [1 3C]. `rope` has the text first; control: as in
        `TransformerBlock`."""
        shift, scale, gate = ops.chunks(mod, 3, None)
        dtype, S = self.proj_mlp.dtype, txt.shape[1]

        x = ops.joined(
            ops.norm_modulate(txt, shift, scale, dtype, NORM_EPS),
            ops.norm_modulate(img, shift, scale, dtype, NORM_EPS),
            dtype,
        )
        update = self.proj_out(mx.concatenate((self.attn.attended(x, rope), self.hidden(x)), axis=-1))
        img = changed(ops.clipped(ops.gated(img, gate, update[:, S:])), control)
        return img, ops.clipped(ops.gated(txt, gate, update[:, :S]))


def changed(img: Array, control: Iterable[Change]) -> Array:
    """Add the changes of an image stream [B L C], each of the stream without the others, to it."""
    behind = img
    for change in control:
        img = ops.add_first(img, change(behind))
    return img


# Model


class Trunk(mlx.nn.Module):
    """The embedders and blocks of the transformer and of its ControlNets."""

    double_block: Any = TransformerBlock  # the classes of its blocks
    single_block: Any = SingleTransformerBlock

    def __init__(self, config: FluxConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        if config.modulates:
            self.time_text_embed = TimeTextEmbed(config)
        self.context_embedder = ops.Linear(config.joint_attention_dim, config.dim)
        self.x_embedder = ops.Linear(config.in_channels, config.dim)
        double, single = range(config.num_layers), range(config.num_single_layers)
        self.transformer_blocks = [self.double_block(config) for _ in double]
        self.single_transformer_blocks = [self.single_block(config) for _ in single]

    def context(self, text: Array) -> Array:
        """Return the start of the text stream [B S C] for text states [B S 4096]; the same in every step."""
        return ops.stream(self.context_embedder(text), self.stream)


class FluxTransformer(Trunk):
    def __init__(self, config: FluxConfig, stream: mx.Dtype):
        super().__init__(config, stream)
        self.tokens = ops.Tokens()
        self.norm_out = FinalNorm(config.dim, NORM_EPS, modulates=config.modulates)
        self.proj_out = ops.Linear(config.dim, config.out_features)

    def __call__(
        self,
        latents: Array,
        mask: Array | None,
        txt: Array,
        references: Array | None,
        double_mods: list[Pair],
        single_mods: list[Array],
        final_mod: Array,
        rope: Rope,
        joint_rope: Array,
        control: Sequence[Sequence[Change]] | None = None,
    ) -> Array:
        """Predict the velocity [1 L' out] for packed latents [1 L' in] and the text stream [1 S C].

        mask: further channels [1 L' M], Fill's or a control picture's; references [1 L-L' C]: embedded tokens.
        double_mods: per block ([1 6C], [1 6C]); single_mods: per block [1 3C]; final_mod [1 2C]; rope: tables
        [L 1 D/2 2] of image and references, and of the text; joint_rope: the same with the text first, [S+L 1 D/2 2];
        control: the changes of the image stream after each block, by control networks.
        """
        tokens = latents if mask is None else mx.concatenate((latents, mask), axis=-1)
        img = ops.stream(self.x_embedder(tokens), self.stream)
        img = self.tokens.part(img if references is None else ops.joined(img, references, self.stream))
        count = len(double_mods)
        changes = [()] * (count + len(single_mods)) if control is None else control
        for block, mods, behind in zip(self.transformer_blocks, double_mods, changes[:count], strict=True):
            img, txt = block(img, txt, mods, rope, *behind)
            ops.async_eval(img)
        for block, mod, behind in zip(self.single_transformer_blocks, single_mods, changes[count:], strict=True):
            img, txt = block(img, txt, mod, joint_rope, *behind)
            ops.async_eval(img)
        img = self.tokens.gathered(img)[:, : latents.shape[1]]
        return self.proj_out(self.norm_out(img, final_mod, self.proj_out.dtype))


# Runner


@dataclass(frozen=True)
class Condition:
    txt: Array
    references: Array | None  # embedded tokens
    mask: Array | None  # channels of each token
    rope: Rope
    joint_rope: Array


@dataclass(frozen=True)
class Rows:
    """The modulation of all blocks in a schedule's steps, for one pooled text after the other."""

    double: list[Pair]  # per block: image [T, 6C], text [T, 6C]
    single: list[Array]  # per block [T, 3C]

    def at(self, row: int) -> tuple[list[Pair], list[Array]]:
        one = slice(row, row + 1)
        return [(img[one], txt[one]) for img, txt in self.double], [mod[one] for mod in self.single]


@dataclass(frozen=True)
class Modulation:
    blocks: Rows
    final: Array  # [T, 2C]

    def at(self, row: int) -> tuple[list[Pair], list[Array], Array]:
        return *self.blocks.at(row), self.final[row : row + 1]


Config = TypeVar("Config", bound=FluxConfig)
Model = TypeVar("Model", bound=Trunk)
Transformer = TypeVar("Transformer", bound=FluxTransformer)


class TrunkRunner(LoadedNetwork[Config, Model]):
    """The computations of the transformer and of its ControlNets that a run needs once."""

    def time(self, features: NumpyArray, guidance: NumpyArray, pooled: Sequence[Array | None]) -> Array:
        """Return the embeddings [P*T C] of sinusoids of times [T 256] and of a guidance [1 256], which a model without
        guidance does not read, for each of `pooled`, P texts [1 C'], or None in a model without pooled texts. The
        weights are read, used and freed."""
        times, scale = (self.table(values) for values in (features, guidance))
        embed = self.model.time_text_embed
        return self.briefly(
            "time_text_embed.", lambda: mx.concatenate([embed(times, scale, text) for text in pooled], axis=0)
        )

    def rows(self, temb: Array, count: int) -> Rows:
        """Return the rows of every block for embeddings [count*T C]. Each block's weights are read, used and freed in
        turn."""
        double, single = (
            [
                self.briefly(f"{path}.{i}.", partial(ops.apart, block.modulation, temb, count))
                for i, block in enumerate(blocks)
            ]
            for path, blocks in self._blocks()
        )
        return Rows(double, single)

    def tables(self, grids: Sequence[flux_conditioning.Grid], length: int) -> Rope:
        """Return the tables of RoPE [L 1 D/2 2] of images of `grids` rows and columns of tokens, and of `length` text
        tokens."""
        tables = flux_conditioning.image_and_text_rope(self.config, grids, length)
        img, txt = map(self.rope, tables)
        return img, txt

    def briefly(self, prefix: str, compute: Any) -> Any:
        return load.briefly(self.model, self.plan, prefix, compute)

    def _blocks(self) -> list[tuple[str, Iterable[Any]]]:
        model = self.model
        return [
            ("transformer_blocks", model.transformer_blocks),
            ("single_transformer_blocks", model.single_transformer_blocks),
        ]


class TransformerRunner(TrunkRunner[Config, Transformer]):
    """The computations of a step."""

    role = "transformer"

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
        img, txt = self.tables(grids, text.shape[1])
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
    def predict(
        self,
        x: Array,
        step: tuple[Modulation, int],
        condition: Condition,
        control: Sequence[Sequence[Change]] | None = None,
    ) -> Array:
        """Predict the velocity [1 L out] in float32 for packed latents x [1 L in] at a row of the modulation. control:
        the changes after each block."""
        modulation, row = step
        c = condition
        more = () if control is None else (control,)
        velocity = self.model(x, c.mask, c.txt, c.references, *modulation.at(row), c.rope, c.joint_rope, *more)
        return ops.at_least_float32(velocity)


class Runner(TransformerRunner[FluxConfig, FluxTransformer]):
    network = FluxTransformer

    @ops.computes
    def modulate(self, features: NumpyArray, guidance: NumpyArray, pooled: Sequence[Array | None]) -> Modulation:
        """Return the rows of every block and of the head; arguments as for `time`."""
        temb, count = self.time(features, guidance, pooled), len(pooled)
        final = self.briefly("norm_out.", lambda: ops.apart(self.model.norm_out.modulation, temb, count))
        return Modulation(self.rows(temb, count), final)
