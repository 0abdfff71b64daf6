"""Stable Cascade's UNets. What is unusual about them: `qwenimg.common.networks.denoisers.cascade_unet`.

B batch, L image tokens, S tokens of the condition, H heads, D head dim, C channels, T channels of a time's row.
Attribute paths are checkpoint keys. The stream is tokens, and `plane` [h w] has their sides. Keys and values of the
condition come ready from `context`, since they depend on no step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.denoisers import diffusion_transformer
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import Pair, kept, with_known
from qwenimg.backends.torch.networks.loaded import ImageDenoiser
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.denoisers.cascade_unet import NORM_EPS, WIDER, CascadeConfig, Level

# Keys and values of the condition for each block of a level; None for a block without attention
Context = list[Pair | None]

# Layers


class ResBlock(torch.nn.Module):
    def __init__(self, config: CascadeConfig, width: int, skip: int):
        super().__init__()
        side = config.kernel_size
        self.depthwise = ops.Conv2d(width, width, side, padding=side // 2, groups=width)
        layers = [
            ops.Linear(width + skip, WIDER * width),
            torch.nn.Identity(),
            ops.ResponseNorm(WIDER * width, NORM_EPS),
        ]
        layers += [torch.nn.Identity(), ops.Linear(WIDER * width, width)]
        self.channelwise = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor, plane: Tensor, skip: Tensor | None = None) -> Tensor:
        """Run the block on x [B L C]; `skip` [B L C']: of the level on the way down."""
        y = ops.unit_norm(images.tokens(self.depthwise(images.on_plane(x, plane))), NORM_EPS)
        y = y if skip is None else torch.cat((y, ops.at_least_float32(skip)), dim=-1)
        y = self.channelwise[2](ops.gelu_erf(self.channelwise[0](y)))
        return ops.residual(x, self.channelwise[4](y))


class TimestepBlock(torch.nn.Module):
    def __init__(self, config: CascadeConfig, width: int):
        super().__init__()
        self.mapper = ops.Linear(config.timestep_ratio_embedding_dim, 2 * width)
        self.more = config.timestep_conditioning_type
        for name in self.more:
            setattr(self, f"mapper_{name}", ops.Linear(config.timestep_ratio_embedding_dim, 2 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Scale and shift x [B L C] by the sinusoids [1 T] of the time and of further values."""
        first, *others = ops.chunks(time, 1 + len(self.more), None)
        rows = self.mapper(first)
        for name, other in zip(self.more, others, strict=True):
            rows = ops.add(rows, getattr(self, f"mapper_{name}")(other))
        width = x.shape[-1]
        return ops.modulated(x, rows[..., width:], rows[..., :width], x.dtype)


class Attention(diffusion_transformer.Attention):
    def pair(self, x: Tensor) -> Pair:
        """Return keys and values [B L H D] of [B L C]."""
        return self.keys(x), self.values(x)

    def forward(self, x: Tensor, context: Pair) -> Tensor:
        """Attend from x [B L C] to itself, and to keys and values [B S H D]: [B L C]."""
        k, v = with_known(self.attend, *self.pair(x), context)
        return self.to_out[0](self.attend(self.queries(x), k, v))


class AttnBlock(torch.nn.Module):
    def __init__(self, config: CascadeConfig, width: int, heads: int):
        super().__init__()
        self.attention = Attention(width, width // heads)
        self.kv_mapper = torch.nn.ModuleList([torch.nn.Identity(), ops.Linear(config.conditioning_dim, width)])

    def context(self, text: Tensor) -> Pair:
        """Return keys and values of the condition: [B S C'] -> [B S H D] each."""
        return kept(self.attention.attend, *self.attention.pair(self.kv_mapper[1](ops.silu(text))))

    def forward(self, x: Tensor, context: Pair) -> Tensor:
        """Run the block on x [B L C]."""
        return ops.residual(x, self.attention(ops.unit_norm(x, NORM_EPS), context))


def mapper(channels: int, width: int) -> Any:
    """Return the two layers by which an embedding or pixels enter."""
    first, second = ops.Linear(channels, WIDER * width), ops.Linear(WIDER * width, width)
    return torch.nn.ModuleList([first, torch.nn.Identity(), second])


def mapped(layers: Any, hidden: Tensor) -> Tensor:
    """Return the normed tokens [B L C] of what the first layer makes, [B L 4C]."""
    return ops.unit_norm(layers[2](ops.gelu_erf(hidden)), NORM_EPS)


def level_blocks(config: CascadeConfig, level: Level) -> Any:
    """Return the blocks of a level."""
    blocks: list[torch.nn.Module] = []
    for layer in range(level.layers):
        blocks += [ResBlock(config, level.width, 0 if layer else level.skip), TimestepBlock(config, level.width)]
        blocks += [AttnBlock(config, level.width, level.heads)] if level.heads else []
    return torch.nn.ModuleList(blocks)


def repeat_mappers(level: Level) -> Any:
    """Return the layers between the repetitions of a level."""
    return torch.nn.ModuleList([ops.Linear(level.width, level.width) for _ in range(level.repeats - 1)])


class SameSize(torch.nn.Module):
    """The layer between two levels of one size; it is `blocks` `place`."""

    def __init__(self, inputs: int, outputs: int, place: int):
        super().__init__()
        layer = ops.Linear(inputs, outputs)
        layers = [torch.nn.Identity(), layer] if place else [layer, torch.nn.Identity()]
        self.place = place
        self.blocks = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[self.place](x)


# Model


class CascadeUNet(torch.nn.Module):
    def __init__(self, config: CascadeConfig, stream: torch.dtype):
        super().__init__()
        self.config, self.stream = config, stream
        widths, cond, p = config.block_out_channels, config.conditioning_dim, config.patch_size
        if config.effnet_in_channels:
            self.effnet_mapper = mapper(config.effnet_in_channels, widths[0])
        if config.pixel_mapper_in_channels:
            self.pixels_mapper = mapper(config.pixel_mapper_in_channels, widths[0])
        self.clip_txt_pooled_mapper = ops.Linear(config.clip_text_pooled_in_channels, config.clip_seq * cond)
        if config.clip_text_in_channels and config.clip_image_in_channels:
            self.clip_txt_mapper = ops.Linear(config.clip_text_in_channels, cond)
            self.clip_img_mapper = ops.Linear(config.clip_image_in_channels, config.clip_seq * cond)
        first = ops.Linear(p * p * config.in_channels, widths[0])
        self.embedding = torch.nn.ModuleList([torch.nn.Identity(), first])
        self.down_blocks = torch.nn.ModuleList([level_blocks(config, level) for level in config.down])
        self.down_downscalers = torch.nn.ModuleList([self.downscaler(i) for i in range(len(widths))])
        self.down_repeat_mappers = torch.nn.ModuleList([repeat_mappers(level) for level in config.down])
        self.up_blocks = torch.nn.ModuleList([level_blocks(config, level) for level in config.up])
        self.up_upscalers = torch.nn.ModuleList([self.upscaler(i) for i in reversed(range(len(widths)))])
        self.up_repeat_mappers = torch.nn.ModuleList([repeat_mappers(level) for level in config.up])
        last = ops.Linear(widths[0], p * p * config.out_channels)
        self.clf = torch.nn.ModuleList([torch.nn.Identity(), last])

    def downscaler(self, level: int) -> Any:
        """Return the layers that lead to a level."""
        widths = self.config.block_out_channels
        if level == 0:
            return torch.nn.ModuleList([])
        sizes = widths[level - 1], widths[level]
        layer = SameSize(*sizes, 0) if self.config.one_size else ops.Conv2d(*sizes, 2, 2)
        return torch.nn.ModuleList([torch.nn.Identity(), layer])

    def upscaler(self, level: int) -> Any:
        """Return the layers that lead up from a level."""
        widths = self.config.block_out_channels
        if level == 0:
            return torch.nn.ModuleList([])
        sizes = widths[level], widths[level - 1]
        layer = SameSize(*sizes, 1) if self.config.one_size else ops.ConvTranspose2d(*sizes, 2, 2)
        return torch.nn.ModuleList([torch.nn.Identity(), layer])

    def condition(self, pooled: Tensor, text: Tensor | None) -> Tensor:
        """Return the normed tokens [1 S C] of a pooled vector [1 P], and of text states [1 S' C'] if it sees them, with
        those of no picture."""
        shape = (1, self.config.clip_seq, -1)
        tokens = self.clip_txt_pooled_mapper(pooled).reshape(*shape)
        if text is not None:
            picture = ops.contiguous(self.clip_img_mapper.bias).reshape(*shape)
            tokens = torch.cat((self.clip_txt_mapper(text), tokens, picture), dim=1)
        return ops.unit_norm(tokens, NORM_EPS)

    def context(self, pooled: Tensor, text: Tensor | None) -> list[Context]:
        """Return keys and values of the condition in each block of each level, down and up."""
        tokens = self.condition(pooled, text)
        levels: Any = [*self.down_blocks, *self.up_blocks]
        return [[b.context(tokens) if isinstance(b, AttnBlock) else None for b in blocks] for blocks in levels]

    def added(self, embedding: Tensor, height: int, width: int) -> Tensor:
        """Return what is added to the first tokens: the layers of an embedding [1 E h w], stretched to height x width,
        and those of black pixels: [1 L C]."""
        stretched = images.tokens(ops.stretched(embedding, height, width))
        tokens = mapped(self.effnet_mapper, self.effnet_mapper[0](stretched))
        if self.config.pixel_mapper_in_channels:
            tokens = ops.add(tokens, mapped(self.pixels_mapper, self.pixels_mapper[0].bias[None, None]))
        return tokens

    def run(
        self, level: Level, blocks: Any, between: Any, x: Tensor, plane: Tensor, time: Tensor, context: Context,
        skip: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Run the blocks of a level as often as it says on x [B L C]. skip: of the level on the way down."""
        for turn in range(level.repeats):
            x = x if turn == 0 else ops.stream(between[turn - 1](x), self.stream)
            for place, (block, pair) in enumerate(zip(blocks, context, strict=True)):
                if pair is not None:
                    x = block(x, pair)
                elif isinstance(block, TimestepBlock):
                    x = block(x, time)
                else:
                    x = block(x, plane) if skip is None or place else block(x, plane, skip)
                x = ops.async_eval(x)
        return x

    def scaled(self, layer: Any, x: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of the next level, and its plane."""
        y = ops.unit_norm(x, NORM_EPS)
        if self.config.one_size:
            return ops.stream(layer(y), self.stream), plane
        image = layer(images.on_plane(y, plane))
        return ops.stream(images.tokens(image), self.stream), images.plane(image)

    def forward(self, latents: Tensor, time: Tensor, context: list[Context], added: Tensor | None = None) -> Tensor:
        """Predict the noise [B C h w] of latents [B C h w] for the sinusoids [1 T] of the time.

        context: from `self.context`; added [1 L C]: from `self.added`.
        """
        p, config = self.config.patch_size, self.config
        patches = images.patches(latents, p) if p > 1 else latents
        x = ops.unit_norm(self.embedding[1](images.tokens(patches)), NORM_EPS)
        x = ops.stream(x if added is None else ops.add(x, added), self.stream)
        plane, states = images.plane(patches), list[tuple[Tensor, Tensor]]()
        downscalers: Any = self.down_downscalers
        upscalers: Any = self.up_upscalers
        for i, level in enumerate(config.down):
            if i:
                x, plane = self.scaled(downscalers[i][1], x, plane)
            x = self.run(level, self.down_blocks[i], self.down_repeat_mappers[i], x, plane, time, context[i], None)
            states.append((x, plane))
        x, plane = states.pop()
        for i, level in enumerate(config.up):
            skip = None
            if i:
                x, below = self.scaled(upscalers[i - 1][1], x, plane)
                skip, plane = states.pop()
                if below.shape != plane.shape:
                    image = ops.stretched(images.on_plane(x, below), *plane.shape)
                    x = ops.stream(images.tokens(image), self.stream)
            pairs = context[len(config.down) + i]
            x = self.run(level, self.up_blocks[i], self.up_repeat_mappers[i], x, plane, time, pairs, skip)
        image = images.on_plane(self.clf[1](ops.unit_norm(x, NORM_EPS)), plane)
        return images.unpatched(image, p) if p > 1 else image


# Runner


class Runner(ImageDenoiser[CascadeConfig, CascadeUNet]):
    network, role = CascadeUNet, "transformer"

    @ops.computes
    def condition(
        self,
        pooled: Tensor,
        text: Tensor | None = None,
        embedding: Tensor | None = None,
        grid: tuple[int, int] = (0, 0),
    ) -> tuple[list[Context], Tensor | None]:
        """Prepare the pooled vector [1 P] of a text, and for the prior its states [1 S C]; for the decoder the
        embedding [1 E h w] of the image, in the order of the pipeline, for `grid` rows and columns of tokens."""
        added = None if embedding is None else self.model.added(images.from_bchw(embedding), *grid)
        context = ops.eval(self.model.context(pooled, text))
        return context, added if added is None else ops.eval(added)
