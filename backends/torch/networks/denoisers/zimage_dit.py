"""Z-Image's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.zimage_dit`.

B batch, L image tokens, S text tokens, both with their pads, H heads, D head dim, C = H * D, T time channels. Attribute
paths are keys of the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import RotaryAttention
from qwenimg.backends.torch.networks.loaded import LoadedNetwork
from qwenimg.common.networks.denoisers import zimage_conditioning
from qwenimg.common.networks.denoisers.zimage_dit import (
    FINAL_EPS,
    QK_EPS,
    TIME_CHANNELS,
    TIME_WIDTH,
    BlockSizes,
    ZImageConfig,
)
from qwenimg.common.runtime.engine import NumpyArray

Changes: TypeAlias = Iterable[Sequence[Tensor]]
"""What a control network adds to the stream behind each block: one change [1 L C] or none."""


class PictureControl(Protocol):
    """A control network with its picture, for one evaluation."""

    def refined(self, img: Tensor, temb: Tensor, rope: Tensor) -> tuple[Tensor, Changes]:
        """Return its own stream [1 L C], and its changes behind each refiner block, for the start of the image stream
        [1 L C]."""
        ...

    def changes(self, own: Tensor, x: Tensor, txt: Tensor, temb: Tensor, rope: Tensor, blocks: int) -> Changes:
        """Return its changes behind each of `blocks` blocks, for its `own` stream [1 L C], the stream x [1 L+S C]
        before the first of them, and the text [1 S C]."""
        ...


# Layers


class TimestepEmbedder(torch.nn.Module):
    def __init__(self, config: ZImageConfig):
        super().__init__()
        first, second = ops.Linear(TIME_CHANNELS, TIME_WIDTH), ops.Linear(TIME_WIDTH, config.time_dim)
        self.mlp = torch.nn.ModuleList([first, torch.nn.Identity(), second])

    def forward(self, features: Tensor) -> Tensor:
        """[B 256] -> [B T]."""
        return self.mlp[2](ops.silu(self.mlp[0](features)))


class FeedForward(torch.nn.Module):
    def __init__(self, config: BlockSizes):
        super().__init__()
        self.w1 = ops.Linear(config.dim, config.hidden, bias=False)
        self.w2 = ops.Linear(config.hidden, config.dim, bias=False)
        self.w3 = ops.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(ops.swiglu(self.w1(x), self.w3(x)))


class BlockLayers(torch.nn.Module):
    """The layers that blocks with and without modulation share."""

    def __init__(self, config: BlockSizes):
        super().__init__()
        self.attention = RotaryAttention(config.dim, config.head_dim, QK_EPS, bias=False, kv_dim=config.kv_dim)
        self.feed_forward = FeedForward(config)
        self.attention_norm1 = ops.RMSNorm(config.dim, config.norm_eps)
        self.attention_norm2 = ops.RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm1 = ops.RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm2 = ops.RMSNorm(config.dim, config.norm_eps)


class ContextBlock(BlockLayers):
    """A block without modulation, for text alone."""

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """[B S C] -> [B S C]."""
        x = ops.add(x, self.attention_norm2(self.attention(self.attention_norm1(x), rope, text_last=True)))
        return ops.add(x, self.ffn_norm2(self.feed_forward(self.ffn_norm1(x))))


class ModulatedBlock(BlockLayers):
    """A block with modulation, in the transformer and in its control networks."""

    def __init__(self, config: BlockSizes):
        super().__init__(config)
        self.adaLN_modulation = torch.nn.ModuleList([ops.Linear(config.time_dim, 4 * config.dim)])

    def updated(self, x: Tensor, temb: Tensor, rope: Tensor) -> Tensor:
        """Return x [B L C] behind the block, with the time's embedding [1 T]."""
        scale1, gate1, scale2, gate2 = ops.chunks(self.adaLN_modulation[0](temb), 4, None)
        dtype = self.attention.to_q.dtype

        update = self.attention(ops.scaled(self.attention_norm1(x), scale1, dtype), rope, text_last=True)
        x = ops.gated(x, ops.tanh(gate1), self.attention_norm2(update))

        update = self.feed_forward(ops.scaled(self.ffn_norm1(x), scale2, dtype))
        return ops.gated(x, ops.tanh(gate2), self.ffn_norm2(update))


class TransformerBlock(ModulatedBlock):
    def forward(self, x: Tensor, temb: Tensor, rope: Tensor, *changes: Tensor) -> Tensor:
        """Run the block on x [B L C] with the time's embedding [1 T]. changes [1 L C]: added behind it."""
        x = self.updated(x, temb, rope)
        for change in changes:
            x = ops.add(x, change)
        return x


