"""Hunyuan-DiT's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.hunyuan_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D. Attribute paths are keys of the manifest.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.denoisers import diffusion_transformer
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import (
    FeedForward,
    FinalNorm,
    TimestepEmbedding,
    without_variance,
)
from qwenimg.backends.torch.networks.loaded import ImageDenoiser
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.denoisers import hunyuan_conditioning
from qwenimg.common.networks.denoisers.hunyuan_dit import (
    CONDITION_CHANNELS,
    NORM_EPS,
    PATCH,
    POOL_HEADS,
    QK_EPS,
    HunyuanConfig,
)
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class PatchEmbed(torch.nn.Module):
    def __init__(self, config: HunyuanConfig):
        super().__init__()
        self.proj = ops.Conv2d(config.in_channels, config.dim, PATCH, PATCH)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens [B L C] of latents [B in h w] in `dtype`."""
        return ops.stream(images.token_rows(self.proj(x)), dtype)


class Projection(torch.nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.linear_1 = ops.Linear(inputs, hidden)
        self.linear_2 = ops.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[... inputs] -> [... outputs]."""
        return self.linear_2(ops.silu(self.linear_1(x)))


class AttentionPool(torch.nn.Module):
    def __init__(self, config: HunyuanConfig):
        super().__init__()
        dim = config.cross_attention_dim_t5
        self.positional_embedding = ops.Embedding(config.text_len_t5 + 1, dim)
        self.q_proj = ops.Linear(dim, dim)
        self.k_proj = ops.Linear(dim, dim)
        self.v_proj = ops.Linear(dim, dim)
        self.c_proj = ops.Linear(dim, config.pooled_projection_dim)
        self.attend = ops.Attend()

    def heads(self, x: Tensor) -> Tensor:
        """[B S C] -> [B S H D]."""
        return x.reshape(*x.shape[:2], POOL_HEADS, -1)

    def forward(self, text: Tensor) -> Tensor:
        """Attend from the mean of the states to it and all of them: [1 S C] -> [1 P]."""
        x = ops.add(torch.cat((text.mean(dim=1)[:, None], text), dim=1), self.positional_embedding.weight)
        v = self.attend.values(self.heads(self.v_proj(x)))
        q, k = self.heads(self.q_proj(x[:, :1])), self.heads(self.k_proj(x))
        return self.c_proj(self.attend.result(ops.attention(q, k, v)))[:, 0]


class Embeddings(torch.nn.Module):
    def __init__(self, config: HunyuanConfig):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(CONDITION_CHANNELS, config.dim)
        self.pooler = AttentionPool(config)
        if config.sees_size:
            self.style_embedder = ops.Embedding(1, config.dim)
        self.extra_embedder = Projection(config.extra_dim, 4 * config.dim, config.dim)

    def extra(self, text: Tensor, sizes: Tensor | None) -> Tensor:
        """Embed T5's states [1 S C'], and the sinusoids [1 6*256] of sizes with the style: [1 C]."""
        vector = self.pooler(text)
        if sizes is not None:
            vector = torch.cat((vector, sizes, self.style_embedder.weight), dim=1)
        return self.extra_embedder(vector)


class ShiftedNorm(torch.nn.Module):
    def __init__(self, config: HunyuanConfig):
        super().__init__()
        self.norm = ops.LayerNorm(config.dim, NORM_EPS)
        self.linear = ops.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, mod: Tensor) -> Tensor:
        """Return the norm of x [B L C], shifted by a layer of mod [1 C]."""
        return ops.add(ops.at_least_float32(self.norm(x)), self.linear(mod)[:, None])


class Attention(diffusion_transformer.Attention):
    def __init__(self, config: HunyuanConfig, seen: int):
        """seen: the width of the tokens that it attends to."""
        head_dim = config.attention_head_dim
        super().__init__(config.dim, head_dim, partial(ops.LayerNorm, head_dim, QK_EPS), seen=seen)

    def rotated(self, x: Tensor, rope: Tensor, dtype: torch.dtype) -> Tensor:
        return ops.rotate_pairs(ops.at_least_float32(x), rope, dtype)

    def forward(self, x: Tensor, rope: Tensor, text: Tensor | None = None) -> Tensor:
        """Attend from x [B L C] to itself, or to the text [B S C']: [B L C]. Keys of the text are not rotated."""
        seen = x if text is None else text
        v, k = self.values(seen), self.keys(seen)
        q = self.rotated(self.queries(x), rope, v.dtype)
        k = self.rotated(k, rope, v.dtype) if text is None else k
        return self.to_out[0](self.attend(q, k, v))


class HunyuanBlock(torch.nn.Module):
    def __init__(self, config: HunyuanConfig, layer: int, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.norm1 = ShiftedNorm(config)
        self.attn1 = Attention(config, config.dim)
        self.norm2 = ops.LayerNorm(config.dim, NORM_EPS)
        self.attn2 = Attention(config, config.cross_attention_dim)
        self.norm3 = ops.LayerNorm(config.dim, NORM_EPS)
        self.ff = FeedForward(config.dim, config.inner)
        if config.takes_skip(layer):
            self.skip_norm = ops.LayerNorm(2 * config.dim, NORM_EPS)
            self.skip_linear = ops.Linear(2 * config.dim, config.dim)

    def forward(self, x: Tensor, mod: Tensor, text: Tensor, rope: Tensor, skip: Tensor | None = None) -> Tensor:
        """Run the block on x [B L C], in the second half joined with `skip`, the stream behind an earlier block.

        mod [1 C]: SiLU of what the time and the text are embedded to; text [B S C'].
        """
        if skip is not None:
            x = ops.stream(self.skip_linear(self.skip_norm(torch.cat((x, skip), dim=-1))), self.stream)
        x = ops.residual(x, self.attn1(self.norm1(x, mod), rope))
        x = ops.residual(x, self.attn2(self.norm2(x), rope, text))
        return ops.residual(x, self.ff(self.norm3(x)))


# Model


class HunyuanTransformer(torch.nn.Module):
    def __init__(self, config: HunyuanConfig, stream: torch.dtype):
        super().__init__()
        self.config, self.stream = config, stream
        self.pos_embed = PatchEmbed(config)
        self.time_extra_emb = Embeddings(config)
        t5 = config.cross_attention_dim_t5
        self.text_embedder = Projection(t5, 4 * t5, config.cross_attention_dim)
        self.text_embedding_padding = ops.Embedding(config.text_len + config.text_len_t5, config.cross_attention_dim)
        self.blocks = torch.nn.ModuleList([HunyuanBlock(config, i, stream) for i in range(config.num_layers)])
        self.norm_out = FinalNorm(config.dim, NORM_EPS)
        self.proj_out = ops.Linear(config.dim, 2 * PATCH**2 * config.in_channels)

    def text(self, bert: Tensor, t5: Tensor, words: int) -> Tensor:
        """Join BERT's states [1 S' C'], and the first `words` of T5's behind two layers, each with the learned rows of
        its padding behind it: [1 S C']."""
        rows, places = ops.stream(self.text_embedding_padding.weight, self.stream)[None], self.config.text_len
        states = ops.stream(bert, self.stream), ops.stream(self.text_embedder(t5[:, :words]), self.stream)
        return torch.cat((states[0], rows[:, bert.shape[1] : places], states[1], rows[:, places + words :]), dim=1)

    def forward(self, latents: Tensor, features: Tensor, extra: Tensor, text: Tensor, rope: Tensor) -> Tensor:
        """Predict v [B in h w] for latents [B in h w] and the sinusoids [1 256] of the time.

        extra [1 C]: what is added to the embedded time; text [B S C']; rope [L 1 D/2 2].
        """
        temb = ops.add(self.time_extra_emb.timestep_embedder(features), extra)
        mod = ops.silu(temb)
        x, skips = self.pos_embed(latents, self.stream), list[Tensor]()
        for layer, block in enumerate(self.blocks):
            if self.config.takes_skip(layer):
                x = ops.async_eval(block(x, mod, text, rope, skips.pop()))
            else:
                x = ops.async_eval(block(x, mod, text, rope))
            if self.config.gives_skip(layer):
                skips.append(x)
        x = self.proj_out(self.norm_out(x, self.norm_out.modulation(temb), self.proj_out.dtype))
        return images.joined_patches(without_variance(x, PATCH, self.config.in_channels), latents, PATCH)


# Runner


class Runner(ImageDenoiser[HunyuanConfig, HunyuanTransformer]):
    network, role = HunyuanTransformer, "transformer"

    @ops.computes
    def condition(
        self, bert: Tensor, t5: Tensor, words: int, grid: tuple[int, int], sizes: NumpyArray | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Prepare BERT's states [1 S' C'], and T5's [1 S C''] of which the first `words` are words, for an image of
        `grid` rows and columns of tokens; sizes [1 6*256]: sinusoids, for a model that sees them."""
        rope = self.rope(hunyuan_conditioning.rope(self.config, grid))
        given = None if sizes is None else self.table(sizes)
        extra = ops.eval(self.model.time_extra_emb.extra(t5, given))
        return extra, ops.eval(self.model.text(bert, t5, words)), rope
