"""Stable Diffusion 3's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.sd3_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D. Attribute paths are keys of the manifest.
Modulation rows come ready from `modulation`, since they depend on the timestep and the pooled text alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch import load, ops
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import (
    Attention,
    FeedForward,
    FinalNorm,
    TimestepEmbedding,
)
from qwenimg.backends.torch.networks.loaded import LoadedNetwork
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.denoisers import sd3_conditioning
from qwenimg.common.networks.denoisers.sd3_dit import (
    MLP_RATIO,
    NORM_EPS,
    PATCH,
    TABLE,
    TIME_CHANNELS,
    SD3Config,
    chunks,
)
from qwenimg.common.runtime.engine import NumpyArray

Pair = tuple[Tensor, Tensor]
# Layers


class PatchEmbed(torch.nn.Module):
    def __init__(self, config: SD3Config):
        super().__init__()
        self.proj = ops.Conv2d(config.in_channels, config.dim, PATCH, PATCH)
        self.pos_embed = ops.Embedding(config.pos_embed_max_size**2, config.dim)

    def forward(self, x: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens [B L C] of an image [B in h w], with their positions [1 L C] added, in `dtype`."""
        return ops.add(ops.stream(images.token_rows(self.proj(x)), dtype), positions)


class TimeTextEmbed(torch.nn.Module):
    def __init__(self, config: SD3Config):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(TIME_CHANNELS, config.dim)
        self.text_embedder = TimestepEmbedding(config.pooled_projection_dim, config.dim)

    def forward(self, features: Tensor, pooled: Tensor) -> Tensor:
        """Embed sinusoids of times [T 256] together with a pooled text [1 P]: [T C]."""
        return ops.add(self.timestep_embedder(features), self.text_embedder(pooled))


class BlockNorm(torch.nn.Module):
    """The linear layer of a stream's modulation; its norm has no weights."""

    def __init__(self, dim: int, count: int):
        super().__init__()
        self.linear = ops.Linear(dim, count * dim)


def head_norm(config: SD3Config) -> torch.nn.Module:
    """Return the norm of queries and keys: SD 3 has none."""
    return ops.RMSNorm(config.attention_head_dim, NORM_EPS) if config.qk_norm else torch.nn.Identity()


class SelfAttention(Attention):
    """Attention over image tokens alone."""

    def __init__(self, config: SD3Config):
        super().__init__(config.dim, config.attention_head_dim, partial(head_norm, config))

    def forward(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L C]."""
        return self.to_out[0](self.attend(self.queries(x), self.keys(x), self.values(x)))


class JointAttention(SelfAttention):
    def __init__(self, config: SD3Config, last: bool):
        super().__init__(config)
        dim = config.dim
        self.add_q_proj = ops.Linear(dim, dim)
        self.add_k_proj = ops.Linear(dim, dim)
        self.add_v_proj = ops.Linear(dim, dim)
        self.norm_added_q = head_norm(config)
        self.norm_added_k = head_norm(config)
        self.to_add_out = torch.nn.Identity() if last else ops.Linear(dim, dim)

    def both(self, img: Tensor, txt: Tensor) -> Pair:
        """Attend over both streams, img [B L C] and txt [B S C], and keep their shapes. The image comes first in the
        joint sequence."""
        v = self.attend.values(self.heads(ops.joined_linears(self.to_v, img, self.add_v_proj, txt)))
        img_q, txt_q = self.queries(img), self.norm_added_q(self.heads(self.add_q_proj(txt)))
        img_k, txt_k = self.keys(img), self.norm_added_k(self.heads(self.add_k_proj(txt)))

        q, k = ops.joined(img_q, txt_q, v.dtype), ops.joined(img_k, txt_k, v.dtype)
        out = self.attend(q, k, v, text_last=True)

        L = img.shape[1]
        return self.to_out[0](out[:, :L]), self.to_add_out(out[:, L:])


class TransformerBlock(torch.nn.Module):
    def __init__(self, config: SD3Config, layer: int):
        super().__init__()
        dim, (image, text) = config.dim, chunks(config, layer)
        self.is_dual, self.is_last = layer in config.dual_attention_layers, layer == config.num_layers - 1
        self.counts = image, text
        self.norm1 = BlockNorm(dim, image)
        self.norm1_context = BlockNorm(dim, text)
        self.attn = JointAttention(config, self.is_last)
        if self.is_dual:
            self.attn2 = SelfAttention(config)
        self.ff = FeedForward(dim, MLP_RATIO * dim)
        if not self.is_last:
            self.ff_context = FeedForward(dim, MLP_RATIO * dim)

    def modulation(self, temb: Tensor) -> Pair:
        """Return the modulation of the image stream [T 6C or 9C] and of the text stream [T 6C or 2C] for [T C]."""
        temb = ops.silu(temb)
        return self.norm1.linear(temb), self.norm1_context.linear(temb)

    def forward(self, img: Tensor, txt: Tensor, mods: Pair) -> Pair:
        """Run the block on img [B L C] and txt [B S C] with one row of each modulation."""
        image, text = self.counts
        shift1, scale1, gate1, shift2, scale2, gate2, *second = ops.chunks(mods[0], image, None)
        rows = ops.chunks(mods[1], text, None)
        txt_shift1, txt_scale1 = (rows[1], rows[0]) if self.is_last else rows[:2]
        dtype = self.attn.to_q.dtype

        x = img
        img_out, txt_out = self.attn.both(
            ops.norm_modulate(x, shift1, scale1, dtype, NORM_EPS),
            ops.norm_modulate(txt, txt_shift1, txt_scale1, dtype, NORM_EPS),
        )
        img = ops.gated(img, gate1, img_out)
        if self.is_dual:
            shift3, scale3, gate3 = second
            img = ops.gated(img, gate3, self.attn2(ops.norm_modulate(x, shift3, scale3, dtype, NORM_EPS)))
        img = ops.gated(img, gate2, self.ff(ops.norm_modulate(img, shift2, scale2, dtype, NORM_EPS)))

        if not self.is_last:
            txt_gate1, txt_shift2, txt_scale2, txt_gate2 = rows[2:]
            txt = ops.gated(txt, txt_gate1, txt_out)
            y = self.ff_context(ops.norm_modulate(txt, txt_shift2, txt_scale2, dtype, NORM_EPS))
            txt = ops.gated(txt, txt_gate2, y)
        return img, txt


# Model


class SD3Transformer(torch.nn.Module):
    def __init__(self, config: SD3Config, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.tokens = ops.Tokens()
        self.pos_embed = PatchEmbed(config)
        self.time_text_embed = TimeTextEmbed(config)
        self.context_embedder = ops.Linear(config.joint_attention_dim, config.dim)
        layers = range(config.num_layers)
        self.transformer_blocks = torch.nn.ModuleList([TransformerBlock(config, layer) for layer in layers])
        self.norm_out = FinalNorm(config.dim, NORM_EPS)
        self.proj_out = ops.Linear(config.dim, config.out_features)

    def context(self, text: Tensor) -> Tensor:
        """Return the start of the text stream [B S C] for text states [B S 4096]; the same in every step."""
        return ops.stream(self.context_embedder(text), self.stream)

    def forward(
        self,
        latents: Tensor,
        txt: Tensor,
        positions: Tensor,
        block_mods: list[Pair],
        final_mod: Tensor,
        skipped: tuple[int, ...] = (),
    ) -> Tensor:
        """Predict the velocity [B out h w] for latents [B in h w] and the text stream [B S C].

        positions [1 L C]; block_mods: per block one row of each modulation; final_mod [1 2C]; skipped: the numbers of
        blocks that are left out.
        """
        img = self.tokens.part(self.pos_embed(latents, positions, self.stream))
        for layer, (block, mods) in enumerate(zip(self.transformer_blocks, block_mods, strict=True)):
            if layer not in skipped:
                img, txt = block(img, txt, mods)
                ops.async_eval(img)
        img = self.tokens.gathered(img)
        tokens = self.proj_out(self.norm_out(img, final_mod, self.proj_out.dtype))
        return images.joined_patches(tokens, latents, PATCH)


# Runner


@dataclass(frozen=True)
class Condition:
    txt: Tensor
    positions: Tensor
    skipped: tuple[int, ...]  # blocks that are left out


@dataclass(frozen=True)
class Modulation:
    """The rows of a schedule's steps, for one pooled text after the other."""

    blocks: list[Pair]  # per block: image [T, 6C or 9C], text [T, 6C or 2C]
    final: Tensor  # [T, 2C]

    def at(self, row: int) -> tuple[list[Pair], Tensor]:
        one = slice(row, row + 1)
        return [(img[one], txt[one]) for img, txt in self.blocks], self.final[one]


