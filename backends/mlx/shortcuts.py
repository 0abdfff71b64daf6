"""Shortcuts of a model beside their plain form: blocks with compiled chains, and products of quantized weights."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

import mlx.nn

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.compile import fusing
from qwenimg.backends.mlx.ops import crossing
from qwenimg.backends.mlx.ops.quantized import QuantizedLinear
from qwenimg.common.runtime import shortcuts
from qwenimg.common.runtime.shortcuts import CompiledCall, CompiledLook, ProductLook, replaced


def compiled(model: mlx.nn.Module, paths: re.Pattern[str], look: CompiledLook) -> AbstractContextManager[None]:
    """Pass each call of a module at `paths` to `look` while the context is open. The chains of a module that does not
    stay compiled are never called compiled again."""
    blocks = [(path, module) for path, module in model.named_modules() if paths.fullmatch(path)]
    uncompiled = set[str]()

    def called(path: str, block: Any, own: Any, *arguments: Any) -> Any:
        if path not in uncompiled:
            results = own(*arguments)
            with fusing(False):
                plain = own(*arguments)
            inputs = tuple(crossing.outward(one, False) for one in arguments)
            values = (crossing.outward(one, False) for one in (results, plain))
            if look(CompiledCall(path=path, arguments=inputs, results=next(values), plain=next(values))):
                return results
            uncompiled.add(path)
        with fusing(False):
            return own(*arguments)

    return replaced(blocks, "__call__", called, uncompiled.__contains__)


def products(model: mlx.nn.Module, look: ProductLook) -> AbstractContextManager[None]:
    """Pass each call of a layer whose weight is quantized to `look` while the context is open."""
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    return shortcuts.products(layers, "__call__", look, ops.numpy, plain=())
