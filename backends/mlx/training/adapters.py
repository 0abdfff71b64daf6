"""LoRA factors that train beside frozen networks, on MLX: `common/runtime/engine.py` explains the methods.

A checkpointed function gives no gradient, and no error, to arrays that it captures: a block takes the factors of its
layers as arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx.core import array as Array
from mlx.utils import tree_map

from qwenimg.backends.mlx.ops import Linear
from qwenimg.backends.mlx.ops.device import traced
from qwenimg.backends.mlx.ops.layers import rotate
from qwenimg.common.runtime import factor_names
from qwenimg.common.runtime.factor_names import DOWN, UP

_PLACE = ...  # of an array in a result


class MLXAdapters:
    def __init__(self, values: Mapping[str, np.ndarray], recomputed: re.Pattern[str] | None):
        self.parameters = {name: mx.array(one.astype(np.float32)) for name, one in values.items()}
        self.differentiates = False
        self._recomputed, self._layers = recomputed, dict[str, Linear]()
        self._loaded: dict[str, tuple[Array, ...]] = {}  # the branches of LoRAs that the model has
        self._blocks: list[tuple[Any, type]] = []  # of the denoiser, with the class that each had
        self._opened = dict[str, Any]()  # the network of each part

    def put(self, parameters: dict[str, Array]) -> None:
        self.parameters = parameters
        self._branch(parameters)

    def learning(self) -> AbstractContextManager[None]:
        return nullcontext()

    def attach(self, opened: Any, part: str = "") -> None:
        if self._opened.get(part) is opened:
            return
        self._detach(part)
        modules = dict(opened.model.named_modules())
        for name in factor_names.layers(self.parameters, part):
            layer = self._layers[name] = modules[factor_names.split(name)[1]]
            self._loaded[name] = layer.branch
        if self._recomputed is not None and not part:
            blocks = [(path, module) for path, module in modules.items() if self._recomputed.fullmatch(path)]
            self._blocks = [(module, type(module)) for _, module in blocks]
            for path, module in blocks:
                own = [layer for name, layer in self._layers.items() if name.startswith(f"{path}.")]
                module.__class__ = _recomputing(type(module), own, self)
        self._opened[part] = opened
        self._branch(self.parameters)

    def gradients(self, loss: Callable[[], Array], scale: float = 1.0) -> tuple[float, dict[str, Array]]:
        def scaled(factors: dict[str, Array]) -> tuple[Array, Array]:
            self._branch(factors)
            value = loss()
            return value * scale, value

        self.differentiates = True
        try:
            with traced():
                (_, value), gradients = mx.value_and_grad(scaled)(self.parameters)
            mx.eval(value, gradients)
        finally:
            self.differentiates = False
            self._branch(self.parameters)
        return float(value.item()), gradients

    def value(self, loss: Callable[[], Array]) -> float:
        return float(loss().item())

    def detach(self) -> None:
        for part in [*self._opened]:
            self._detach(part)

    def _detach(self, part: str) -> None:
        if self._opened.pop(part, None) is None:
            return
        for name in factor_names.layers(self.parameters, part):
            self._layers.pop(name).branch = self._loaded.pop(name)
        for module, kind in [] if part else self._blocks:
            module.__class__ = kind

    def evaluated(self, arrays: dict[str, Array]) -> dict[str, Array]:
        mx.eval(arrays)
        return arrays

    def _branch(self, factors: Mapping[str, Array]) -> None:
        """Make these factors the branches of the layers, each in its layer's dtype, beside those that are loaded."""
        for name, layer in self._layers.items():
            down, up = factors[name + DOWN], factors[name + UP]
            turned = rotate(down, layer.rotation) if layer.rotation else down
            down, up = turned.astype(layer.dtype), up.astype(layer.dtype)
            if loaded := self._loaded[name]:
                down, up = mx.concatenate((loaded[0], down)), mx.concatenate((loaded[1], up), axis=1)
            layer.branch = (down, up)


def _without_gradient(argument: Any) -> Any:
    """Return an argument of a block; indices without a gradient, which MLX would look for."""
    whole = isinstance(argument, Array) and not mx.issubdtype(argument.dtype, mx.floating)
    return mx.stop_gradient(argument) if whole else argument


def _arrays(tree: Any) -> list[Array]:
    """Return the arrays in lists and tuples, in their order."""
    found = list[Array]()
    tree_map(lambda one: found.append(one) if isinstance(one, Array) else None, tree)
    return found


def _filled(tree: Any, arrays: Sequence[Array]) -> Any:
    """Return `tree` with other arrays."""
    given = iter(arrays)
    return tree_map(lambda one: next(given) if one is _PLACE or isinstance(one, Array) else one, tree)


def _checkpointed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), which is computed again when the gradients have come back to it.

    Unlike with `mx.checkpoint` its gradients are computed together: MLX would go back to the first block and come to
    those of the factors at the end, for which each block would have to keep what checkpointing saves."""
    structure: list[Any] = []  # of the result

    def flat(*arrays: Array) -> list[Array]:
        result = function(*_filled(arguments, arrays))
        structure[:] = [tree_map(lambda one: _PLACE if isinstance(one, Array) else one, result)]
        return _arrays(result)

    def backward(primals: Any, cotangents: Any, _: Any) -> tuple[Array, ...]:
        primals, cotangents = (list(x) if isinstance(x, (list, tuple)) else [x] for x in (primals, cotangents))
        _, gradients = mx.vjp(flat, mx.depends(primals, cotangents), cotangents)
        return tuple(mx.depends(gradients, gradients))

    checkpointed = mx.custom_function(flat)
    checkpointed.vjp(backward)
    results = checkpointed(*_arrays(arguments))
    return _filled(structure[0], results)


def _recomputing(kind: type, layers: list[Linear], adapters: MLXAdapters) -> type:
    """Return the class of a block that runs again in the backward pass. layers: those in it that learn."""
    plain: Callable[..., Any] = kind.__call__

    def call(block: mlx.nn.Module, *arguments: Any) -> Any:
        if not adapters.differentiates:
            return plain(block, *arguments)
        outer = [layer.branch for layer in layers]

        def run(branches: list[tuple[Array, ...]], *inner: Any) -> Any:
            for layer, branch in zip(layers, branches, strict=True):
                layer.branch = branch
            return plain(block, *map(_without_gradient, inner))

        result = _checkpointed(run, outer, *arguments)
        for layer, branch in zip(layers, outer, strict=True):
            layer.branch = branch
        return result

    return type(kind.__name__, (kind,), {"__call__": call})
