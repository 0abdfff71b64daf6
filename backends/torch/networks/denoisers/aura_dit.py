"""AuraFlow's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.aura_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D. Attribute paths are keys of the manifest.
Modulation rows come ready from `modulation`, since they depend on the timestep alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwenimg.backends.torch import load, ops
from qwenimg.backends.torch.networks.denoisers import diffusion_transformer
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import Pair, TimestepEmbedding
from qwenimg.backends.torch.networks.loaded import LoadedNetwork
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks.denoisers import aura_conditioning
from qwenimg.common.networks.denoisers.aura_dit import NORM_EPS, PATCH, REGISTERS, TIME_CHANNELS, AuraConfig
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class PatchEmbed(torch.nn.Module):
    def __init__(self, config: AuraConfig):
        super().__init__()
        self.proj = ops.Linear(config.features, config.dim)
        self.pos_embed = ops.Embedding(config.pos_embed_max_size, config.dim)

    def forward(self, x: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens [B L C] of an image [B in h w], with their positions [1 L C] added, in `dtype`."""
        return ops.add(ops.stream(self.proj(images.tokens(images.patches(x, PATCH))), dtype), positions)


class BlockModulation(torch.nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.linear = ops.Linear(dim, 6 * dim, bias=False)


class FinalModulation(torch.nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.linear = ops.Linear(dim, 2 * dim, bias=False)

    def modulation(self, temb: Tensor) -> Tensor:
        """[T C] -> [T 2C]."""
        return self.linear(ops.silu(temb))

    def forward(self, x: Tensor, mod: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the modulated x [B L C], mod [1 2C], in `dtype`. Scale comes before shift here, and there is no
        norm."""
        scale, shift = ops.chunks(mod, 2, None)
        return ops.modulated(x, shift, scale, dtype)


class FeedForward(torch.nn.Module):
    def __init__(self, config: AuraConfig):
        super().__init__()
        self.linear_1 = ops.Linear(config.dim, config.hidden, bias=False)
        self.linear_2 = ops.Linear(config.dim, config.hidden, bias=False)
        self.out_projection = ops.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L C]."""
        return self.out_projection(ops.swiglu(self.linear_1(x), self.linear_2(x)))


class Attention(diffusion_transformer.Attention):
    """Attention over one stream."""

    def __init__(self, config: AuraConfig):
        super().__init__(config.dim, config.attention_head_dim, bias=False)

    def normed(self, x: Tensor) -> Tensor:
        """Return queries or keys with the norm of each head, in float32: [B L C] -> [B L H D]."""
        return ops.unit_norm(self.heads(x), NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L C]. Text comes first."""
        return self.to_out[0](self.attend(self.normed(self.to_q(x)), self.normed(self.to_k(x)), self.values(x)))


class JointAttention(Attention):
    """Attention over two streams with projections of their own."""

    def __init__(self, config: AuraConfig):
        super().__init__(config)
        dim = config.dim
        self.add_q_proj = ops.Linear(dim, dim, bias=False)
        self.add_k_proj = ops.Linear(dim, dim, bias=False)
        self.add_v_proj = ops.Linear(dim, dim, bias=False)
        self.to_add_out = ops.Linear(dim, dim, bias=False)

    def both(self, img: Tensor, txt: Tensor) -> Pair:
        """Attend over both streams, img [B L C] and txt [B S C], and keep their shapes. Text comes first in the joint
        sequence."""
        v = self.attend.values(self.heads(ops.joined_linears(self.add_v_proj, txt, self.to_v, img)))
        q = ops.joined(self.normed(self.add_q_proj(txt)), self.normed(self.to_q(img)), v.dtype)
        k = ops.joined(self.normed(self.add_k_proj(txt)), self.normed(self.to_k(img)), v.dtype)
        out = self.attend(q, k, v)
        S = txt.shape[1]
        return self.to_out[0](out[:, S:]), self.to_add_out(out[:, :S])


# Blocks


class JointBlock(torch.nn.Module):
    """A block with weights of its own for each stream."""

    def __init__(self, config: AuraConfig):
        super().__init__()
        self.norm1 = BlockModulation(config.dim)
        self.norm1_context = BlockModulation(config.dim)
        self.attn = JointAttention(config)
        self.ff = FeedForward(config)
        self.ff_context = FeedForward(config)

    def modulation(self, temb: Tensor) -> Pair:
        """Return the modulation [T 6C] of the image stream and of the text stream for [T C]."""
        temb = ops.silu(temb)
        return self.norm1.linear(temb), self.norm1_context.linear(temb)

    def forward(self, img: Tensor, txt: Tensor, mods: Pair) -> Pair:
        """Run the block on img [B L C] and txt [B S C], with mods ([1 6C], [1 6C])."""
        shift1, scale1, gate1, shift2, scale2, gate2 = ops.chunks(mods[0], 6, None)
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = ops.chunks(mods[1], 6, None)
        dtype = self.attn.to_q.dtype

        img_out, txt_out = self.attn.both(
            ops.norm_modulate(img, shift1, scale1, dtype, NORM_EPS),
            ops.norm_modulate(txt, txt_shift1, txt_scale1, dtype, NORM_EPS),
        )
        x = ops.norm_modulate(ops.gated(img, gate1, img_out), shift2, scale2, dtype, NORM_EPS)
        y = ops.norm_modulate(ops.gated(txt, txt_gate1, txt_out), txt_shift2, txt_scale2, dtype, NORM_EPS)
        return ops.gated(img, gate2, self.ff(x)), ops.gated(txt, txt_gate2, self.ff_context(y))


class SingleBlock(torch.nn.Module):
    """A block with the same weights for both streams."""

    def __init__(self, config: AuraConfig):
        super().__init__()
        self.norm1 = BlockModulation(config.dim)
        self.attn = Attention(config)
        self.ff = FeedForward(config)

    def modulation(self, temb: Tensor) -> Tensor:
        """[T C] -> [T 6C]."""
        return self.norm1.linear(ops.silu(temb))

    def forward(self, img: Tensor, txt: Tensor, mod: Tensor) -> Pair:
        """Run the block on img [B L C] and txt [B S C], with mod [1 6C]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = ops.chunks(mod, 6, None)
        dtype, S = self.attn.to_q.dtype, txt.shape[1]

        x = ops.joined(
            ops.norm_modulate(txt, shift1, scale1, dtype, NORM_EPS),
            ops.norm_modulate(img, shift1, scale1, dtype, NORM_EPS),
            dtype,
        )
        out = self.attn(x)
        x = ops.joined(
            ops.norm_modulate(ops.gated(txt, gate1, out[:, :S]), shift2, scale2, dtype, NORM_EPS),
            ops.norm_modulate(ops.gated(img, gate1, out[:, S:]), shift2, scale2, dtype, NORM_EPS),
            dtype,
        )
        update = self.ff(x)
        return ops.gated(img, gate2, update[:, S:]), ops.gated(txt, gate2, update[:, :S])


# Model


class AuraTransformer(torch.nn.Module):
    def __init__(self, config: AuraConfig, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.tokens = ops.Tokens()
        self.pos_embed = PatchEmbed(config)
        self.time_step_proj = TimestepEmbedding(TIME_CHANNELS, config.dim)
        self.context_embedder = ops.Linear(config.joint_attention_dim, config.dim, bias=False)
        self.register_tokens = ops.Embedding(REGISTERS, config.dim)
        joint, single = range(config.num_mmdit_layers), range(config.num_single_dit_layers)
        self.joint_transformer_blocks = torch.nn.ModuleList([JointBlock(config) for _ in joint])
        self.single_transformer_blocks = torch.nn.ModuleList([SingleBlock(config) for _ in single])
        self.norm_out = FinalModulation(config.dim)
        self.proj_out = ops.Linear(config.dim, config.out_features, bias=False)

    def context(self, text: Tensor, registers: Tensor) -> Tensor:
        """Return the start of the text stream [1 8+S C], registers first, for text states [1 S 2048] and the numbers
        [1 8] of the registers; the same in every step."""
        return ops.joined(self.register_tokens(registers), self.context_embedder(text), self.stream)

    def forward(
        self,
        latents: Tensor,
        txt: Tensor,
        positions: Tensor,
        joint_mods: list[Pair],
        single_mods: list[Tensor],
        final_mod: Tensor,
    ) -> Tensor:
        """Predict the velocity [B out h w] for latents [B in h w] and the text stream [B S C].

        positions [1 L C]; joint_mods: per block ([1 6C], [1 6C]); single_mods: per block [1 6C]; final_mod [1 2C].
        """
        img = self.tokens.part(self.pos_embed(latents, positions, self.stream))
        for block, mods in zip(self.joint_transformer_blocks, joint_mods, strict=True):
            img, txt = block(img, txt, mods)
            ops.async_eval(img)
        for block, mod in zip(self.single_transformer_blocks, single_mods, strict=True):
            img, txt = block(img, txt, mod)
            ops.async_eval(img)
        img = self.tokens.gathered(img)
        tokens = self.proj_out(self.norm_out(img, final_mod, self.proj_out.dtype))
        return images.joined_patches(tokens, latents, PATCH)


# Runner


@dataclass(frozen=True)
class Condition:
    txt: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Modulation:
    """The rows of a schedule's steps."""

    joint: list[Pair]  # per block: image [T, 6C], text [T, 6C]
    single: list[Tensor]  # per block [T, 6C]
    final: Tensor  # [T, 2C]

    def at(self, row: int) -> tuple[list[Pair], list[Tensor], Tensor]:
        one = slice(row, row + 1)
        return [(img[one], txt[one]) for img, txt in self.joint], [mod[one] for mod in self.single], self.final[one]


class Runner(LoadedNetwork[AuraConfig, AuraTransformer]):
    network, role = AuraTransformer, "transformer"

    @ops.computes
    def modulate(self, features: NumpyArray) -> Modulation:
        """Return the rows of every block and of the head for sinusoids of times [T 256]. Each block's weights are read,
        used and freed in turn."""
        times = self.table(features)
        briefly = partial(load.briefly, self.model, self.plan, self.device)
        temb = briefly("time_step_proj.", lambda: self.model.time_step_proj(times))
        final = briefly("norm_out.", lambda: self.model.norm_out.modulation(temb))
        kinds: dict[str, Iterable[Any]] = {
            "joint_transformer_blocks": self.model.joint_transformer_blocks,
            "single_transformer_blocks": self.model.single_transformer_blocks,
        }
        joint, single = (
            [briefly(f"{path}.{i}.", partial(block.modulation, temb)) for i, block in enumerate(blocks)]
            for path, blocks in kinds.items()
        )
        return Modulation(joint, single, final)

    @ops.computes
    def condition(self, text: Tensor, grid: tuple[int, int]) -> Condition:
        """Prepare text states [1 S 2048] for an image of `grid` rows and columns of tokens."""
        registers = ops.placed(np.arange(REGISTERS)[None], self.device)
        positions = ops.placed(aura_conditioning.window(self.config, *grid), self.device)
        txt = self.model.context(text, registers)
        return Condition(ops.eval(txt), ops.eval(self.model.pos_embed.pos_embed(positions)))

    @ops.computes
    def predict(self, x: Tensor, step: tuple[Modulation, int], condition: Condition) -> Tensor:
        """Predict the velocity [1 C h w] in float32 for x [1 C h w], both in the order of the pipeline, at a row of the
        modulation."""
        modulation, row = step
        latents = images.from_bchw(x)
        velocity = self.model(latents, condition.txt, condition.positions, *modulation.at(row))
        return images.to_bchw(ops.at_least_float32(velocity))
