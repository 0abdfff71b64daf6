"""Execution of a LoadPlan: bytes -> array -> dtype and layout -> parameter. Every value is checked to be finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.ops import DTYPES, Linear, writable
from qwenimg.backends.mlx.ops.quantized import QuantizedLinear
from qwenimg.common.formats.arrays import WORTH_A_THREAD
from qwenimg.common.formats.stored import NUMPY, into
from qwenimg.common.formats.tensor_file import NAME, TensorFile
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.weights.plan import Entry, LoadPlan
from qwenimg.common.weights.storage import Packed
from qwenimg.common.weights.values import check_largest, read, read_branch, read_finite, read_quantized

Model = TypeVar("Model", bound=mlx.nn.Module)
Result = TypeVar("Result")


def empty(build: Callable[[], Model], precision: Precision | None = None, role: str = "") -> Model:
    """Build a model without memory for its parameters, which are lazy until `fill`. Each layer gets its path, and
    its compute dtype where that differs from its weight's."""
    model = build()
    for path, module in model.named_modules():
        if hasattr(module, "path"):
            module.path = path
        compute = precision.computes(role, path) if precision is not None and hasattr(module, "compute") else None
        if compute is not None:
            module.compute = compute
    return model


def fill(model: mlx.nn.Module, plan: LoadPlan) -> None:
    """Read every tensor of `plan` into the parameter of its name. Every name must be in the model."""
    for entry in plan.entries.values():
        fill_one(model, entry)
    branch(model, plan)


def fill_one(model: mlx.nn.Module, entry: Entry) -> None:
    """Read the values of `entry` into its parameter. Raises ModelError."""
    packed = isinstance(entry.storage, Packed)
    put(model, entry, [mx.array(part) for part in read_quantized(entry).arrays] if packed else [tensor(entry)])


def put(model: mlx.nn.Module, entry: Entry, arrays: Sequence[mx.array]) -> None:
    """Put the arrays of `entry` into its parameter."""
    if isinstance(entry.storage, Packed):
        _pack(model, entry, arrays)
    else:
        _put(model, entry.name, arrays[0])


def branch(model: mlx.nn.Module, plan: LoadPlan) -> None:
    """Give every linear layer whose weight is in `plan` its LoRA branch, or none."""
    for name, entry in plan.entries.items():
        layer, leaf = _owner(model, name)
        if not isinstance(layer, Linear) or leaf != "weight":
            assert not entry.is_branched, name
            continue
        factors = read_branch(entry)
        layer.branch = () if factors is None else tuple(mx.array(part).astype(layer.dtype) for part in factors)


def drop(model: mlx.nn.Module, names: Iterable[str]) -> None:
    """Free these parameters; `fill` can bring them back."""
    for name in names:
        owner, leaf = _owner(model, name)
        if isinstance(owner, Linear) and leaf == "weight":
            owner.branch = ()
        if isinstance(owner, QuantizedLinear) and leaf == "weight":
            owner.drop()
        else:
            _put(model, name, mx.zeros(owner[leaf].shape, owner[leaf].dtype))


def briefly(model: mlx.nn.Module, plan: LoadPlan, prefix: str, use: Callable[[], Result]) -> Result:
    """Return the computed result of `use`, called while the weights under `prefix` that only make modulation are
    loaded."""
    part = plan.when(ONCE).only(lambda name: name.startswith(prefix))
    fill(model, part)
    result = ops.eval(use())
    drop(model, part.entries)
    return result


@contextmanager
def widened(model: mlx.nn.Module, path: str) -> Iterator[None]:
    """Make the module at `path` compute in float32 with the weights that it has, while the context is open."""
    before: list[tuple[mlx.nn.Module, str, Any]] = []  # what the next weights are loaded into: LoRA factors too
    quantized: list[tuple[str, QuantizedLinear]] = []

    def change(module: mlx.nn.Module, attribute: str, value: Any) -> None:
        before.append((module, attribute, getattr(module, attribute)))
        setattr(module, attribute, value)

    for name, module in list(model.named_modules()):
        if path and name != path and not name.startswith(f"{path}."):
            continue
        if isinstance(module, QuantizedLinear):
            quantized.append((name, module))
            _replace(model, name, _decoded(module))
            continue
        if getattr(module, "compute", None) is not None:
            change(module, "compute", None)
        if hasattr(module, "stream"):
            change(module, "stream", mx.float32)
        if isinstance(module, Linear):
            module.branch = tuple(part.astype(mx.float32) for part in module.branch)
        for leaf, value in list(module.items()):
            if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
                module[leaf] = value.astype(mx.float32)
    try:
        yield
    finally:
        for name, layer in quantized:
            _replace(model, name, layer)
        for module, attribute, value in before:
            setattr(module, attribute, value)


