"""Shortcuts of an opened denoiser beside their plain form, on the calls of a run: what a backend passes to be compared.

A compiled block is called a second time, uncompiled. Of a layer whose weight is quantized a part of its input, output
and weight is passed, from which the product can be made in float64. Outside of the contexts nothing is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from numpy.typing import NDArray

from qwenimg.common.quant.quantized_tensor import QuantizedTensor
from qwenimg.common.runtime.traced import Tree
from qwenimg.common.weights.storage import QuantFormat

MOST = 128  # tokens, and outputs of a layer, that are compared, at even distances


@dataclass(frozen=True, kw_only=True)
class CompiledCall:
    """One call of a compiled block: its arguments, its results, and the results of the same block uncompiled."""

    path: str
    arguments: tuple[Tree, ...]
    results: Tree
    plain: Tree


@dataclass(frozen=True, kw_only=True)
class ProductCall:
    """A part of one call of a layer whose weight is quantized, without LoRA branches."""

    path: str
    dtype: str  # of the product
    rounded: str  # the dtype in which the layer takes its input
    x: NDArray[Any]  # [tokens in], not rounded
    result: NDArray[Any]  # [tokens outputs]
    weight: QuantizedTensor  # its rows for these outputs
    code: QuantFormat
    bias: NDArray[Any] | None  # [outputs]


# Returns whether the block stays compiled
CompiledLook: TypeAlias = Callable[[CompiledCall], bool]
ProductLook: TypeAlias = Callable[[ProductCall], None]


def even(count: int) -> slice:
    """Return at most MOST of `count` places, at even distances."""
    return slice(None, None, -(-count // MOST))


@contextmanager
def replaced(
    modules: Iterable[tuple[str, Any]], method: str, call: Callable[..., Any], stays: Callable[[str], bool]
) -> Iterator[None]:
    """While the context is open, call(path, module, own, *arguments) in place of `method` of each of `modules`, by
    their paths; `own` is the module's own method. Afterwards too where `stays(path)`."""
    kinds = [(path, module, type(module)) for path, module in modules]
    for path, module, kind in kinds:
        module.__class__ = type(kind.__name__, (kind,), {method: _calling(getattr(kind, method), path, call)})
    try:
        yield
    finally:
        for path, module, kind in kinds:
            if not stays(path):
                module.__class__ = kind


def products(
    layers: Iterable[tuple[str, Any]], method: str, look: ProductLook, numpy: Callable[[Any], NDArray[Any]], plain: Any
) -> AbstractContextManager[None]:
    """Pass each call of `layers`, by their paths, whose weights are quantized, to `look` while the context is open.
    method: that a call calls; numpy: makes an array of the backend numpy, exactly; plain: the branch of a layer without
    LoRAs."""

    def called(path: str, layer: Any, own: Any, x: Any, *out: Any) -> Any:
        result, branch = own(x, *out), layer.branch
        without = result
        if branch:
            layer.branch = plain
            try:
                without = own(x)
            finally:
                layer.branch = branch
        look(_product_call(path, layer, x, without, numpy))
        return result

    return replaced(layers, method, called, lambda path: False)


def _product_call(path: str, layer: Any, x: Any, result: Any, numpy: Callable[[Any], NDArray[Any]]) -> ProductCall:
    inputs, outputs = x.reshape(-1, x.shape[-1]), result.reshape(-1, result.shape[-1])
    tokens, rows = even(len(inputs)), even(outputs.shape[-1])
    dtype, bias = str(layer.dtype).rpartition(".")[2], getattr(layer, "bias", None)
    return ProductCall(
        path=path,
        dtype="int8" if getattr(layer, "int8", False) else dtype if layer.compute is None else layer.compute.dtype,
        rounded=dtype,
        x=numpy(inputs[tokens]),
        result=numpy(outputs[tokens, rows]),
        weight=layer.outputs(rows),
        code=layer.code,
        bias=None if bias is None else numpy(bias[rows]),
    )


def _calling(method: Callable[..., Any], path: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def called(module: Any, *arguments: Any) -> Any:
        return call(path, module, partial(method, module), *arguments)

    return called
