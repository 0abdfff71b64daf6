"""Krea 2's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.krea2_dit`.

B batch, L image tokens, S text tokens, N layers of the text encoder, H heads, D head dim, C = H * D. Attribute paths
are keys of the manifest.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import Attention, Pair
from qwenimg.backends.torch.networks.loaded import TokenDenoiser
from qwenimg.common.networks.denoisers import krea2_conditioning
from qwenimg.common.networks.denoisers.krea2_dit import Krea2Config

# Layers


class TimestepEmbedding(torch.nn.Module):
    def __init__(self, config: Krea2Config):
        super().__init__()
        self.linear_1 = ops.Linear(config.timestep_embed_dim, config.dim)
        self.linear_2 = ops.Linear(config.dim, config.dim)

    def forward(self, features: Tensor) -> Tensor:
        """[1 channels] -> [1 C]."""
        return self.linear_2(ops.gelu(self.linear_1(features)))


class GatedAttention(Attention):
    """Attention with a gate over its result."""

    def __init__(self, dim: int, head_dim: int, key_heads: int, eps: float):
        norm = partial(ops.CentredRMSNorm, head_dim, eps)
        super().__init__(dim, head_dim, norm, bias=False, kv_dim=head_dim * key_heads)
        self.to_gate = ops.Linear(dim, dim, bias=False)

    def gated(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B L C] and heads [B L H D] -> [B L C]."""
        return self.to_out[0](ops.sigmoid_gated(self.attend(q, k, v), self.to_gate(x)))


class FusionAttention(GatedAttention):
    def forward(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L C]."""
        return self.gated(x, self.queries(x), self.keys(x), self.values(x))


class RotaryAttention(GatedAttention):
    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """[B L C] -> [B L C]."""
        v = self.values(x)
        q, k = (ops.rotate_pairs(heads, rope, v.dtype) for heads in (self.queries(x), self.keys(x)))
        return self.gated(x, q, k, v)


class FeedForward(torch.nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate = ops.Linear(dim, hidden, bias=False)
        self.up = ops.Linear(dim, hidden, bias=False)
        self.down = ops.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L C]."""
        return self.down(ops.swiglu(self.gate(x), self.up(x)))


