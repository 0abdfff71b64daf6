"""Shortcuts of a model beside their plain form: compiled blocks, and products of quantized weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.ops import crossing
from qwenimg.backends.torch.ops.quantized import QuantizedLinear
from qwenimg.common.runtime import shortcuts
from qwenimg.common.runtime.shortcuts import CompiledCall, CompiledLook, ProductLook


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
    return shortcuts.products(layers, "forward", look, ops.numpy, plain=None)
