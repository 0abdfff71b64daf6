"""Layers that diffusion transformers share.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qwenimg.backends.torch import ops

Pair = tuple[Tensor, Tensor]
Rope = Pair  # the tables of image and text that `ops.rope_freqs` returns
Change: TypeAlias = Callable[[Tensor], Tensor]
"""A change by a control network: from the image stream behind a block, [B M C], it makes an addition [B L C] to its
first tokens, which are those of the image."""


@dataclass(frozen=True)
class Residual:
    """A `Change` that is the same for every stream."""

    values: Tensor  # [1 L C]

    def __call__(self, img: Tensor) -> Tensor:
        return self.values


def residuals(values: list[Tensor], scale: float) -> list[Residual]:
    """Return residuals [1 L C] times `scale`, as changes."""
    return [Residual(one if scale == 1 else one * scale) for one in values]


def without_variance(x: Tensor, patch: int, channels: int) -> Tensor:
    """Return the prediction [B L patch^2*channels] of tokens [B L patch^2*C] that have a variance behind it, which no
    sampler here uses."""
    return x.reshape(*x.shape[:2], patch**2, -1)[..., :channels].reshape(*x.shape[:2], -1)


class TimestepEmbedding(torch.nn.Module):
    def __init__(self, channels: int, dim: int, outputs: int | None = None, *, bias: bool = True):
        """outputs: None: as many as `dim`."""
        super().__init__()
        self.linear_1 = ops.Linear(channels, dim, bias=bias)
        self.linear_2 = ops.Linear(dim, outputs or dim, bias=bias)

    def forward(self, features: Tensor) -> Tensor:
        """Embed sinusoids of times, or another vector: [T channels] -> [T outputs]."""
        return self.linear_2(ops.silu(self.linear_1(features)))


class TextProjection(torch.nn.Module):
    def __init__(self, inputs: int, dim: int):
        super().__init__()
        self.linear_1 = ops.Linear(inputs, dim)
        self.linear_2 = ops.Linear(dim, dim)

    def forward(self, text: Tensor) -> Tensor:
        """[B S inputs] -> [B S C]."""
        return self.linear_2(ops.linear_gelu(self.linear_1, text))


class FeedForwardIn(torch.nn.Module):
    def __init__(self, dim: int, hidden: int, *, bias: bool = True):
        super().__init__()
        self.proj = ops.Linear(dim, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear_gelu(self.proj, x)


class FeedForward(torch.nn.Module):
    start: type[FeedForwardIn] = FeedForwardIn

    def __init__(self, dim: int, hidden: int, *, bias: bool = True):
        super().__init__()
        first, last = self.start(dim, hidden, bias=bias), ops.Linear(hidden, dim, bias=bias)
        self.net = torch.nn.ModuleList([first, torch.nn.Identity(), last])

    def forward(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L C]."""
        return self.net[2](self.net[0](x))


class GatedFeedForward(torch.nn.Module):
    """SiLU of the first half of a layer times its second half, without biases."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.hidden = hidden
        self.linear_in = ops.Linear(dim, 2 * hidden, bias=False)
        self.linear_out = ops.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L C]."""
        y = self.linear_in(x)
        return self.linear_out(ops.swiglu(y[..., : self.hidden], y[..., self.hidden :]))


class StreamModulation(torch.nn.Module):
    """The modulation of all blocks of a kind: `vectors` of shift, scale and gate."""

    def __init__(self, dim: int, vectors: int):
        super().__init__()
        self.linear = ops.Linear(dim, vectors * dim, bias=False)

    def forward(self, temb: Tensor) -> Tensor:
        """[1 C] -> [1 vectors*C]."""
        return self.linear(ops.silu(temb))


