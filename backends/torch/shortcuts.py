"""Shortcuts of a model beside their plain form: compiled blocks, and products of quantized weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.ops import crossing
from qwenimg.backends.torch.ops.quantized import QuantizedLinear
from qwenimg.common.runtime.shortcuts import CompiledCall, CompiledLook, ProductCall, ProductLook, even, replaced


@contextmanager
def compiled(model: torch.nn.Module, look: CompiledLook) -> Iterator[None]:
    """Pass each call of a compiled module to `look` while the context is open. A module that does not stay compiled is
    never called compiled again."""
    found = [(path, unit) for path, unit in model.named_modules() if unit._compiled_call_impl is not None]
    calls = {path: unit._compiled_call_impl for path, unit in found}

    def called(path: str, unit: Any, *arguments: Any) -> Any:
        inputs = tuple(crossing.outward(one, False) for one in arguments)
        results, plain = calls[path](*arguments), unit._call_impl(*arguments)
        values = (crossing.outward(one, False) for one in (results, plain))
        if look(CompiledCall(path=path, arguments=inputs, results=next(values), plain=next(values))):
            return results
        calls[path] = unit._compiled_call_impl = None
        return plain

    for path, unit in found:
        unit._compiled_call_impl = partial(called, path, unit)  # in its place: a change of its class would compile anew
    try:
        yield
    finally:
        for path, unit in found:
            unit._compiled_call_impl = calls[path]


def products(model: torch.nn.Module, look: ProductLook) -> AbstractContextManager[None]:
    """Pass each call of a layer whose weight is quantized to `look` while the context is open."""
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, QuantizedLinear)]

    def called(path: str, layer: QuantizedLinear, own: Any, x: Tensor, *out: Tensor) -> Tensor:
        result: Tensor = own(x, *out)
        look(_part(path, layer, x, result if layer.branch is None else _without_branch(layer, own, x)))
        return result

    return replaced(layers, "forward", called, lambda path: False)


def _without_branch(layer: QuantizedLinear, own: Any, x: Tensor) -> Tensor:
    branch, layer.branch = layer.branch, None
    try:
        result: Tensor = own(x)
        return result
    finally:
        layer.branch = branch


def _part(path: str, layer: QuantizedLinear, x: Tensor, result: Tensor) -> ProductCall:
    inputs, outputs = x.reshape(-1, x.shape[-1]), result.reshape(-1, result.shape[-1])
    tokens, rows = even(len(inputs)), even(layer.out_features)
    return ProductCall(
        path=path,
        dtype=str(layer.dtype).rpartition(".")[2] if layer.compute is None else layer.compute.dtype,
        rounded=str(layer.dtype).rpartition(".")[2],
        x=ops.numpy(inputs[tokens]),
        result=ops.numpy(outputs[tokens, rows]),
        weight=layer.outputs(rows),
        code=layer.code,
        bias=None if layer.bias is None else ops.numpy(layer.bias[rows]),
    )
