"""PixArt's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.pixart_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D. Attribute paths are keys of the manifest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.denoisers import diffusion_transformer
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import (
    FeedForward,
    Pair,
    TextProjection,
    TimestepEmbedding,
    without_variance,
)
from qwenimg.backends.torch.networks.loaded import ImageDenoiser
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.denoisers import pixart_conditioning
from qwenimg.common.networks.denoisers.pixart_dit import (
    CONDITION_CHANNELS,
    HEAD_EPS,
    PATCH,
    PixArtConfig,
)
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class PatchEmbed(torch.nn.Module):
    def __init__(self, config: PixArtConfig):
        super().__init__()
        self.proj = ops.Conv2d(config.in_channels, config.dim, PATCH, PATCH)

    def forward(self, x: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens [B L C] of latents [B in h w], with their positions [1 L C] added, in `dtype`."""
        return ops.add(ops.stream(images.token_rows(self.proj(x)), dtype), positions)


class Embeddings(torch.nn.Module):
    def __init__(self, config: PixArtConfig):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(CONDITION_CHANNELS, config.dim)
        if config.sees_size:
            self.resolution_embedder = TimestepEmbedding(CONDITION_CHANNELS, config.dim // 3)
            self.aspect_ratio_embedder = TimestepEmbedding(CONDITION_CHANNELS, config.dim // 3)

    def sizes(self, features: Tensor) -> Tensor:
        """Embed the sinusoids [3 256] of height, width and their ratio: [1 C]."""
        both, ratio = self.resolution_embedder(features[:2]), self.aspect_ratio_embedder(features[2:])
        return torch.cat((both.reshape(1, -1), ratio), dim=-1)


class AdaLayerNormSingle(torch.nn.Module):
    def __init__(self, config: PixArtConfig):
        super().__init__()
        self.emb = Embeddings(config)
        self.linear = ops.Linear(config.dim, 6 * config.dim)

    def forward(self, features: Tensor, sizes: Tensor | None) -> Pair:
        """Return the modulation that all blocks share [1 6C], and the embedding that it is made of [1 C], for the
        sinusoids of the time [1 256] and the embedding of sizes [1 C]."""
        emb = self.emb.timestep_embedder(features)
        emb = emb if sizes is None else ops.add(emb, sizes)
        return self.linear(ops.silu(emb)), emb


class Attention(diffusion_transformer.Attention):
    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Attend from x [B L C] to the tokens that are `seen` [B S C]: [B L C]."""
        return self.to_out[0](self.attend(self.queries(x), self.keys(seen), self.values(seen)))


class TransformerBlock(torch.nn.Module):
    def __init__(self, config: PixArtConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.scale_shift_table = ops.Embedding(6, config.dim)
        self.attn1 = Attention(config.dim, config.attention_head_dim)
        self.attn2 = Attention(config.dim, config.attention_head_dim)
        self.ff = FeedForward(config.dim, config.hidden)

    def forward(self, x: Tensor, mod: Tensor, text: Tensor) -> Tensor:
        """Run the block on x [B L C]. mod [1 6C]: the modulation that all blocks share; text [B S C]."""
        rows = ops.add(mod, self.scale_shift_table.weight.reshape(1, -1))
        shift1, scale1, gate1, shift2, scale2, gate2 = ops.chunks(rows, 6, None)
        dtype = self.attn1.to_q.dtype
        y = ops.norm_modulate(x, shift1, scale1, dtype, self.eps)
        x = ops.gated(x, gate1, self.attn1(y, y))
        x = ops.residual(x, self.attn2(x, text))
        return ops.gated(x, gate2, self.ff(ops.norm_modulate(x, shift2, scale2, dtype, self.eps)))


# Model


class PixArtTransformer(torch.nn.Module):
    def __init__(self, config: PixArtConfig, stream: torch.dtype):
        super().__init__()
        self.stream, self.channels = stream, config.in_channels
        self.pos_embed = PatchEmbed(config)
        self.adaln_single = AdaLayerNormSingle(config)
        self.caption_projection = TextProjection(config.caption_channels, config.dim)
        self.transformer_blocks = torch.nn.ModuleList([TransformerBlock(config) for _ in range(config.num_layers)])
        self.scale_shift_table = ops.Embedding(2, config.dim)
        self.proj_out = ops.Linear(config.dim, PATCH**2 * config.outputs)

    def forward(
        self, latents: Tensor, features: Tensor, sizes: Tensor | None, text: Tensor, positions: Tensor
    ) -> Tensor:
        """Predict the noise [B in h w] for latents [B in h w] and the sinusoids [1 256] of the time.

        sizes [1 C]: their embedding; text [B S C]: projected; positions [1 L C].
        """
        mod, emb = self.adaln_single(features, sizes)
        x = self.pos_embed(latents, positions, self.stream)
        for block in self.transformer_blocks:
            x = ops.async_eval(block(x, mod, text))
        shift, scale = ops.chunks(ops.add(self.scale_shift_table.weight, emb).reshape(1, -1), 2, None)
        x = self.proj_out(ops.norm_modulate(x, shift, scale, self.proj_out.dtype, HEAD_EPS))
        return images.joined_patches(without_variance(x, PATCH, self.channels), latents, PATCH)


# Runner


class Runner(ImageDenoiser[PixArtConfig, PixArtTransformer]):
    network, role = PixArtTransformer, "transformer"

    @ops.computes
    def condition(
        self, text: Tensor, grid: tuple[int, int], sizes: NumpyArray | None = None
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Prepare text states [1 S 4096] for an image of `grid` rows and columns of tokens, with sinusoids [3 256] of
        its sizes for a model that sees them."""
        positions = self.table(pixart_conditioning.positions(self.config, grid))
        embedded = None if sizes is None else ops.eval(self.model.adaln_single.emb.sizes(self.table(sizes)))
        return embedded, ops.eval(self.model.caption_projection(text)), positions