class Runner(LoadedNetwork[SD3Config, SD3Transformer]):
    network, role = SD3Transformer, "transformer"

    @ops.computes
    def modulate(self, features: NumpyArray, pooled: Sequence[NumpyArray]) -> Modulation:
        """Return the rows of every block for sinusoids of times [T 256] and each of `pooled`, texts [1 P]. Each block's
        weights are read, used and freed in turn."""
        times, *texts = (self.table(values) for values in (features, *pooled))
        embed = self.model.time_text_embed
        briefly = partial(load.briefly, self.model, self.plan, self.device)
        temb = briefly("time_text_embed.", lambda: torch.cat([embed(times, text) for text in texts], dim=0))
        count = len(pooled)
        final = briefly("norm_out.", lambda: ops.apart(self.model.norm_out.modulation, temb, count))
        layers: Iterable[Any] = self.model.transformer_blocks
        blocks = [
            briefly(f"transformer_blocks.{i}.", partial(ops.apart, block.modulation, temb, count))
            for i, block in enumerate(layers)
        ]
        return Modulation(blocks, final)

    @ops.computes
    def condition(self, text: NumpyArray, grid: tuple[int, int], skip_layers: tuple[int, ...] = ()) -> Condition:
        """Prepare text states [1 S 4096] for an image of `grid` rows and columns of tokens. `skip_layers`: the numbers
        of blocks that are left out."""
        states = self.table(text)
        return Condition(ops.eval(self.model.context(states)), self._positions(grid), skip_layers)

    @ops.computes
    def predict(self, x: Tensor, step: tuple[Modulation, int], condition: Condition) -> Tensor:
        """Predict the velocity [1 C h w] in float32 for x [1 C h w], both in the order of the pipeline, at a row of the
        modulation."""
        modulation, row = step
        mods, final = modulation.at(row)
        latents = images.from_bchw(x)
        velocity = self.model(latents, condition.txt, condition.positions, mods, final, condition.skipped)
        return images.to_bchw(ops.at_least_float32(velocity))

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """Return the positions [1 L C] of an image, from the file's table or by its formula."""
        ids = sd3_conditioning.window(self.config, *grid)
        if TABLE in self.plan.entries:
            return ops.eval(self.model.pos_embed.pos_embed(ops.placed(ids, self.device)))
        return self.table(sd3_conditioning.positions(self.config, ids))
