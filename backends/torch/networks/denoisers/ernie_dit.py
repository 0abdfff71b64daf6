"""ERNIE-Image's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.ernie_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import (
    FinalNorm,
    Pair,
    RotaryAttention,
    TimestepEmbedding,
)
from qwenimg.backends.torch.networks.loaded import TokenDenoiser
from qwenimg.common.networks.denoisers import ernie_conditioning
from qwenimg.common.networks.denoisers.ernie_dit import ErnieConfig

# Layers


class Embedder(torch.nn.Module):
    def __init__(self, config: ErnieConfig):
        super().__init__()
        self.proj = ops.Linear(config.in_channels, config.dim)

    def forward(self, latents: Tensor) -> Tensor:
        """[B L in] -> [B L C]."""
        return self.proj(latents)


class SelfAttention(RotaryAttention):
    def turned(self, x: Tensor, rope: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn pairs of channels of the two halves of heads [B L H D], tables [L 1 2D]; in float32, and float32 out."""
        D = self.head_dim
        swapped = torch.cat((x[..., D // 2 :], x[..., : D // 2]), dim=-1)
        return x * rope[..., :D] + swapped * rope[..., D:]


class FeedForward(torch.nn.Module):
    def __init__(self, config: ErnieConfig):
        super().__init__()
        self.gate_proj = ops.Linear(config.dim, config.ffn_hidden_size, bias=False)
        self.up_proj = ops.Linear(config.dim, config.ffn_hidden_size, bias=False)
        self.linear_fc2 = ops.Linear(config.ffn_hidden_size, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L C]."""
        return self.linear_fc2(ops.gated_gelu_erf(self.gate_proj(x), self.up_proj(x)))


class TransformerBlock(torch.nn.Module):
    def __init__(self, config: ErnieConfig):
        super().__init__()
        self.adaLN_sa_ln = ops.RMSNorm(config.dim, config.eps)
        self.self_attention = SelfAttention(config.dim, config.head_dim, config.eps, bias=False)
        self.adaLN_mlp_ln = ops.RMSNorm(config.dim, config.eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, mod: Tensor, rope: Tensor) -> Tensor:
        """Run the block on x [B L+S C], with mod [1 6C]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = ops.chunks(mod, 6, None)
        dtype = self.self_attention.to_q.dtype
        y = ops.modulated(self.adaLN_sa_ln(x), shift1, scale1, dtype)
        x = ops.gated(x, gate1, self.self_attention(y, rope, text_last=True))
        return ops.gated(x, gate2, self.mlp(ops.modulated(self.adaLN_mlp_ln(x), shift2, scale2, dtype)))


# Model


class ErnieTransformer(torch.nn.Module):
    def __init__(self, config: ErnieConfig, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.tokens = ops.Tokens()
        self.x_embedder = Embedder(config)
        text_layer = ops.Linear(config.text_in_dim, config.dim, bias=False)
        self.text_proj = text_layer if config.has_text_layer else torch.nn.Identity()
        self.time_embedding = TimestepEmbedding(config.dim, config.dim)
        self.adaLN_modulation = torch.nn.ModuleList([torch.nn.Identity(), ops.Linear(config.dim, 6 * config.dim)])
        self.layers = torch.nn.ModuleList([TransformerBlock(config) for _ in range(config.num_layers)])
        self.final_norm = FinalNorm(config.dim, config.eps)
        self.final_linear = ops.Linear(config.dim, config.out_channels)

    def forward(self, latents: Tensor, features: Tensor, txt: Tensor, rope: Tensor) -> Tensor:
        """Predict the velocity [1 L C] for packed latents [1 L C] and the sinusoid [1 C] of the time.

        txt [1 S C]: the start of the text's part of the stream; rope: tables [L+S 1 2D].
        """
        temb = self.time_embedding(features)
        mod, final = self.adaLN_modulation[1](ops.silu(temb)), self.final_norm.linear(temb)
        img = self.tokens.part(ops.stream(self.x_embedder(latents), self.stream))
        x = ops.joined(img, txt, self.stream)
        for block in self.layers:
            x = ops.async_eval(block(x, mod, rope))
        img = self.tokens.gathered(x[:, : img.shape[1]])
        return self.final_linear(self.final_norm(img, final, self.final_linear.dtype))


# Runner


class Runner(TokenDenoiser[ErnieConfig, ErnieTransformer]):
    network, role = ErnieTransformer, "transformer"

    @ops.computes
    def condition(self, text: Tensor, grid: tuple[int, int]) -> Pair:
        """Prepare text states [1 S states] for an image of `grid` rows and columns of tokens."""
        img, txt = map(self.table, ernie_conditioning.tables(self.config, grid, text.shape[1]))
        rope = torch.cat((self.model.tokens.rows(img), txt), dim=0)
        return ops.eval(ops.stream(self.model.text_proj(text), self.model.stream)), rope
