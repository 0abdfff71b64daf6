# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""A ControlNet for Stable Diffusion. What is unusual about it: `qwenimg.common.networks.denoisers.unet_controlnet`.

B batch, S text tokens, C channels, h w latents, H W pixels. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.denoisers.unet import Changes, Context, UNetHalf, contexts
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.backends.mlx.ops import images
from qwenimg.common.networks.denoisers.unet_controlnet import UNetControlNetConfig
from qwenimg.common.runtime.engine import NumpyArray

Config = TypeVar("Config", bound=UNetControlNetConfig)
Model = TypeVar("Model", bound="UNetControlNet")


class PictureEmbedding(mlx.nn.Module):
    def __init__(self, config: UNetControlNetConfig):
        super().__init__()
        widths = config.conditioning_embedding_out_channels
        self.conv_in = ops.Conv2d(config.conditioning_channels, widths[0], 3, padding=1)
        blocks = []
        for inputs, outputs in pairwise(widths):
            blocks.append(ops.Conv2d(inputs, inputs, 3, padding=1))
            blocks.append(ops.Conv2d(inputs, outputs, 3, 2, padding=1))
        self.blocks = blocks
        self.conv_out = ops.Conv2d(widths[-1], config.block_out_channels[0], 3, padding=1)

    def __call__(self, picture: Array) -> Array:
        """[1 3 H W] -> [1 C h w]."""
        x = ops.silu(self.conv_in(picture))
        for block in self.blocks:
            x = ops.silu(block(x))
        return self.conv_out(x)


class UNetControlNet(UNetHalf):
    def __init__(self, config: UNetControlNetConfig, stream: mx.Dtype):
        super().__init__(config, stream)
        self.controlnet_cond_embedding = PictureEmbedding(config)
        linears = [ops.Conv2d(width, width, 1) for width, _ in config.skips]
        self.controlnet_down_blocks = linears
        width = config.block_out_channels[-1]
        self.controlnet_mid_block = ops.Conv2d(width, width, 1)

    def context(self, text: Array) -> list[Context]:
        """Return keys and values of the text states [B S in] in every block; the same in every step."""
        return contexts([*self.down_blocks, self.mid_block], text)

    def picture(self, pixels: Array) -> Array:
        """Embed the pixels of a picture [1 3 H W]: [1 C h w]; the same in every step."""
        return ops.stream(self.controlnet_cond_embedding(pixels), self.stream)

    def __call__(
        self,
        latents: Array,
        features: Array,
        picture: Array,
        context: list[Context],
        addition: Array | None = None,
        kinds: Array | None = None,
    ) -> Changes:
        """Return the changes for latents [B h w in], sinusoids of the time [1 or B, C] and an embedded picture
        [1 C h w]. context, addition: as for the UNet; kinds [1 E]: the embedding of a union's kinds."""
        temb = self.time(features, addition, kinds)
        keys, _ = context[-1][0][0]
        x = ops.stream(self.conv_in(images.laid_out(latents, keys.dtype)), self.stream)
        x, states = self.down(ops.add(x, picture), temb, context)
        mid = self.controlnet_mid_block(self.mid_block(x, temb, context[-1]))
        layers = iter(self.controlnet_down_blocks)
        down = [[next(layers)(state) for state in level] for level in states]
        return Changes(down, ops.async_eval(mid), [])


# Runner


@dataclass(frozen=True)
class Condition:
    context: list[Context]
    addition: Array | None
    picture: Array  # [1 C h w]
    controlled: int  # branches of the UNet, the first ones
    branches: int


class ControlRunner(LoadedNetwork[Config, Model]):
    """The parts that the runners of ControlNets share."""

    def embedded(self, picture: Array, context: list[Context]) -> Array:
        """Embed the pixels of a picture [1 3 H W], in the order of the pipeline: [1 C h w]."""
        keys, _ = context[-1][0][0]
        return self.model.picture(images.laid_out(images.from_bchw(picture), keys.dtype))

    def changes(
        self,
        x: Array,
        step: NumpyArray,
        condition: Condition,
        picture: Array,
        scales: Sequence[float],
        kinds: Array | None = None,
    ) -> Changes:
        """Return the scaled changes under an embedded picture [1 C h w]."""
        latents = ops.repeated(x[:, : self.config.in_channels], condition.controlled)
        features = self.table(step)
        more = (condition.context, condition.addition, kinds)
        made = self.model(images.from_bchw(latents), features, picture, *more)
        sizes, count = iter(scales), condition.branches
        down = [[self.scaled(change, next(sizes), count) for change in level] for level in made.down]
        assert made.mid is not None
        return Changes(down, self.scaled(made.mid, next(sizes), count), [])

    def scaled(self, change: Array, scale: float, branches: int) -> Array:
        """Return a change [N h w C] times `scale`, of each channel the mean if the network has it so, and zeros for
        the rest of the branches."""
        change = ops.channel_means(change) if self.config.global_pool_conditions else change
        return ops.with_zeros(change if scale == 1 else change * scale, branches)


class Runner(ControlRunner[UNetControlNetConfig, UNetControlNet]):
    network, role = UNetControlNet, "transformer"

    @ops.computes
    def condition(self, texts: NumpyArray, extra: tuple[NumpyArray | None, int], picture: Array) -> Condition:
        """Prepare text states [N S C] and the pixels of a picture [1 3 H W], in the order of the pipeline, once. extra:
        pooled text and sinusoids of the sizes [N A], and B, the branches of the UNet: those after the first N get no
        changes."""
        rows, branches = extra
        addition = None if rows is None else self.table(rows)
        context = self.model.context(self.table(texts))
        return Condition(context, addition, self.embedded(picture, context), len(texts), branches)

    @ops.computes
    def predict(self, x: Array, step: NumpyArray, condition: Condition, scales: Sequence[float]) -> Changes:
        """Return the changes for x [1 C h w] and sinusoids of the time, in the order of the pipeline. scales: one for
        each change, the mid block's last."""
        return self.changes(x, step, condition, condition.picture, scales)
