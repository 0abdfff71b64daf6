"""Functions of the models: dtypes, streams, modulation, RoPE, activations, guidance."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.common.runtime.observers import observed, seen

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def in_place(x: Tensor) -> bool:
    """Whether `x`, a result that nobody reads again, may be written over: not where gradients or an observer need it. A
    compiler sees to that by itself, so it is not counted for one either (on the meta device)."""
    return not (x.is_meta or torch.is_grad_enabled() or torch.compiler.is_compiling() or observed())


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def pad_tokens(x: Tensor, length: int) -> Tensor:
    """[B S C] -> [B length C] with zeros at the end."""
    return F.pad(x, (0, 0, 0, length - x.shape[1]))


def repeated(x: Tensor, count: int) -> Tensor:
    """A batch of one as a batch of `count`, without a copy."""
    return x.expand(count, *x.shape[1:])


def stream(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The start of a residual stream in the dtype that the policy gives it."""
    return x.to(dtype)


def norm_modulate(x: Tensor, shift: Tensor, scale: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """LayerNorm(x) * (1 + scale) + shift for x [B L C], in the wider dtype of stream and modulation, cast to `dtype`
    once at the end."""
    if scale.shape[:2] == (1, 1) and scale.dtype == x.dtype:  # the same for all tokens: the norm's own gain and bias
        result = F.layer_norm(x, x.shape[-1:], 1 + scale[0, 0], shift[0, 0], eps)
    else:
        result = torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=eps), 1 + scale)
    return seen("norm_modulate", "", result.to(dtype))


def gated(x: Tensor, gate: Tensor, update: Tensor) -> Tensor:
    """x + gate * update in x's dtype."""
    return seen("gated", "", torch.addcmul(x, gate.to(x.dtype), _beside(update, x)))


def add(x: Tensor, update: Tensor) -> Tensor:
    """x + update in x's dtype."""
    return seen("add", "", x + _beside(update, x))


def residual(x: Tensor, update: Tensor) -> Tensor:
    """The same, where nobody reads `update` again: its memory takes the sum where it can. New memory costs a CPU more
    than adding."""
    alike = update.dtype == x.dtype and update.shape == x.shape and update.stride() == x.stride()
    return seen("add", "", update.add_(x)) if alike and in_place(update) else add(x, update)


def _beside(update: Tensor, x: Tensor) -> Tensor:
    """`update` as an operation with x takes it so that x's dtype comes out: a narrower one as it is, without a pass of
    its own."""
    return update if torch.promote_types(update.dtype, x.dtype) == x.dtype else update.to(x.dtype)


def joined(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """[B S ...] and [B L ...] as [B S+L ...] in `dtype`, cast on the way."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat((first.to(dtype), second.to(dtype)), dim=1)
    S = first.shape[1]
    both = first.new_empty((first.shape[0], S + second.shape[1], *first.shape[2:]), dtype=dtype)
    both[:, :S] = first
    both[:, S:] = second
    return both


def chunks(modulation: Tensor, count: int, index: Tensor | None) -> tuple[Tensor, ...]:
    """`count` vectors out of modulation rows [R count*C]: each [R 1 C] (R is 1, or the batch), or [1 L C] when
    `index` [L] gives each token its row."""
    parts = modulation.chunk(count, dim=-1)
    return tuple(part[:, None] if index is None else part[index][None] for part in parts)


def turns(cos: Tensor, sin: Tensor) -> Tensor:
    """The tables [L D/2] of `rotate_pairs` as [L 1 D/2 2], made once for a run."""
    return torch.stack((cos, sin), dim=-1)[:, None]


def rotate_pairs(x: Tensor, turns: Tensor, dtype: torch.dtype) -> Tensor:
    """RoPE on adjacent pairs: x [B L H D]; float32 in and out. The cast to `dtype` would be a pass of its own here:
    it is left to `joined`, which copies anyway.

    A pair (a, b) turns into (a cos - b sin, a sin + b cos): the product of two complex numbers, in one pass. A compiler
    knows real numbers only.
    """
    pairs = x.unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        (a, b), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turns)).flatten(-2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the two halves of the head: x [B L H D], tables [L D/2]; in float32, and float32 out."""
    low, high = at_least_float32(x).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def silu(x: Tensor) -> Tensor:
    return F.silu(x)


def norm_silu(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """SiLU of a norm of x, in the memory of the norm's result."""
    normed = norm(x)
    return F.silu(normed, inplace=in_place(normed))


def swiglu(gate: Tensor, values: Tensor) -> Tensor:
    """`values` times SiLU of `gate` (N. Shazeer, "GLU Variants Improve Transformer", 2020), neither of which is read
    again."""
    return F.silu(gate, inplace=True).mul_(values) if in_place(gate) else F.silu(gate) * values


def gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def gelu_erf(x: Tensor) -> Tensor:
    """GELU as it is defined, by the error function."""
    return F.gelu(x)


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), an approximation of GELU (D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", 2016)."""
    wide = at_least_float32(x)
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


def geglu(x: Tensor) -> Tensor:
    """[... 2C] -> [... C]: the first half times GELU of the second (N. Shazeer, "GLU Variants Improve Transformer",
    2020)."""
    values, gate = x.chunk(2, dim=-1)
    gate = F.gelu(gate)
    return seen("geglu", "", gate.mul_(values) if in_place(gate) else values * gate)


def shift(x: Tensor, rows: Tensor) -> Tensor:
    """An image [B C h w], which is not read again, and a number per channel [1 or B, C], in the image's dtype."""
    rows = rows.to(x.dtype)[:, :, None, None]
    return seen("shift", "", x.add_(rows) if in_place(x) else x + rows)


def pad_right_bottom(x: Tensor) -> Tensor:
    """One row and one column of zeros, below and to the right."""
    return F.pad(x, (0, 1, 0, 1))


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """u + scale (c - u), each token [C] rescaled to the length of c, in float32."""
    c, u = at_least_float32(conditional), at_least_float32(unconditional)
    combined = u + scale * (c - u)
    return combined * (_length(c) / _length(combined))


def rescale(guided: Tensor, conditional: Tensor, share: float) -> Tensor:
    """`guided` with its deviation moved by `share` towards that of `conditional`, both [B C h w], in float32 (S. Lin et
    al., "Common Diffusion Noise Schedules and Sample Steps are Flawed", 2023)."""
    g, c = at_least_float32(guided), at_least_float32(conditional)
    ratio = torch.std(c, dim=(1, 2, 3), keepdim=True) / torch.std(g, dim=(1, 2, 3), keepdim=True)
    return g * (share * ratio + (1 - share))


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def product_seconds(side: int, dtype: torch.dtype, device: torch.device) -> float:
    """Of one product of two matrices side x side."""
    x = torch.ones((side, side), dtype=dtype, device=device)
    begun = time.perf_counter()
    torch.matmul(x, x)[0, 0].item()
    return time.perf_counter() - begun
