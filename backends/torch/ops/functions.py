"""Functions of the models: dtypes, residual streams, modulation, RoPE, activations, guidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.common.runtime.observers import observed, seen

Result = TypeVar("Result")
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def in_place(x: Tensor) -> bool:
    """Return whether `x`, a result that is not read again, may be overwritten: not while gradients or an observer need
    it.

    A compiler overwrites by itself, so none is done while compiling, nor when kernels are counted (on the meta device).
    """
    return not (x.is_meta or torch.is_grad_enabled() or torch.compiler.is_compiling() or observed())


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def pad_tokens(x: Tensor, length: int) -> Tensor:
    """Pad [B S C] with zeros at the end to [B length C]."""
    return F.pad(x, (0, 0, 0, length - x.shape[1]))


def behind_zeros(x: Tensor, count: int) -> Tensor:
    """Put `count` tokens of zeros before x [B S C]."""
    return F.pad(x, (0, 0, count, 0)) if count else x


def repeated(x: Tensor, count: int) -> Tensor:
    """Repeat a batch of one `count` times, without a copy."""
    return x.expand(count, *x.shape[1:])


def with_zeros(x: Tensor, count: int) -> Tensor:
    """Return a batch with zeros after its rows, `count` in all."""
    missing = count - x.shape[0]
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def with_rows(x: Tensor, places: Sequence[tuple[int, int]], rows: Tensor) -> Tensor:
    """Replace tokens of x [B S C], by (sequence, position), by `rows` [N C] in x's dtype."""
    x = x.clone()
    sequences, positions = zip(*places, strict=True)
    x[list(sequences), list(positions)] = rows.to(x.dtype)
    return x


def channel_means(x: Tensor) -> Tensor:
    """Return the mean of each channel of an image: [B C 1 1]."""
    return x.mean(dim=(2, 3), keepdim=True)