def _decoded(layer: QuantizedLinear) -> Linear:
    """Return a linear layer with the values of a quantized one, in float32."""
    weight = layer.weight.astype(mx.float32)
    linear = Linear(weight.shape[1], weight.shape[0], bias="bias" in layer)
    linear.path, linear.weight, linear.rotation = layer.path, weight, layer.rotation
    linear.branch = tuple(part.astype(mx.float32) for part in layer.branch)
    if "bias" in layer:
        linear.bias = layer.bias.astype(mx.float32)
    return linear


def tensor(entry: Entry) -> mx.array:
    """Return one tensor of a checkpoint in the dtype of its storage, finite; convolutions [O I h w] -> [O h w I].
    Raises ModelError."""
    plain = entry.source.is_plain and not entry.fused and entry.nbytes >= WORTH_A_THREAD
    stored = _straight(entry) if plain else _by_numpy(entry)
    return _laid_out(entry, stored)


def _laid_out(entry: Entry, stored: mx.array) -> mx.array:
    """Return `stored` in the layout and dtype of its storage. It is evaluated at once, so that `stored` can be freed:
    MLX would otherwise convert it in the forward, on top of all arrays converted before. It is moved in the smaller of
    the two dtypes."""
    if len(entry.shape) == 4:
        stored = mx.contiguous(stored.transpose(0, 2, 3, 1))
    converted = mx.contiguous(stored.astype(DTYPES[entry.storage.dtype]))
    mx.eval(converted)
    return converted


def _straight(entry: Entry) -> mx.array:
    """Return the tensor, read by MLX in its own thread into its own memory: no copy on the way."""
    file = TensorFile(entry.source.first)
    read: Any = mx.load(file, format="safetensors")
    values: mx.array = read[NAME]
    mx.eval(values)
    file.check()
    check_largest(entry, file.largest, lambda: int(mx.sum(~mx.isfinite(values)).item()))
    return values.reshape(entry.shape)


def _by_numpy(entry: Entry) -> mx.array:
    stored = mx.array(read_finite(entry))
    return stored.view(mx.bfloat16) if entry.dtype == "bfloat16" else stored


def fetched_again(entry: Entry) -> list[mx.array]:
    """Read the arrays of `entry`, which was checked before, as they are stored."""
    if isinstance(entry.storage, Packed):
        return [mx.array(part) for part in read_quantized(entry).arrays]
    if not entry.source.is_plain or entry.fused:
        return [mx.array(read(entry))]
    values, view = writable(entry.shape, NUMPY[entry.source.first.dtype])
    into(entry.source.first, view)
    return [values]


def converted(entry: Entry, arrays: Sequence[mx.array]) -> list[mx.array]:
    """Return the arrays that memory holds for `entry`, from those that `fetched_again` read."""
    if isinstance(entry.storage, Packed):
        return list(arrays)
    return [_laid_out(entry, arrays[0].view(mx.bfloat16) if entry.dtype == "bfloat16" else arrays[0])]


def _pack(model: mlx.nn.Module, entry: Entry, arrays: Sequence[mx.array]) -> None:
    """Put the codes of `entry` into its layer, which is replaced by a quantized one the first time."""
    layer, leaf = _owner(model, entry.name)
    assert isinstance(entry.storage, Packed) and leaf == "weight", entry.name
    if not isinstance(layer, QuantizedLinear):
        layer = QuantizedLinear(layer, entry.storage.code, DTYPES[entry.storage.dtype])
        _replace(model, entry.name.rpartition(".")[0], layer)
    layer.put(*arrays)


def _replace(model: mlx.nn.Module, path: str, layer: mlx.nn.Module) -> None:
    parent, attribute = _owner(model, path)
    if attribute.isdigit():
        parent[int(attribute)] = layer
    else:
        parent[attribute] = layer


def _owner(model: mlx.nn.Module, name: str) -> tuple[mlx.nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    owner = model
    for part in path.split(".") if path else ():
        owner = owner[int(part)] if part.isdigit() else owner[part]
    return owner, leaf


def _put(model: mlx.nn.Module, name: str, value: mx.array) -> None:
    owner, leaf = _owner(model, name)
    assert owner[leaf].shape == value.shape, (name, owner[leaf].shape, value.shape)
    owner[leaf] = value
