"""Products fused with their neighbours, which saves a pass over memory: two results in one tensor, an activation, a
sum with a residual stream. Where no fused kernel exists, plain operations give the same."""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch.ops import images
from qwenimg.backends.torch.ops.cpu import multiplies
from qwenimg.backends.torch.ops.functions import geglu, gelu, residual, stream
from qwenimg.backends.torch.ops.layers import Conv2d, Linear
from qwenimg.common.runtime.observers import observed


def _can_fuse(layer: Linear | Conv2d) -> bool:
    """Return whether a card's product can fuse more than this layer: in 16 bit, where nobody observes the layer's
    own result."""
    if not layer.plain or layer.dtype not in (torch.bfloat16, torch.float16):
        return False
    assert layer.bias is not None
    return layer.bias.device.type in ("cuda", "meta") and not torch.is_grad_enabled() and not observed()


def joined_linears(first: Linear, x: Tensor, second: Linear, y: Tensor) -> Tensor:
    """Return a layer of x [B S C] and one of y [B L C] as [B S+L C'], each written into its place."""
    layers, dtype, S = (first, second), first.dtype, x.shape[1]
    plain = all(layer.plain and layer.dtype == dtype for layer in layers)
    unfused = torch.is_grad_enabled() or torch.compiler.is_compiling() or not multiplies(dtype, x.device.type)
    if unfused or not plain:
        return torch.cat((first(x), second(y)), dim=1)
    result = x.new_empty((x.shape[0], S + y.shape[1], first.out_features), dtype=dtype)
    first(x, result[:, :S])
    second(y, result[:, S:])
    return result


def linear_gelu(layer: Linear, x: Tensor) -> Tensor:
    """Return GELU, by its tanh approximation, of a linear layer. NVIDIA's 16-bit product applies it inside, before
    its one rounding."""
    if not _can_fuse(layer):
        return gelu(layer(x))
    rows = layer.turned(x).to(layer.dtype).flatten(0, -2)
    return torch._addmm_activation(layer.bias, rows, layer.weight.t(), use_gelu=True).unflatten(0, x.shape[:-1])


def linear_geglu(layer: Linear, x: Tensor) -> Tensor:
    """Return the first half of a linear layer's result times GELU of the second: [... in] -> [... out/2]."""
    return geglu(layer(x))


def add_linear(x: Tensor, layer: torch.nn.Module, update: Tensor) -> Tensor:
    """Return x [B L C] plus a linear layer of `update` [B L in], in x's dtype.

    The product adds to x in place, which leaves one pass for the bias; a compiler fuses that with the norm in front.
    """
    assert isinstance(layer, Linear)
    if not _can_fuse(layer) or x.dtype != layer.dtype:
        return residual(x, layer(update))
    return _accumulated((x + layer.bias).contiguous(), layer.turned(update), layer.weight)


def add_shortcut(update: Tensor, layer: Conv2d, x: Tensor) -> Tensor:
    """Return `update` [B C h w] plus a 1x1 convolution of the stream x [B in h w], in x's dtype: the new stream.
    Fused as in `add_linear`."""
    if not _can_fuse(layer) or not update.dtype == x.dtype == layer.dtype:
        return residual(stream(layer(x), x.dtype), update)
    assert layer.bias is not None
    start = images.tokens(update + layer.bias[:, None, None]).contiguous()
    return images.image(_accumulated(start, images.tokens(x), layer.weight.flatten(1)), update)


def _accumulated(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Add the product of x [B L in] and `weight` [C in] to `total` [B L C], and return it."""
    flat, rows = total.flatten(0, -2), x.to(weight.dtype).flatten(0, -2)
    if torch.compiler.is_compiling():
        torch.ops.qwenimg.accumulate(flat, rows, weight)  # a compiled `addmm_` would copy `flat` first
    else:
        flat.addmm_(rows, weight.t())
    return total
