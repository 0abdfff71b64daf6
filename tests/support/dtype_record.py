"""A record of the dtypes that went into every matrix product, convolution, attention and norm.

It is taken from the frameworks themselves, not from the models' own observers: from torch's dispatcher, and from MLX's
functions. Of the models' code only the layers are wrapped, to tell for whom a call was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qwenimg.common.parity.parity import dtype_name
from support.parity_cases import Twin

LAYERS = {"Linear": "product", "Conv2d": "convolution", "RMSNorm": None, "ChannelNorm": None}
FUNCTIONS = {"norm_modulate": None, "attention": "attention", "spatial_attention": "attention"}
STREAMS = ("gated", "residual")  # what adds to a residual stream: the dtypes of the stream before and after

# torch operation -> kind; whole operations, and what they become outside of inference mode.
ATEN = {
    "linear": "product",
    "mm": "product",
    "addmm": "product",
    "bmm": "product",
    "baddbmm": "product",
    "matmul": "product",
    "einsum": "product",
    "conv2d": "convolution",
    "convolution": "convolution",
    "layer_norm": "layer_norm",
    "native_layer_norm": "layer_norm",
    "rms_norm": "rms_norm",
    "_fused_rms_norm": "rms_norm",
    "sum": "sum",
}
MLX_FUNCTIONS = {
    "matmul": "product",
    "addmm": "product",
    "einsum": "product",
    "tensordot": "product",
    "inner": "product",
    "gather_mm": "product",
    "conv2d": "convolution",
    "conv_general": "convolution",
    "fast.scaled_dot_product_attention": "attention",
    "fast.layer_norm": "layer_norm",
    "fast.rms_norm": "rms_norm",
    "sum": "sum",
}


@dataclass(frozen=True)
class Call:
    label: str  # the layer's parameter path, or the function of `nn` that made the call
    kind: str
    dtypes: tuple[str, ...]  # of every floating input, the bias included
    holds: tuple[str, ...] = ()  # the 16-bit dtypes that could hold every value of the inputs
    result: bool = False  # whether `dtypes` is that of what the layer returned


@contextmanager
def recorded(twin: Twin) -> Iterator[list[Call]]:
    """Every call while the context is open, in order."""
    calls: list[Call] = []
    labels, quiet = [""], []

    def note(kind: str, arrays: Iterable[object]) -> None:
        if quiet:
            return
        floats = [a for a in arrays if hasattr(a, "dtype") and hasattr(a, "shape") and "float" in dtype_name(a)]
        quiet.append(True)  # the look at the values is no call of the model's
        holds = tuple(d for d in ("bfloat16", "float16") if all(_holds(twin, a, d) for a in floats))
        quiet.pop()
        calls.append(Call(labels[-1], kind, tuple(map(dtype_name, floats)), holds))

    with ExitStack() as stack:
        for name, kind in LAYERS.items():
            layer, method = getattr(twin.nn, name), "forward" if twin.name == "torch" else "__call__"
            wrapped = _labelled(getattr(layer, method), calls, labels, lambda self, *_: self.path, kind)
            stack.enter_context(mock.patch.object(layer, method, wrapped))
        for name, kind in FUNCTIONS.items():
            wrapped = _labelled(getattr(twin.nn, name), calls, labels, lambda *_, name=name: name, kind)
            for owner in (twin.nn, twin.attending):  # a layer calls the function of its own module
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, wrapped))
        for name in STREAMS:
            stack.enter_context(mock.patch.object(twin.nn, name, _stream(getattr(twin.nn, name), calls, name)))
        if twin.name == "torch":
            stack.enter_context(_Dispatch(note))
        else:
            for patch in _mlx_patches(note):
                stack.enter_context(patch)
        yield calls


def _labelled(function, calls: list[Call], labels: list[str], label, kind: str | None):
    """`function` with the calls inside it labelled, and its result's dtype noted where it has a `kind`."""

    def call(*arguments, **options):
        labels.append(label(*arguments))
        try:
            result = function(*arguments, **options)
        finally:
            name = labels.pop()
        if kind:
            calls.append(Call(name, kind, (dtype_name(result),), result=True))
        return result

    return call


def _holds(twin: Twin, array, dtype: str) -> bool:
    if dtype_name(array) == dtype:
        return True
    if twin.name == "torch":
        return bool((array.to(getattr(torch, dtype)).to(array.dtype) == array).all())
    import mlx.core as mx

    return bool(mx.array_equal(array.astype(getattr(mx, dtype)).astype(array.dtype), array).item())


def _stream(function, calls: list[Call], name: str):
    def call(x, *arguments):
        result = function(x, *arguments)
        calls.append(Call(name, "stream", (dtype_name(x), dtype_name(result))))
        return result

    return call


class _Dispatch(TorchDispatchMode):
    def __init__(self, note) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.partition(".")[0]
        kind = "attention" if "scaled_dot_product" in name else ATEN.get(name)
        if kind:
            self.note(kind, torch.utils._pytree.tree_leaves((args, kwargs)))
        return function(*args, **(kwargs or {}))


def _mlx_patches(note) -> Iterator:
    import mlx.core as mx

    def noted(function, kind: str):
        def call(*arguments, **options):
            note(kind, (*arguments, *options.values()))
            return function(*arguments, **options)

        return call

    for name, kind in MLX_FUNCTIONS.items():
        owner = mx.fast if name.startswith("fast.") else mx
        leaf = name.removeprefix("fast.")
        yield mock.patch.object(owner, leaf, noted(getattr(owner, leaf), kind))
    yield mock.patch.object(mx.array, "__matmul__", noted(mx.array.__matmul__, "product"))
