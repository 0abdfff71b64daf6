# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Qwen2.5-VL with its vision tower as a text encoder that sees pictures. What is unusual about it:
`qwenimg.common.networks.encoders.qwen_vl_vision`.

L patches of one picture, S tokens, H heads, D head dim, C width. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.encoders.decoder import Decoder, Pair, Writer
from qwenimg.common.networks.encoders import qwen_vl_vision, vision_tower
from qwenimg.common.networks.encoders.qwen_vl_vision import Group, QwenVLVisionConfig
from qwenimg.common.networks.encoders.vision_tower import NORM_EPS, PicturePlace
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class PatchEmbed(mlx.nn.Module):
    def __init__(self, config: QwenVLVisionConfig):
        super().__init__()
        self.proj = ops.Linear(config.patch_values, config.vision_width, bias=False)

    def __call__(self, patches: Array) -> Array:
        return self.proj(patches)


class VisionAttention(mlx.nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = ops.Linear(width, 3 * width)
        self.proj = ops.Linear(width, width)
        self.attend = ops.Attend()

    def __call__(self, x: Array, rope: Pair, groups: Sequence[Group]) -> Array:
        """[1 L C] -> [1 L C], within each window of `groups`."""
        qkv = self.qkv(x).reshape(1, x.shape[1], 3, self.heads, -1)
        q, k = (ops.rotate_halves(qkv[:, :, i], *rope) for i in range(2))
        v = self.attend.values(qkv[:, :, 2])
        parts, start = [], 0
        for count, size in groups:
            end = start + count * size
            Q, K, V = (heads[:, start:end].reshape(count, size, *heads.shape[2:]) for heads in (q, k, v))
            parts.append(self.attend.result(ops.attention(Q, K, V)).reshape(1, end - start, -1))
            start = end
        return self.proj(mx.concatenate(parts, axis=1))


class VisionMLP(mlx.nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = ops.Linear(width, inner)
        self.up_proj = ops.Linear(width, inner)
        self.down_proj = ops.Linear(inner, width)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class VisionBlock(mlx.nn.Module):
    def __init__(self, config: QwenVLVisionConfig):
        super().__init__()
        self.norm1 = ops.RMSNorm(config.vision_width, NORM_EPS)
        self.norm2 = ops.RMSNorm(config.vision_width, NORM_EPS)
        self.attn = VisionAttention(config.vision_width, config.vision_heads)
        self.mlp = VisionMLP(config.vision_width, config.vision_inner)

    def __call__(self, x: Array, rope: Pair, groups: Sequence[Group]) -> Array:
        """[1 L C] -> [1 L C]."""
        x = ops.residual(x, self.attn(self.norm1(x), rope, groups))
        return ops.residual(x, self.mlp(self.norm2(x)))


class Merger(mlx.nn.Module):
    def __init__(self, config: QwenVLVisionConfig):
        super().__init__()
        self.slot = config.vision_width * config.merge_size**2
        self.ln_q = ops.RMSNorm(config.vision_width, NORM_EPS)
        first, last = ops.Linear(self.slot, self.slot), ops.Linear(self.slot, config.hidden_size)
        self.mlp = [first, mlx.nn.Identity(), last]

    def __call__(self, x: Array) -> Array:
        """Return one slot [1 slots hidden] for the patches [1 L C] of each block."""
        x = self.ln_q(x).reshape(1, -1, self.slot)
        return self.mlp[2](ops.gelu_erf(self.mlp[0](x)))


# Models


class VisionTower(mlx.nn.Module):
    def __init__(self, config: QwenVLVisionConfig, stream: mx.Dtype):
        super().__init__()
        self.stream, self.full_layers = stream, config.full_layers
        self.patch_embed = PatchEmbed(config)
        self.blocks = [VisionBlock(config) for _ in range(config.vision_depth)]
        self.merger = Merger(config)

    def __call__(self, patches: Array, rope: Pair, groups: Sequence[Group], back: Array) -> Array:
        """Return the slots [1 slots hidden] in raster order for patches [1 L values], window by window, and RoPE
        tables [L D/2]. `back` [slots]: the places of the slots."""
        x = ops.stream(self.patch_embed(patches), self.stream)
        whole = [(1, x.shape[1])]
        for i, block in enumerate(self.blocks):
            x = block(x, rope, whole if i in self.full_layers else groups)
        return self.merger(x)[:, back]


class QwenPictureEncoder(Decoder):
    def __init__(self, config: QwenVLVisionConfig, stream: mx.Dtype):
        super().__init__(config, stream)
        self.visual = VisionTower(config, stream)


# Runner


class Runner(Writer[QwenVLVisionConfig, QwenPictureEncoder]):
    network, role = QwenPictureEncoder, "text"

    @ops.computes
    def slots(self, patches: NumpyArray, rows: int, columns: int) -> Array:
        """Return the slots [1 slots C] of a picture of rows x columns patches [L values], block by block,
        evaluated."""
        order, back, groups = qwen_vl_vision.layout(self.config, rows, columns)
        tables = vision_tower.patch_rope(self.config, rows, columns)
        values, cos, sin = (
            self._table(qwen_vl_vision.by_slot(part, self.config, order)) for part in (patches, *tables)
        )
        return ops.eval(self.model.visual(values[None], (cos, sin), groups, ops.placed(back)))

    @ops.computes
    def encode(
        self, ids: Sequence[int], places: Sequence[PicturePlace] = (), slots: Sequence[Array] = (), pads: int = 0
    ) -> Array:
        """Encode the token ids of one prompt, with one id for each slot of its pictures and the last `pads` of them
        pads, to [1 S C], evaluated."""
        return self._encoded(ids, pads, places, slots)
