"""Products with what is next to them inside, so that it is no pass over memory of its own: two results in one place, an
activation, a sum with a residual stream. Elsewhere the same in plain operations."""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch.ops import images
from qwenimg.backends.torch.ops.cpu import multiplies
from qwenimg.backends.torch.ops.functions import geglu, gelu, residual, stream
from qwenimg.backends.torch.ops.layers import Conv2d, Linear
from qwenimg.common.runtime.observers import observed


def _takes_more(layer: Linear | Conv2d) -> bool:
    """Whether a product of a card does more than this layer: in 16 bit, where nobody wants to see the layer's own
    result."""
    if not layer.plain or layer.dtype not in (torch.bfloat16, torch.float16):
        return False
    assert layer.bias is not None
    return layer.bias.device.type in ("cuda", "meta") and not torch.is_grad_enabled() and not observed()


def joined_linears(first: Linear, x: Tensor, second: Linear, y: Tensor) -> Tensor:
    """A layer of x [B S C] and one of y [B L C] as [B S+L C'], each written into its place."""
    layers, dtype, S = (first, second), first.dtype, x.shape[1]
    plain = all(layer.plain and layer.dtype == dtype for layer in layers)
    away = torch.is_grad_enabled() or torch.compiler.is_compiling() or not multiplies(dtype, x.device.type)
    if away or not plain:
        return torch.cat((first(x), second(y)), dim=1)
    both = x.new_empty((x.shape[0], S + y.shape[1], first.out_features), dtype=dtype)
    first(x, both[:, :S])
    second(y, both[:, S:])
    return both


def linear_gelu(layer: Linear, x: Tensor) -> Tensor:
    """GELU by its tanh approximation of a linear layer. NVIDIA's product has it inside for 16 bit, before its one
    rounding."""
    if not _takes_more(layer):
        return gelu(layer(x))
    rows = x.to(layer.dtype).flatten(0, -2)
    return torch._addmm_activation(layer.bias, rows, layer.weight.t(), use_gelu=True).unflatten(0, x.shape[:-1])


def linear_geglu(layer: Linear, x: Tensor) -> Tensor:
    """Return the first half of a linear layer's result times GELU of the second: [... in] -> [... out/2]."""
    return geglu(layer(x))


def add_linear(x: Tensor, layer: torch.nn.Module, update: Tensor) -> Tensor:
    """x [B L C] and a linear layer of `update` [B L in], in x's dtype. A product adds to what is there, so that what is
    left is a pass for the bias, which a compiler has beside the norm in front."""
    assert isinstance(layer, Linear)
    if not _takes_more(layer) or x.dtype != layer.dtype:
        return residual(x, layer(update))
    return _accumulated((x + layer.bias).contiguous(), update, layer.weight)


def add_shortcut(update: Tensor, layer: Conv2d, x: Tensor) -> Tensor:
    """`update` [B C h w] and a 1x1 convolution of the stream x [B in h w], which is in x's dtype the stream from here
    on: the same way."""
    if not _takes_more(layer) or not update.dtype == x.dtype == layer.dtype:
        return residual(stream(layer(x), x.dtype), update)
    assert layer.bias is not None
    start = images.tokens(update + layer.bias[:, None, None]).contiguous()
    return images.image(_accumulated(start, images.tokens(x), layer.weight.flatten(1)), update)


def _accumulated(made: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`made` [B L C], into which the product of x [B L in] and `weight` [C in] is added."""
    there, rows = made.flatten(0, -2), x.to(weight.dtype).flatten(0, -2)
    if torch.compiler.is_compiling():
        torch.ops.qwenimg.accumulate(there, rows, weight)  # `addmm` would become one that copies `there` first
    else:
        there.addmm_(rows, weight.t())
    return made
