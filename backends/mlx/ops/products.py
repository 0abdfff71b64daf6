"""Products fused with their neighbours, which saves a pass over memory: a sum with a residual stream. Where no fused
kernel exists, plain operations give the same."""

from __future__ import annotations

import mlx.core as mx
from mlx.core import array as Array

from qwenimg.backends.mlx.ops import images
from qwenimg.backends.mlx.ops.functions import add, geglu, gelu, on_gpu, residual, stream
from qwenimg.backends.mlx.ops.layers import Conv2d, Linear
from qwenimg.common.runtime.observers import observed


def _can_fuse(layer: Linear | Conv2d) -> bool:
    """Return whether a GPU's product can fuse more than this layer: in 16 bit, where nobody observes the layer's own
    result."""
    return on_gpu() and layer.plain and layer.dtype in (mx.bfloat16, mx.float16) and not observed()


def joined_linears(first: Linear, x: Array, second: Linear, y: Array) -> Array:
    """Return a layer of x [B S C] and one of y [B L C] as [B S+L C']."""
    return mx.concatenate((first(x), second(y)), axis=1)


def linear_gelu(layer: Linear, x: Array) -> Array:
    """Return GELU, by its tanh approximation, of a linear layer."""
    return gelu(layer(x))


def linear_geglu(layer: Linear, x: Array) -> Array:
    """Return the first half of a linear layer's result times GELU of the second: [... in] -> [... out/2]. MLX has no
    product that ends with that."""
    return geglu(layer(x))


def add_linear(x: Array, layer: Linear, update: Array) -> Array:
    """Return x [B L C] plus a linear layer of `update` [B L in], in x's dtype. The product adds to x in place, which
    leaves one pass for the bias."""
    if not _can_fuse(layer) or x.dtype != layer.dtype:
        return residual(x, layer(update))
    return mx.addmm(add(x, layer.bias), update.astype(layer.dtype), layer.weight.T)


def add_shortcut(update: Array, layer: Conv2d, x: Array) -> Array:
    """Return `update` [B h w C] plus a 1x1 convolution of the stream x [B h w in], in x's dtype: the new stream.
    Fused as in `add_linear`."""
    if not _can_fuse(layer) or not update.dtype == x.dtype == layer.dtype:
        return residual(stream(layer(x), x.dtype), update)
    start, weight = images.tokens(add(update, layer.bias)), layer.weight.reshape(layer.weight.shape[0], -1)
    return images.image(mx.addmm(start, images.tokens(x), weight.T), update)