def stream(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the start of a residual stream to the dtype that the policy gives it."""
    return x.to(dtype)


def norm_modulate(x: Tensor, shift: Tensor, scale: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """Return LayerNorm(x) * (1 + scale) + shift for x [B L C], computed in the wider dtype of stream and modulation,
    and cast to `dtype` once at the end."""
    if scale.shape[:2] == (1, 1) and scale.dtype == x.dtype:  # the same for all tokens: the norm's own gain and bias
        result = F.layer_norm(x, x.shape[-1:], 1 + scale[0, 0], shift[0, 0], eps)
    else:
        result = torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=eps), 1 + scale)
    return seen("norm_modulate", "", result.to(dtype))


def norm_scaled(x: Tensor, scale: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """Return LayerNorm(x) * (1 + scale) for x [B L C] and scale [1 1 C], computed in the wider dtype of both, and cast
    to `dtype` once at the end."""
    if scale.dtype == x.dtype:
        result = F.layer_norm(x, x.shape[-1:], 1 + scale[0, 0], None, eps)
    else:
        result = F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale)
    return seen("norm_scaled", "", result.to(dtype))


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """Return LayerNorm(x) without gain and bias over the last axis, in float32, and float32 out."""
    x = at_least_float32(x)
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * (1 + scale) for x [B L C], computed in the wider dtype of both, and cast to `dtype` once at the
    end."""
    return seen("scaled", "", (x * (1 + scale)).to(dtype))


def modulated(x: Tensor, shift: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * (1 + scale) + shift for x [B L C], computed in the wider dtype of all, and cast to `dtype` once at the
    end."""
    return seen("modulated", "", torch.addcmul(shift, x, 1 + scale).to(dtype))


def gated(x: Tensor, gate: Tensor, update: Tensor) -> Tensor:
    """Return x + gate * update in x's dtype."""
    return seen("gated", "", torch.addcmul(x, gate.to(x.dtype), _castable(update, x)))


def add(x: Tensor, update: Tensor) -> Tensor:
    """Return x + update in x's dtype."""
    return seen("add", "", x + _castable(update, x))


def add_first(x: Tensor, update: Tensor) -> Tensor:
    """Add `update` [1 or B, L, C] to the first L tokens of x [B M C], in x's dtype."""
    L = update.shape[1]
    return add(x, update) if x.shape[1] == L else torch.cat((add(x[:, :L], update), x[:, L:]), dim=1)


def residual(x: Tensor, update: Tensor) -> Tensor:
    """Return x + update in x's dtype, in the memory of `update` where possible. The caller does not read `update`
    again.

    New memory costs a CPU more than the addition.
    """
    alike = update.dtype == x.dtype and update.shape == x.shape and update.stride() == x.stride()
    return seen("add", "", update.add_(x)) if alike and in_place(update) else add(x, update)


def _castable(update: Tensor, x: Tensor) -> Tensor:
    """Return `update` in a dtype for which x + update keeps x's dtype. A narrower `update` is returned as it is,
    without a cast."""
    return update if torch.promote_types(update.dtype, x.dtype) == x.dtype else update.to(x.dtype)


def clipped(x: Tensor) -> Tensor:
    """Return x with infinities as float16's largest numbers, if it is in float16."""
    return x.clamp(-65504.0, 65504.0) if x.dtype == torch.float16 else x


def joined(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Concatenate [B S ...] and [B L ...] to [B S+L ...] in `dtype`, casting on the way."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat((first.to(dtype), second.to(dtype)), dim=1)
    S = first.shape[1]
    result = first.new_empty((first.shape[0], S + second.shape[1], *first.shape[2:]), dtype=dtype)
    result[:, :S] = first
    result[:, S:] = second
    return result


def apart(function: Callable[[Tensor], Result], x: Tensor, count: int) -> Result:
    """Return function(x), computed for each of `count` equal parts of the rows of x by itself: the bits of a product's
    rows may depend on how many there are."""
    parts = [function(part) for part in x.chunk(count)]
    if isinstance(parts[0], Tensor):
        return cast(Result, torch.cat(cast(list[Tensor], parts), dim=0))
    return cast(Result, tuple(torch.cat(some, dim=0) for some in zip(*cast(list[Any], parts), strict=True)))


def stretched(x: Tensor, height: int, width: int) -> Tensor:
    """Stretch an image [B C h w] bilinearly to height x width, its corners kept, in float32, and float32 out."""
    size = (height, width)
    return F.interpolate(at_least_float32(x), size, mode="bilinear", align_corners=True)


def chunks(modulation: Tensor, count: int, index: Tensor | None) -> tuple[Tensor, ...]:
    """Split modulation rows [R count*C] into `count` vectors: each [R 1 C] (R is 1 or the batch), or [1 L C] when
    `index` [L] gives each token its row."""
    parts = modulation.chunk(count, dim=-1)
    return tuple(part[:, None] if index is None else part[index][None] for part in parts)


def rope_freqs(cos: Tensor, sin: Tensor) -> Tensor:
    """Stack the tables [L D/2] of `rotate_pairs` to [L 1 D/2 2], once for a run."""
    return torch.stack((cos, sin), dim=-1)[:, None]


def rotate_pairs(x: Tensor, freqs: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply RoPE to adjacent pairs of x [B L H D]; float32 in and out. A cast to `dtype` would be one more pass here:
    `joined`, which copies anyway, does it.

    A pair (a, b) turns into (a cos - b sin, a sin + b cos): the product of two complex numbers, in one pass. A compiler
    knows real numbers only.
    """
    pairs = x.unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        (a, b), (cos, sin) = pairs.unbind(-1), freqs.unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(freqs)).flatten(-2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the two halves of each head of x [B L H D], tables [L D/2]; in float32, and float32 out."""
    low, high = at_least_float32(x).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def silu(x: Tensor) -> Tensor:
    return F.silu(x)


def damped(x: Tensor, update: Tensor, scale: float) -> Tensor:
    """Return x + scale * update. `update` is not read again."""
    return seen("add", "", update.mul_(scale).add_(x) if in_place(update) else x + update * scale)


def tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


def norm_silu(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return SiLU of a norm of x, in the memory of the norm's result."""
    normed = norm(x)
    return F.silu(normed, inplace=in_place(normed))


def swiglu(gate: Tensor, values: Tensor) -> Tensor:
    """Return `values` times SiLU of `gate` (N. Shazeer, "GLU Variants Improve Transformer", 2020). Neither is read
    again."""
    return F.silu(gate, inplace=True).mul_(values) if in_place(gate) else F.silu(gate) * values


def gelu(x: Tensor) -> Tensor:
    """Return GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def gelu_erf(x: Tensor) -> Tensor:
    """Return GELU by its definition with the error function."""
    return F.gelu(x)


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), an approximation of GELU (D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units",
    2016)."""
    wide = at_least_float32(x)
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """Return x times the sigmoid of `gate`, one for each value of x or for several. Neither is read again."""
    alike = gate.dtype == x.dtype and gate.shape == x.shape
    return gate.sigmoid_().mul_(x) if in_place(gate) and alike else x * torch.sigmoid(gate)


def geglu(x: Tensor) -> Tensor:
    """Return the first half of x [... 2C] times GELU of the second, [... C] (N. Shazeer, "GLU Variants Improve
    Transformer", 2020)."""
    values, gate = x.chunk(2, dim=-1)
    return gated_gelu_erf(gate, values)


def gated_gelu_erf(gate: Tensor, values: Tensor) -> Tensor:
    """Return `values` times GELU, by its definition, of `gate`. Neither is read again."""
    gate = F.gelu(gate)
    return seen("geglu", "", gate.mul_(values) if in_place(gate) else gate * values)


def gated_gelu(gate: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values` times GELU, by its tanh approximation, of `gate`, in float32 and rounded to `dtype` once: the
    product may exceed float16 where neither factor does. Neither is read again."""
    product = F.gelu(at_least_float32(gate), approximate="tanh") * at_least_float32(values)
    return seen("gated_gelu", "", product.to(dtype))


def shift(x: Tensor, rows: Tensor) -> Tensor:
    """Add a number per channel [1 or B, C] to an image [B C h w], in the image's dtype. The image is not read again."""
    rows = rows.to(x.dtype)[:, :, None, None]
    return seen("shift", "", x.add_(rows) if in_place(x) else x + rows)


def pad_right_bottom(x: Tensor) -> Tensor:
    """Pad an image with one row of zeros below and one column to the right."""
    return F.pad(x, (0, 1, 0, 1))


def averaged_pairs(x: Tensor) -> Tensor:
    """Return the means of 2 x 2 pixels, of fewer at an odd edge: [B C h w] -> [B C ceil(h/2) ceil(w/2)]."""
    return F.avg_pool2d(x, 2, 2, ceil_mode=True)


def averaged_patches(x: Tensor, channels: int, frames: int) -> Tensor:
    """Return an image with half the sides, [B C 2h 2w] -> [B channels h w]: each channel is the mean of equal groups of
    values in the order (c, frame, dy, dx). x is the last of the frames; earlier ones are zeros."""
    y = F.pixel_unshuffle(x, 2).unflatten(1, (-1, 1, 4))
    y = F.pad(y, (0, 0, 0, 0, 0, 0, frames - 1, 0)) if frames > 1 else y
    return y.flatten(1, 3).unflatten(1, (channels, -1)).mean(2)


def averaged_channels(x: Tensor, channels: int) -> Tensor:
    """Return an image [B C h w] -> [B channels h w], each channel the mean of as many neighbours."""
    return x.unflatten(1, (channels, -1)).mean(2)


def repeated_channels(x: Tensor, count: int) -> Tensor:
    """Return an image with each channel `count` times, [B C h w] -> [B count*C h w]."""
    return x.repeat_interleave(count, dim=1)


def spread_channels(x: Tensor, channels: Sequence[int]) -> Tensor:
    """Return an image with twice the sides, [B C h w] -> [B C' 2h 2w]. `channels` [4C'] selects the channel of x for
    each pixel of a patch, in the order (c, dy, dx)."""
    return F.pixel_shuffle(x[:, torch.tensor(channels, device=x.device)], 2)


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Return u + scale (c - u) with each token [C] rescaled to the length of c, in float32."""
    c, u = at_least_float32(conditional), at_least_float32(unconditional)
    combined = u + scale * (c - u)
    return combined * (_length(c) / _length(combined))


def rescale(guided: Tensor, conditional: Tensor, share: float) -> Tensor:
    """Return `guided` with its standard deviation moved by the fraction `share` towards `conditional`'s, both [B C h
    w], in float32 (S. Lin et al., "Common Diffusion Noise Schedules and Sample Steps are Flawed", 2023)."""
    g, c = at_least_float32(guided), at_least_float32(conditional)
    ratio = torch.std(c, dim=(1, 2, 3), keepdim=True) / torch.std(g, dim=(1, 2, 3), keepdim=True)
    return g * (share * ratio + (1 - share))


def shortened(guided: Tensor, conditional: Tensor, most: float, each: bool = False) -> Tensor:
    """Return `guided` with at most `most` times the length of `conditional`, both as one vector, or token by token
    [C] if `each`, in float32."""
    g, c = at_least_float32(guided), at_least_float32(conditional)
    ratio = _length(c) / _length(g) if each else torch.linalg.vector_norm(c) / torch.linalg.vector_norm(g)
    return g * torch.clamp(most * ratio, max=1)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)