class FusionBlock(torch.nn.Module):
    """A block without modulation, for text alone."""

    def __init__(self, config: Krea2Config):
        super().__init__()
        dim, eps = config.text_hidden_dim, config.norm_eps
        self.norm1 = ops.CentredRMSNorm(dim, eps)
        self.norm2 = ops.CentredRMSNorm(dim, eps)
        self.attn = FusionAttention(dim, dim // config.text_num_attention_heads, config.text_num_key_value_heads, eps)
        self.ff = FeedForward(dim, config.text_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B L W] -> [B L W]."""
        dtype = self.attn.to_q.dtype
        x = ops.add(x, self.attn(ops.stream(self.norm1(x), dtype)))
        return ops.add(x, self.ff(ops.stream(self.norm2(x), dtype)))


class TextFusion(torch.nn.Module):
    def __init__(self, config: Krea2Config, stream: torch.dtype):
        super().__init__()
        self.shape, self.stream = (config.num_text_layers, config.text_hidden_dim), stream
        layerwise, refiners = range(config.num_layerwise_text_blocks), range(config.num_refiner_text_blocks)
        self.layerwise_blocks = torch.nn.ModuleList([FusionBlock(config) for _ in layerwise])
        self.projector = ops.Linear(config.num_text_layers, 1, bias=False)
        self.refiner_blocks = torch.nn.ModuleList([FusionBlock(config) for _ in refiners])

    def forward(self, text: Tensor) -> Tensor:
        """Make text [1 S W] of states [1 S N*W]: the layers of a token are a sequence first, then are summed up."""
        S = text.shape[1]
        x = ops.stream(text.reshape(S, *self.shape), self.stream)
        for block in self.layerwise_blocks:
            x = block(x)
        x = ops.stream(self.projector(x.swapaxes(1, 2)).reshape(1, S, -1), self.stream)
        for block in self.refiner_blocks:
            x = block(x)
        return x


class TextProjection(torch.nn.Module):
    def __init__(self, config: Krea2Config):
        super().__init__()
        self.norm = ops.CentredRMSNorm(config.text_hidden_dim, config.norm_eps)
        self.linear_1 = ops.Linear(config.text_hidden_dim, config.dim)
        self.linear_2 = ops.Linear(config.dim, config.dim)

    def forward(self, text: Tensor) -> Tensor:
        """[1 S W] -> [1 S C]."""
        return self.linear_2(ops.gelu(self.linear_1(self.norm(text))))


class TransformerBlock(torch.nn.Module):
    def __init__(self, config: Krea2Config):
        super().__init__()
        dim, eps = config.dim, config.norm_eps
        self.scale_shift_table = ops.Embedding(6, dim)
        self.norm1 = ops.CentredRMSNorm(dim, eps)
        self.norm2 = ops.CentredRMSNorm(dim, eps)
        self.attn = RotaryAttention(dim, config.attention_head_dim, config.num_key_value_heads, eps)
        self.ff = FeedForward(dim, config.intermediate_size)

    def forward(self, x: Tensor, mod: Tensor, rope: Tensor) -> Tensor:
        """Run the block on x [B S+L C], with mod [1 6C]."""
        mod = ops.add(mod, self.scale_shift_table.weight.reshape(1, -1))
        scale1, shift1, gate1, scale2, shift2, gate2 = ops.chunks(mod, 6, None)
        dtype = self.attn.to_q.dtype
        x = ops.gated(x, gate1, self.attn(ops.modulated(self.norm1(x), shift1, scale1, dtype), rope))
        return ops.gated(x, gate2, self.ff(ops.modulated(self.norm2(x), shift2, scale2, dtype)))


class FinalLayer(torch.nn.Module):
    def __init__(self, config: Krea2Config):
        super().__init__()
        self.scale_shift_table = ops.Embedding(2, config.dim)
        self.norm = ops.CentredRMSNorm(config.dim, config.norm_eps)
        self.linear = ops.Linear(config.dim, config.in_channels)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        """[B L C] -> [B L in], for the embedding of the time [1 C]."""
        mod = ops.add(self.scale_shift_table.weight, temb).reshape(1, -1)
        scale, shift = ops.chunks(mod, 2, None)
        return self.linear(ops.modulated(self.norm(x), shift, scale, self.linear.dtype))


# Model


class Krea2Transformer(torch.nn.Module):
    def __init__(self, config: Krea2Config, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.tokens = ops.Tokens()
        self.img_in = ops.Linear(config.in_channels, config.dim)
        self.time_embed = TimestepEmbedding(config)
        self.time_mod_proj = ops.Linear(config.dim, 6 * config.dim)
        self.text_fusion = TextFusion(config, stream)
        self.txt_in = TextProjection(config)
        self.transformer_blocks = torch.nn.ModuleList([TransformerBlock(config) for _ in range(config.num_layers)])
        self.final_layer = FinalLayer(config)

    def text(self, states: Tensor) -> Tensor:
        """Return the start of the text's part of the stream, [1 S C], for text states [1 S N*W]; the same in every
        step."""
        return ops.stream(self.txt_in(self.text_fusion(states)), self.stream)

    def forward(self, latents: Tensor, features: Tensor, txt: Tensor, rope: Tensor) -> Tensor:
        """Predict the velocity [1 L in] for packed latents [1 L in] and the sinusoid [1 channels] of the time.

        txt [1 S C]: the start of the text's part of the stream; rope: tables [S+L 1 D/2 2].
        """
        temb = self.time_embed(features)
        mod = self.time_mod_proj(ops.gelu(temb))
        img = self.tokens.part(ops.stream(self.img_in(latents), self.stream))
        x = ops.joined(txt, img, self.stream)
        for block in self.transformer_blocks:
            x = ops.async_eval(block(x, mod, rope))
        return self.final_layer(self.tokens.gathered(x[:, txt.shape[1] :]), temb)


# Runner


class Runner(TokenDenoiser[Krea2Config, Krea2Transformer]):
    network, role = Krea2Transformer, "transformer"

    @ops.computes
    def condition(self, text: Tensor, grid: tuple[int, int]) -> Pair:
        """Prepare text states [1 S N*W] for an image of `grid` rows and columns of tokens."""
        S = text.shape[1]
        rope = self.rope(krea2_conditioning.table(self.config, grid, S))
        own = torch.cat((rope[:S], self.model.tokens.rows(rope[S:])), dim=0)
        return ops.eval(self.model.text(text)), own
