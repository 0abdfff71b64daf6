"""An IP-Adapter: the tokens of pictures, and their keys and values in each cross attention of a UNet. What is unusual
about it: `qwenimg.common.networks.encoders.ip_adapter`.

N pictures, L states, T tokens, S text channels, H heads, D head dim, C channels. Attribute paths are the
manifest's keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.loaded import LoadedNetwork
from qwenimg.common.networks.encoders.ip_adapter import HEAD_DIM, NORM_EPS, IPAdapterConfig
from qwenimg.common.runtime.engine import NumpyArray

# Projections


class LinearProjection(torch.nn.Module):
    def __init__(self, config: IPAdapterConfig, stream: torch.dtype):
        super().__init__()
        self.tokens = config.tokens
        self.proj = ops.Linear(config.features, config.tokens * config.text)
        self.norm = ops.LayerNorm(config.text, NORM_EPS)

    def forward(self, features: Tensor) -> Tensor:
        """[N F] -> [N T S]."""
        return self.norm(self.proj(features).reshape(features.shape[0], self.tokens, -1))


class FeedForwardProjection(torch.nn.Module):
    def __init__(self, config: IPAdapterConfig, stream: torch.dtype):
        super().__init__()
        first, last = ops.Linear(config.features, config.inner), ops.Linear(config.inner, config.text)
        layers = [first, torch.nn.Identity(), last, ops.LayerNorm(config.text, NORM_EPS)]
        self.proj = torch.nn.ModuleList(layers)

    def forward(self, features: Tensor) -> Tensor:
        """[N L F] -> [N L S]."""
        return self.proj[3](self.proj[2](ops.gelu_erf(self.proj[0](features))))


class ResamplerAttention(torch.nn.Module):
    def __init__(self, config: IPAdapterConfig):
        super().__init__()
        self.norm1 = ops.LayerNorm(config.inner, NORM_EPS)
        self.norm2 = ops.LayerNorm(config.inner, NORM_EPS)
        self.to_q = ops.Linear(config.inner, config.attention, bias=False)
        self.to_kv = ops.Linear(config.inner, 2 * config.attention, bias=False)
        self.to_out = ops.Linear(config.attention, config.inner, bias=False)
        self.attend = ops.Attend()

    def heads(self, x: Tensor) -> Tensor:
        """[N L C] -> [N L H D]."""
        return x.reshape(*x.shape[:2], -1, HEAD_DIM)

    def forward(self, latents: Tensor, states: Tensor) -> Tensor:
        """Attend from the latents [N T C] to the states [N L C] and themselves: [N T C]."""
        own = self.norm2(latents)
        kv = self.to_kv(torch.cat([self.norm1(states), own], dim=1))
        half = kv.shape[-1] // 2
        k, v = self.heads(kv[..., :half]), self.heads(kv[..., half:])
        return self.to_out(self.attend(self.heads(self.to_q(own)), k, self.attend.values(v)))


class ResamplerLayer(torch.nn.Module):
    def __init__(self, config: IPAdapterConfig):
        super().__init__()
        self.attention = ResamplerAttention(config)
        first = ops.Linear(config.inner, config.feed_forward, bias=False)
        last = ops.Linear(config.feed_forward, config.inner, bias=False)
        layers = [ops.LayerNorm(config.inner, NORM_EPS), first, torch.nn.Identity(), last]
        self.ff = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        """Run the layer on the latents x [N T C] and the states [N L C]: [N T C]."""
        x = ops.add(x, self.attention(x, states))
        return ops.add(x, self.ff[3](ops.gelu_erf(self.ff[1](self.ff[0](x)))))


class Resampler(torch.nn.Module):
    def __init__(self, config: IPAdapterConfig, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.latents = ops.Embedding(config.tokens, config.inner)
        self.proj_in = ops.Linear(config.features, config.inner)
        self.layers = torch.nn.ModuleList([ResamplerLayer(config) for _ in range(config.depth)])
        self.proj_out = ops.Linear(config.inner, config.text)
        self.norm_out = ops.LayerNorm(config.text, NORM_EPS)

    def forward(self, features: Tensor) -> Tensor:
        """[N L F] -> [N T S]."""
        states = self.proj_in(features)
        x = ops.repeated(ops.stream(self.latents.weight, self.stream)[None], states.shape[0])
        for layer in self.layers:
            x = layer(x, states)
        return self.norm_out(self.proj_out(x))


# Model


class CrossAttentionPair(torch.nn.Module):
    def __init__(self, config: IPAdapterConfig, width: int):
        super().__init__()
        self.to_k_ip = ops.Linear(config.text, width, bias=False)
        self.to_v_ip = ops.Linear(config.text, width, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B T C] of tokens [B T S]."""
        return self.to_k_ip(tokens), self.to_v_ip(tokens)


PROJECTIONS = {"base": LinearProjection, "plus": Resampler, "full-face": FeedForwardProjection}


class IPAdapter(torch.nn.Module):
    def __init__(self, config: IPAdapterConfig, stream: torch.dtype):
        super().__init__()
        self.image_proj = PROJECTIONS[config.kind](config, stream)
        pairs = [CrossAttentionPair(config, width) for width in config.widths]
        self.ip_adapter = torch.nn.ModuleList(pairs)

    def forward(self, features: Tensor, empty: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values [2 N*T C] in each cross attention: of the pictures with these features [N F] or
        [N L F], and of as many empty ones [1 F] or [1 L F]."""
        count = features.shape[0]
        tokens, none = self.image_proj(features), self.image_proj(empty)
        rows = [tokens.reshape(1, -1, tokens.shape[-1]), torch.cat([none] * count, dim=1)]
        both = torch.cat(rows, dim=0)
        return [pair(both) for pair in self.ip_adapter]


# Runner


class Runner(LoadedNetwork[IPAdapterConfig, IPAdapter]):
    network, role = IPAdapter, "text"

    @ops.computes
    def pairs(self, features: NumpyArray, empty: NumpyArray) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values [2 N*T C] in each cross attention, in the order of the file, for the features of N
        pictures and of an empty one; the second row is of the empty one. Evaluated."""
        made = (self.table(one) for one in (features, empty))
        return [(ops.eval(k), ops.eval(v)) for k, v in self.model(*made)]