class Attention(torch.nn.Module):
    """The layers of an attention: queries of one stream, keys and values of the tokens that it sees."""

    def __init__(
        self,
        dim: int,
        head_dim: int,
        norm: Callable[[], torch.nn.Module] = torch.nn.Identity,
        *,
        bias: bool = True,
        seen: int | None = None,
        kv_dim: int | None = None,
        projects: bool = True,
    ):
        """norm: of each head of queries and keys; seen: the width of the tokens that it sees; kv_dim: that of keys and
        values, whose heads queries share; None: that of queries; projects: whether it has a layer for its result."""
        super().__init__()
        self.head_dim, seen, kv_dim = head_dim, seen or dim, kv_dim or dim
        self.to_q = ops.Linear(dim, dim, bias=bias)
        self.to_k = ops.Linear(seen, kv_dim, bias=bias)
        self.to_v = ops.Linear(seen, kv_dim, bias=bias)
        self.norm_q, self.norm_k = norm(), norm()
        if projects:
            self.to_out = torch.nn.ModuleList([ops.Linear(dim, dim, bias=bias)])
        self.attend = ops.Attend()

    def heads(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L H D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def queries(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L H D]."""
        return self.norm_q(self.heads(self.to_q(x)))

    def keys(self, x: Tensor) -> Tensor:
        """[B S C'] -> [B S H D]."""
        return self.norm_k(self.heads(self.to_k(x)))

    def values(self, x: Tensor) -> Tensor:
        """Return values as `attend` takes them: [B S C'] -> [B S H D]."""
        return self.attend.values(self.heads(self.to_v(x)))


class RotaryAttention(Attention):
    """Attention over one stream with rotated queries and keys."""

    def __init__(
        self,
        dim: int,
        head_dim: int,
        eps: float,
        *,
        bias: bool = True,
        kv_dim: int | None = None,
        projects: bool = True,
    ):
        norm = partial(ops.RMSNorm, head_dim, eps)
        super().__init__(dim, head_dim, norm, bias=bias, kv_dim=kv_dim, projects=projects)

    def turned(self, x: Tensor, rope: Any, dtype: torch.dtype) -> Tensor:
        """Turn heads [B L H D]; in float32, and `dtype` out."""
        return ops.rotate_pairs(x, rope, dtype)

    def projected(self, x: Tensor, rope: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values: [B L C] -> [B L H D] each."""
        v = self.values(x)
        return self.turned(self.queries(x), rope, v.dtype), self.turned(self.keys(x), rope, v.dtype), v

    def attended(self, x: Tensor, rope: Any, text_last: bool = False) -> Tensor:
        """[B L C] -> [B L C], without the layer for the result. text_last: text is after the image, else before it."""
        return self.attend(*self.projected(x, rope), text_last=text_last)

    def forward(self, x: Tensor, rope: Any, text_last: bool = False) -> Tensor:
        """[B L C] -> [B L C]."""
        return self.to_out[0](self.attended(x, rope, text_last))


def with_known(attend: ops.Attend, k: Tensor, v: Tensor, known: Pair | None) -> Pair:
    """Return keys and values [B L H D] as `attend` takes them, with those that are `known` behind them."""
    if known is None:
        return k, v
    return ops.joined(k, known[0], v.dtype), ops.joined(v, attend.values(known[1]), v.dtype)


def kept(attend: ops.Attend, k: Tensor, v: Tensor) -> Pair:
    """Return keys and values [B L H D], which are as `attend` takes them, as those that are `known` later: without its
    scale, and without what a layer made besides the values."""
    return ops.stream(k, v.dtype), ops.contiguous(attend.result(v))


class JointAttention(Attention):
    def __init__(self, dim: int, head_dim: int, eps: float, *, bias: bool = True):
        super().__init__(dim, head_dim, partial(ops.RMSNorm, head_dim, eps), bias=bias)
        self.add_q_proj = ops.Linear(dim, dim, bias=bias)
        self.add_k_proj = ops.Linear(dim, dim, bias=bias)
        self.add_v_proj = ops.Linear(dim, dim, bias=bias)
        self.to_add_out = ops.Linear(dim, dim, bias=bias)
        self.norm_added_q = ops.RMSNorm(head_dim, eps)
        self.norm_added_k = ops.RMSNorm(head_dim, eps)

    def forward(
        self, img: Tensor, txt: Tensor, rope: Rope, mask: Tensor | None = None, known: Pair | None = None
    ) -> Pair:
        """Attend over both streams, img [B L C] and txt [B S C], and keep their shapes. Text comes first in the
        joint sequence. known: further keys and values, which both see."""
        img_freqs, txt_freqs = rope
        v = self.attend.values(self.heads(ops.joined_linears(self.add_v_proj, txt, self.to_v, img)))
        img_q = ops.rotate_pairs(self.queries(img), img_freqs, v.dtype)
        img_k = ops.rotate_pairs(self.keys(img), img_freqs, v.dtype)
        txt_q = ops.rotate_pairs(self.norm_added_q(self.heads(self.add_q_proj(txt))), txt_freqs, v.dtype)
        txt_k = ops.rotate_pairs(self.norm_added_k(self.heads(self.add_k_proj(txt))), txt_freqs, v.dtype)

        q, k = ops.joined(txt_q, img_q, v.dtype), ops.joined(txt_k, img_k, v.dtype)
        out = self.attend(q, *with_known(self.attend, k, v, known), mask)

        S = txt.shape[1]
        return self.to_out[0](out[:, S:]), self.to_add_out(out[:, :S])


class JointBlock(torch.nn.Module):
    """A block of two streams that meet in the attention. Its modulation is given; the feed-forwards of the models have
    different names."""

    def __init__(self, dim: int, head_dim: int, eps: float, *, bias: bool = True):
        super().__init__()
        self.eps = eps
        self.attn = JointAttention(dim, head_dim, eps, bias=bias)

    def streams(
        self,
        img: Tensor,
        txt: Tensor,
        mods: Pair,
        rope: Rope,
        feed_forwards: tuple[torch.nn.Module, torch.nn.Module],
        index: Tensor | None = None,
        mask: Tensor | None = None,
        known: Pair | None = None,
    ) -> Pair:
        """Update img [B L C] and txt [B S C] with mods ([R 6C], [1 6C]) and the feed-forwards of both. `index` [L]
        gives image tokens their row; known: further keys and values, which both see."""
        shift1, scale1, gate1, shift2, scale2, gate2 = ops.chunks(mods[0], 6, index)
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = ops.chunks(mods[1], 6, None)
        (img_mlp, txt_mlp), dtype, eps = feed_forwards, self.attn.to_q.dtype, self.eps

        img_out, txt_out = self.attn(
            ops.norm_modulate(img, shift1, scale1, dtype, eps),
            ops.norm_modulate(txt, txt_shift1, txt_scale1, dtype, eps),
            rope,
            mask,
            known,
        )
        img = ops.gated(img, gate1, img_out)
        txt = ops.gated(txt, txt_gate1, txt_out)

        img = ops.gated(img, gate2, img_mlp(ops.norm_modulate(img, shift2, scale2, dtype, eps)))
        txt = ops.gated(txt, txt_gate2, txt_mlp(ops.norm_modulate(txt, txt_shift2, txt_scale2, dtype, eps)))
        return img, txt


class FinalNorm(torch.nn.Module):
    def __init__(self, dim: int, eps: float, *, bias: bool = True, modulates: bool = True):
        super().__init__()
        self.eps = eps
        if modulates:
            self.linear = ops.Linear(dim, 2 * dim, bias=bias)

    def modulation(self, temb: Tensor) -> Tensor:
        """[T C] -> [T 2C]."""
        return self.linear(ops.silu(temb))

    def forward(self, x: Tensor, mod: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the modulated norm of x [B L C], mod [1 2C], in `dtype`. Scale comes before shift here."""
        scale, shift = ops.chunks(mod, 2, None)
        return ops.norm_modulate(x, shift, scale, dtype, self.eps)
