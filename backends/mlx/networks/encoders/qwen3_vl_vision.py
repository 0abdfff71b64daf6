# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Qwen3-VL with its vision tower as a text encoder that sees pictures. What is unusual about it:
`qwenimg.common.networks.encoders.qwen3_vl_vision`.

L patches of one picture, S tokens, K layers with deep slots, C width. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.encoders.decoder import Decoder, Pair, Writer
from qwenimg.backends.mlx.networks.encoders.qwen_vl_vision import VisionAttention
from qwenimg.common.networks.encoders import qwen3_vl_vision, vision_tower
from qwenimg.common.networks.encoders.qwen3_vl_vision import Qwen3VLVisionConfig
from qwenimg.common.networks.encoders.vision_tower import NORM_EPS, PicturePlace
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class PatchEmbed(mlx.nn.Module):
    def __init__(self, config: Qwen3VLVisionConfig):
        super().__init__()
        self.proj = ops.Linear(config.patch_values, config.vision_width)

    def __call__(self, patches: Array) -> Array:
        return self.proj(patches)


class VisionMLP(mlx.nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.linear_fc1 = ops.Linear(width, inner)
        self.linear_fc2 = ops.Linear(inner, width)

    def __call__(self, x: Array) -> Array:
        return self.linear_fc2(ops.linear_gelu(self.linear_fc1, x))


class VisionBlock(mlx.nn.Module):
    def __init__(self, config: Qwen3VLVisionConfig):
        super().__init__()
        self.norm1 = ops.LayerNorm(config.vision_width, NORM_EPS)
        self.norm2 = ops.LayerNorm(config.vision_width, NORM_EPS)
        self.attn = VisionAttention(config.vision_width, config.vision_heads)
        self.mlp = VisionMLP(config.vision_width, config.vision_inner)

    def __call__(self, x: Array, rope: Pair) -> Array:
        """[1 L C] -> [1 L C]."""
        x = ops.residual(x, self.attn(self.norm1(x), rope, [(1, x.shape[1])]))
        return ops.residual(x, self.mlp(self.norm2(x)))


class Merger(mlx.nn.Module):
    """A layer that makes a slot of the patches of each block. `deep`: its norm is over a block, else over a patch."""

    def __init__(self, config: Qwen3VLVisionConfig, deep: bool):
        super().__init__()
        self.slot, self.deep = config.vision_width * config.merge_size**2, deep
        self.norm = ops.LayerNorm(self.slot if deep else config.vision_width, NORM_EPS)
        self.linear_fc1 = ops.Linear(self.slot, self.slot)
        self.linear_fc2 = ops.Linear(self.slot, config.hidden_size)

    def __call__(self, x: Array) -> Array:
        """Return one slot [1 slots hidden] for the patches [1 L C] of each block."""
        blocks = x.reshape(1, -1, self.slot)
        normed = self.norm(blocks) if self.deep else self.norm(x).reshape(*blocks.shape)
        return self.linear_fc2(ops.gelu_erf(self.linear_fc1(normed)))


# Models


class VisionTower(mlx.nn.Module):
    def __init__(self, config: Qwen3VLVisionConfig, stream: mx.Dtype):
        super().__init__()
        self.stream, self.deep_layers = stream, config.deep_layers
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = ops.Embedding(config.positions, config.vision_width)
        self.blocks = [VisionBlock(config) for _ in range(config.vision_depth)]
        self.merger = Merger(config, deep=False)
        self.deepstack_merger_list = [Merger(config, deep=True) for _ in config.deep_layers]

    def __call__(self, patches: Array, rope: Pair, numbers: Array, shares: Array) -> Array:
        """Return the slots [1+K slots hidden], the deep ones after the others, for patches [1 L values], RoPE tables
        [L D/2], and rows of the table of positions with their shares, [L 4] and [L 4 1]."""
        places = (self.pos_embed(numbers) * shares).sum(1)
        x = ops.add(ops.stream(self.patch_embed(patches), self.stream), places[None])
        deep = list[Array]()
        for i, block in enumerate(self.blocks):
            x = block(x, rope)
            deep += [self.deepstack_merger_list[len(deep)](x)] if i in self.deep_layers else []
        return mx.concatenate([self.merger(x), *deep], axis=0)


class Qwen3PictureEncoder(Decoder):
    def __init__(self, config: Qwen3VLVisionConfig, stream: mx.Dtype):
        super().__init__(config, stream)
        self.visual = VisionTower(config, stream)


# Runner


class Runner(Writer[Qwen3VLVisionConfig, Qwen3PictureEncoder]):
    network, role = Qwen3PictureEncoder, "text"

    @ops.computes
    def slots(self, patches: NumpyArray, rows: int, columns: int) -> Array:
        """Return the slots [1+K slots C] of a picture of rows x columns patches [L values], block by block,
        evaluated."""
        numbers, shares = qwen3_vl_vision.stretched(self.config, rows, columns)
        tables = vision_tower.patch_rope(self.config, rows, columns)
        values, cos, sin, weights = (self._table(part) for part in (patches, *tables, shares[..., None]))
        return ops.eval(self.model.visual(values[None], (cos, sin), ops.placed(numbers), weights))

    @ops.computes
    def encode(self, ids: Sequence[int], places: Sequence[PicturePlace] = (), slots: Sequence[Array] = ()) -> Array:
        """Encode the token ids of one prompt, with one id for each slot of its pictures, to [1 S C*taps], evaluated."""
        return self._encoded(ids, 0, places, slots)
