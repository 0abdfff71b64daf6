"""Machines that compute the same with other kernels: other blocking, order of sums and threads, attention fused or not.

Each is planted as a fault is, and is none: a passport of the usual kernels is to hold on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qwenimg.common.runtime.observers import seen
from support.mutant import Mutant, Patch

Product = Callable[[Any, Any], Any]  # of x [... K] and weight [out K]


def _product(x: Any, weight: Any) -> Any:
    return x @ weight.swapaxes(0, 1)


def _linear(patch: Patch, product: Product, *, bias_after: bool = False) -> None:
    """Make every linear layer of plain weights compute by `product` in float32, rounded once; `bias_after`: once
    before the bias as well."""
    backend = patch.backend

    def computed(layer: Any, x: Any, y: Any) -> Any:
        if type(layer).__name__ != "Linear" or layer.compute is not None or layer.branch:
            return y
        x, weight = (backend.cast(backend.like(part, layer.weight), "float32") for part in (x, layer.weight))
        bias, made = getattr(layer, "bias", None), product(x, weight)
        if bias is None:
            return backend.like(made, y)
        return backend.like(made, y) + bias if bias_after else backend.like(made + backend.cast(bias, "float32"), y)

    patch.layer("Linear", computed)


def sums_in_another_order(patch: Patch) -> None:
    roll = patch.backend.lib.roll

    def rolled(x: Any, weight: Any) -> Any:
        part = x.shape[-1] // 3
        return _product(roll(x, part, -1), roll(weight, part, -1))

    _linear(patch, rolled)


def _split(x: Any, weight: Any) -> Any:
    half = x.shape[-1] // 2
    return _product(x[..., :half], weight[:, :half]) + _product(x[..., half:], weight[:, half:])


def sums_in_two_parts(patch: Patch) -> None:
    _linear(patch, _split)


def bias_after_a_rounding(patch: Patch) -> None:
    _linear(patch, _split, bias_after=True)


def blocks_of_rows(patch: Patch) -> None:
    def blocked(x: Any, weight: Any) -> Any:
        parts = [_product(x, weight[i : i + 7]) for i in range(0, weight.shape[0], 7)]
        return patch.backend.join(parts, -1)

    _linear(patch, blocked)


def attention_not_fused(patch: Patch) -> None:
    _attention(patch, lambda scores, v, dtype: patch.backend.lib.softmax(scores, -1) @ v)


def weights_of_attention_rounded(patch: Patch) -> None:
    """As flash kernels do before they multiply the values."""
    backend = patch.backend

    def rounded(scores: Any, v: Any, dtype: str) -> Any:
        shares = backend.lib.softmax(scores, -1)
        return backend.cast(backend.cast(shares, dtype), "float32") @ v

    _attention(patch, rounded)


def attention_in_blocks_of_keys(patch: Patch) -> None:
    """Each block's softmax is scaled to that of all."""
    backend, lib = patch.backend, patch.backend.lib

    def blocked(scores: Any, v: Any, dtype: str) -> Any:
        half = scores.shape[-1] // 2 + 1
        largest = lib.amax(scores, -1)[..., None] if backend.torch else lib.max(scores, -1)[..., None]
        parts = [lib.exp(part - largest) for part in (scores[..., :half], scores[..., half:])]
        total = parts[0].sum(-1)[..., None] + parts[1].sum(-1)[..., None]
        return (parts[0] @ v[..., :half, :] + parts[1] @ v[..., half:, :]) / total

    _attention(patch, blocked)


def _attention(patch: Patch, attended: Callable[[Any, Any, str], Any]) -> None:
    """Make attention what `attended` makes of float32 scores and values, and of the dtype that they had."""
    backend = patch.backend

    def plain(attend: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
        shared = q.shape[2] // k.shape[2]
        k, v_ = (backend.join([x[:, :, i // shared : i // shared + 1] for i in range(q.shape[2])], 2) for x in (k, v))
        q, k, v_ = (backend.cast(backend.like(x, v), "float32").swapaxes(1, 2) for x in (q, k, v_))
        scores = (q * q.shape[-1] ** -0.5) @ k.swapaxes(2, 3)
        if causal:
            mask = backend.array(np.tri(scores.shape[2], dtype=bool)[None, None])
        if mask is not None:
            scores = backend.lib.where(mask, scores, backend.array(np.full((1, 1, 1, 1), -1e30, np.float32)))
        made = attended(scores, v_, str(v.dtype).rpartition(".")[2]).swapaxes(1, 2)
        return seen("attention", "", backend.like(made.reshape(*made.shape[:2], -1), v))

    patch.attention(plain)


def channels_in_another_order(patch: Patch) -> None:
    """The sums of a convolution over its input channels."""
    backend, axis = patch.backend, patch.backend.axes()[0]

    def rolled(convolve: Any, layer: Any, x: Any) -> Any:
        part, weight = x.shape[axis] // 3, layer.weight
        layer.weight = backend.parameter(backend.lib.roll(weight, part, axis))
        try:
            return convolve(layer, backend.lib.roll(x, part, axis))
        finally:
            layer.weight = weight

    patch.around(backend.ops.Conv2d, backend.calls, rolled)


def usual(patch: Patch) -> None:
    """The kernels of this machine: of the other backend, or the very same."""


HEALTHY = (
    Mutant(usual, "the usual kernels"),
    Mutant(sums_in_another_order, "sums in another order, rounded once"),
    Mutant(sums_in_two_parts, "sums in two parts, rounded once"),
    Mutant(bias_after_a_rounding, "sums in two parts, the bias after a rounding"),
    Mutant(blocks_of_rows, "sums in blocks of rows"),
    Mutant(attention_not_fused, "attention not fused"),
    Mutant(weights_of_attention_rounded, "attention's weights rounded"),
    Mutant(attention_in_blocks_of_keys, "attention in blocks of keys"),
    Mutant(channels_in_another_order, "convolutions summed in another order"),
)
