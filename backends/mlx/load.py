"""Executes a LoadPlan: bytes -> array -> dtype and layout -> parameter. Every value is checked to be finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn

from qwenimg.backends.mlx.ops import DTYPES, Linear
from qwenimg.backends.mlx.ops.quantised import QuantisedLinear
from qwenimg.common.weights.finite import check_largest, read_finite
from qwenimg.common.weights.plan import Entry, LoadPlan, read_branch, read_codes
from qwenimg.common.weights.precision import Precision
from qwenimg.common.weights.storage import Packed
from qwenimg.common.weights.tensor_file import NAME, TensorFile

Model = TypeVar("Model", bound=mlx.nn.Module)


def empty(build: Callable[[], Model], precision: Precision | None = None, role: str = "") -> Model:
    """A model without memory for its parameters (they are lazy until `fill`), each layer knowing its own path, and how
    it computes where that is another dtype than its weight's."""
    model = build()
    for path, module in model.named_modules():
        if hasattr(module, "path"):
            module.path = path
        compute = precision.computes(role, path) if precision is not None and hasattr(module, "compute") else None
        if compute is not None:
            module.compute = compute
    return model


def fill(model: mlx.nn.Module, plan: LoadPlan) -> None:
    """Reads every tensor of `plan` into the parameter of its name. Nothing may be missing from the model."""
    for name, entry in plan.entries.items():
        if isinstance(entry.storage, Packed):
            _pack(model, name, entry)
        else:
            _put(model, name, tensor(entry))
    branch(model, plan)


def branch(model: mlx.nn.Module, plan: LoadPlan) -> None:
    """Gives every linear layer whose weight is in `plan` what is to be beside it, or nothing."""
    for name, entry in plan.entries.items():
        layer, leaf = _owner(model, name)
        if not isinstance(layer, Linear) or leaf != "weight":
            assert not entry.is_beside, name
            continue
        found = read_branch(entry)
        layer.branch = () if found is None else tuple(mx.array(part).astype(layer.dtype) for part in found)


def drop(model: mlx.nn.Module, names: Iterable[str]) -> None:
    """Frees these parameters; `fill` can bring them back."""
    for name in names:
        owner, leaf = _owner(model, name)
        if isinstance(owner, Linear) and leaf == "weight":
            owner.branch = ()
        if isinstance(owner, QuantisedLinear) and leaf == "weight":
            owner.drop()
        else:
            _put(model, name, mx.zeros(owner[leaf].shape, owner[leaf].dtype))


def tensor(entry: Entry) -> mx.array:
    """One tensor of a checkpoint in the dtype of its storage, finite; convolutions [O I h w] -> [O h w I]. Raises
    ModelError."""
    source = entry.source
    plain = source.code is None and source.decode is None and not entry.fused and 0 not in entry.shape
    stored = _straight(entry) if plain else _by_numpy(entry)
    if len(entry.shape) == 4:
        stored = stored.transpose(0, 2, 3, 1)
    made = mx.contiguous(stored.astype(DTYPES[entry.storage.dtype]))
    mx.eval(made)
    return made


def _straight(entry: Entry) -> mx.array:
    """Read by MLX into its own memory: no copy on the way."""
    file = TensorFile(entry.source.first)
    read: Any = mx.load(file, format="safetensors")
    found: mx.array = read[NAME]
    mx.eval(found)
    file.check()
    check_largest(entry, file.largest, lambda: int(mx.sum(~mx.isfinite(found)).item()))
    return found.reshape(entry.shape)


def _by_numpy(entry: Entry) -> mx.array:
    stored = mx.array(read_finite(entry))
    return stored.view(mx.bfloat16) if entry.dtype == "bfloat16" else stored


def _pack(model: mlx.nn.Module, name: str, entry: Entry) -> None:
    """Puts the codes of `entry` into its layer, which becomes one of codes the first time."""
    layer, leaf = _owner(model, name)
    assert isinstance(entry.storage, Packed) and leaf == "weight", name
    if not isinstance(layer, QuantisedLinear):
        layer = QuantisedLinear(layer, entry.storage.code, DTYPES[entry.storage.dtype])
        parent, own = _owner(model, name.rpartition(".")[0])
        if own.isdigit():
            parent[int(own)] = layer
        else:
            parent[own] = layer
    layer.put(*(mx.array(part) for part in read_codes(entry).arrays))


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