class FinalLayer(torch.nn.Module):
    def __init__(self, config: BlockSizes, features: int):
        super().__init__()
        self.adaLN_modulation = torch.nn.ModuleList([torch.nn.Identity(), ops.Linear(config.time_dim, config.dim)])
        self.linear = ops.Linear(config.dim, features)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        """[B L C] -> [B L out]."""
        [scale] = ops.chunks(self.adaLN_modulation[1](ops.silu(temb)), 1, None)
        return self.linear(ops.scaled(ops.unit_norm(x, FINAL_EPS), scale, self.linear.dtype))


# Model


class ZImageTransformer(torch.nn.Module):
    def __init__(self, config: ZImageConfig, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.tokens = ops.Tokens()
        self.t_embedder = TimestepEmbedder(config)
        self.x_embedder = ops.Linear(config.features, config.dim)
        text_norm, text_in = (
            ops.RMSNorm(config.cap_feat_dim, config.norm_eps),
            ops.Linear(config.cap_feat_dim, config.dim),
        )
        self.cap_embedder = torch.nn.ModuleList([text_norm, text_in])
        self.x_pad_token = ops.Embedding(1, config.dim)
        self.cap_pad_token = ops.Embedding(1, config.dim)
        self.noise_refiner = torch.nn.ModuleList([TransformerBlock(config) for _ in range(config.n_refiner_layers)])
        self.context_refiner = torch.nn.ModuleList([ContextBlock(config) for _ in range(config.n_refiner_layers)])
        self.layers = torch.nn.ModuleList([TransformerBlock(config) for _ in range(config.n_layers)])
        self.final_layer = FinalLayer(config, config.features)

    def context(self, text: Tensor, pads: Tensor, rope: Tensor) -> Tensor:
        """Return the refined text [1 S C] for text states [1 S' 2560] and zeros [1 S-S'], the ids of pads; the same in
        every step."""
        x = ops.joined(self.cap_embedder[1](self.cap_embedder[0](text)), self.cap_pad_token(pads), self.stream)
        for block in self.context_refiner:
            x = block(x, rope)
        return x

    def forward(
        self,
        latents: Tensor,
        features: Tensor,
        txt: Tensor,
        pads: Tensor,
        img_rope: Tensor,
        rope: Tensor,
        control: Sequence[PictureControl] = (),
    ) -> Tensor:
        """Predict the negative velocity [1 L' out] for packed latents [1 L' in] and the sinusoid [1 256] of the time.

        txt [1 S C]: the refined text; pads [1 L-L']: zeros, the ids of pads; img_rope [L 1 D/2 2], rope [L+S 1 D/2 2].
        """
        temb = self.t_embedder(features)
        img = self.tokens.part(ops.joined(self.x_embedder(latents), self.x_pad_token(pads), self.stream))
        refined = [one.refined(img, temb, img_rope) for one in control]
        for block, *changes in zip(self.noise_refiner, *(behind for _, behind in refined), strict=True):
            img = block(img, temb, img_rope, *chain.from_iterable(changes))
        x = ops.joined(img, txt, self.stream)
        rows = [
            one.changes(own, x, txt, temb, rope, len(self.layers))
            for one, (own, _) in zip(control, refined, strict=True)
        ]
        for block, *changes in zip(self.layers, *rows, strict=True):
            x = ops.async_eval(block(x, temb, rope, *chain.from_iterable(changes)))
        img = self.tokens.gathered(x[:, : img.shape[1]])
        return self.final_layer(img[:, : latents.shape[1]], temb)


# Runner


@dataclass(frozen=True)
class Condition:
    txt: Tensor
    pads: Tensor  # zeros, the ids of the image's pads
    img_rope: Tensor
    rope: Tensor


class Runner(LoadedNetwork[ZImageConfig, ZImageTransformer]):
    network, role = ZImageTransformer, "transformer"

    @ops.computes
    def condition(self, text: Tensor, grid: tuple[int, int]) -> Condition:
        """Prepare text states [1 S' 2560] for an image of `grid` rows and columns of tokens."""
        length, tokens = text.shape[1], grid[0] * grid[1]
        tables = zimage_conditioning.image_and_text_rope(self.config, *grid, length)
        img, txt = map(self.rope, tables)
        img = self.model.tokens.rows(img)
        return Condition(
            txt=ops.eval(self.model.context(text, self._pads(length), txt)),
            pads=self._pads(tokens),
            img_rope=img,
            rope=torch.cat((img, txt), dim=0),
        )

    @ops.computes
    def predict(
        self, x: Tensor, step: NumpyArray, condition: Condition, control: Sequence[PictureControl] | None = None
    ) -> Tensor:
        """Predict the negative velocity [1 L' C] in float32 for packed latents x [1 L' C] and sinusoids of the time."""
        features = self.table(step)
        fixed = condition.txt, condition.pads, condition.img_rope, condition.rope
        result = self.model(x, features, *fixed, *(() if control is None else (control,)))
        return ops.at_least_float32(result)

    def _pads(self, tokens: int) -> Tensor:
        """Return zeros [1 pads], one for each pad of `tokens` tokens."""
        return ops.placed(np.zeros((1, zimage_conditioning.padded(tokens) - tokens), np.int32), self.device)
