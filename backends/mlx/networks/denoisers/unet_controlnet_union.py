# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""A ControlNet Union. What is unusual about it: `qwenimg.common.networks.denoisers.unet_controlnet_union`.

B batch, S text tokens, C channels, E channels of the time embedding, N pictures, h w latents, H W pixels. Attribute
paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.denoisers import unet_controlnet
from qwenimg.backends.mlx.networks.denoisers.unet import Changes, Embedding
from qwenimg.backends.mlx.networks.denoisers.unet_controlnet import ControlRunner, UNetControlNet
from qwenimg.backends.mlx.ops import images
from qwenimg.common.networks.denoisers.unet import LAYER_NORM_EPS, MLP_RATIO
from qwenimg.common.networks.denoisers.unet_controlnet_union import UNetControlNetUnionConfig
from qwenimg.common.runtime.engine import NumpyArray


class Values(mlx.nn.Module):
    """The attention of a token over equal rows of a batch: its values alone."""

    def __init__(self, width: int):
        super().__init__()
        self.in_proj = ops.Linear(width, 3 * width)
        self.out_proj = ops.Linear(width, width)

    def __call__(self, x: Array) -> Array:
        """[1 N C] -> [1 N C]."""
        return self.out_proj(self.in_proj(x)[..., 2 * x.shape[-1] :])


class FeedForward(mlx.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.c_fc = ops.Linear(width, MLP_RATIO * width)
        self.c_proj = ops.Linear(MLP_RATIO * width, width)

    def __call__(self, x: Array) -> Array:
        return self.c_proj(ops.quick_gelu(self.c_fc(x)))


class TokenLayer(mlx.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attn = Values(width)
        self.ln_1 = ops.LayerNorm(width, LAYER_NORM_EPS)
        self.mlp = FeedForward(width)
        self.ln_2 = ops.LayerNorm(width, LAYER_NORM_EPS)

    def __call__(self, x: Array) -> Array:
        """[1 N C] -> [1 N C]."""
        x = ops.add(x, self.attn(self.ln_1(x)))
        return ops.add(x, self.mlp(self.ln_2(x)))


class UNetControlNetUnion(UNetControlNet):
    def __init__(self, config: UNetControlNetUnionConfig, stream: mx.Dtype):
        super().__init__(config, stream)
        width = config.num_trans_channel
        self.task_embedding = ops.Embedding(config.num_control_type, width)
        self.transformer_layes = [TokenLayer(width) for _ in range(config.num_trans_layer)]
        self.spatial_ch_projs = ops.Linear(width, config.num_proj_channel)
        self.control_add_embedding = Embedding(config.kind_channels, config.time_width)

    def together(self, pictures: list[Array], kinds: Array, scales: Sequence[float]) -> Array:
        """Return the sum of embedded pictures [1 C h w] of these `kinds` [N], each with what comes of its token, times
        its scale."""
        scaled = [picture if scale == 1 else picture * scale for picture, scale in zip(pictures, scales, strict=True)]
        total = None
        for i, (picture, scale) in enumerate(zip(pictures, scales, strict=True)):
            means = ops.channel_means(picture)
            token = ops.add(images.tokens(means), self.task_embedding(kinds[i : i + 1])[None]) * scale
            for layer in self.transformer_layes:
                token = layer(token)
            offset = images.image(self.spatial_ch_projs(token), means) * scale
            part = ops.add(scaled[i], offset)
            total = part if total is None else ops.add(total, part)
        assert total is not None
        return total


# Runner


@dataclass(frozen=True)
class Condition(unet_controlnet.Condition):
    pictures: list[Array]  # [1 C h w] of each; `picture` is the first
    kinds: Array  # [N] of the pictures
    embedding: Array  # [1 E] of all kinds


class Runner(ControlRunner[UNetControlNetUnionConfig, UNetControlNetUnion]):
    network, role = UNetControlNetUnion, "transformer"

    @ops.computes
    def condition(
        self,
        texts: NumpyArray,
        extra: tuple[NumpyArray | None, int, NumpyArray, NumpyArray],
        pictures: Sequence[Array],
    ) -> Condition:
        """Prepare text states [N S C] and the pixels of pictures, each [1 3 H W], in the order of the pipeline, once.
        extra: as for a ControlNet, and the kind of each picture and sinusoids of 0 or 1 for each kind [1 K]."""
        rows, branches, kinds, flags = extra
        addition = None if rows is None else self.table(rows)
        context = self.model.context(self.table(texts))
        seen = [self.embedded(picture, context) for picture in pictures]
        numbers = ops.placed(kinds)
        embedding = self.model.control_add_embedding(self.table(flags))
        return Condition(context, addition, seen[0], len(texts), branches, seen, numbers, embedding)

    @ops.computes
    def predict(
        self, x: Array, step: NumpyArray, condition: Condition, scales: tuple[Sequence[float], Sequence[float]]
    ) -> Changes:
        """Return the changes, as of a ControlNet. scales: of the pictures, and of the changes."""
        of_pictures, of_changes = scales
        picture = self.model.together(condition.pictures, condition.kinds, of_pictures)
        return self.changes(x, step, condition, picture, of_changes, condition.embedding)
