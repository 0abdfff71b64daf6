"""Executes a LoadPlan: bytes -> array -> dtype and layout -> parameter. Every value is checked to be finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import mlx.core as mx
import mlx.nn

from qwenimg.backends.mlx.ops import DTYPES
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean
from qwenimg.common.weights.plan import Entry, LoadPlan, read

Model = TypeVar("Model", bound=mlx.nn.Module)


def empty(build: Callable[[], Model]) -> Model:
    """A model without memory for its parameters (they are lazy until `fill`), each layer knowing its own path."""
    model = build()
    for path, module in model.named_modules():
        if hasattr(module, "path"):
            module.path = path
    model.filled = set()
    return model


def fill(model: mlx.nn.Module, plan: LoadPlan, dtype_of: Callable[[str], str]) -> None:
    """Reads every tensor of `plan` into the parameter of its name. Nothing may be missing from the model."""
    for name, entry in plan.entries.items():
        _put(model, name, tensor(entry, DTYPES[dtype_of(name)]))
        model.filled.add(name)


def drop(model: mlx.nn.Module, names: Iterable[str]) -> None:
    """Frees these parameters; `fill` can bring them back."""
    for name in names:
        owner, leaf = _owner(model, name)
        _put(model, name, mx.zeros(owner[leaf].shape, owner[leaf].dtype))
        model.filled.discard(name)


def missing(model: mlx.nn.Module, needed: Iterable[str]) -> list[str]:
    """Of the parameters `needed`, those without values."""
    return [name for name in needed if name not in model.filled]


def tensor(entry: Entry, dtype: mx.Dtype) -> mx.array:
    """One tensor of a checkpoint, finite in `dtype`; convolutions [O I h w] -> [O h w I]. Raises ModelError."""
    stored = mx.array(read(entry))
    if entry.dtype == "BF16":
        stored = stored.view(mx.bfloat16)
    if len(entry.shape) == 4:
        stored = stored.transpose(0, 2, 3, 1)
    made = mx.contiguous(stored.astype(dtype))
    extremes = mx.stack((mx.min(made), mx.max(made)))  # NaN where there is one; unlike isfinite it takes no memory
    if not mx.all(mx.isfinite(extremes)).item():
        raise ModelError(_not_finite(entry, stored, dtype))
    return made


def _not_finite(entry: Entry, stored: mx.array, dtype: mx.Dtype) -> str:
    count = int(mx.sum(~mx.isfinite(stored)).item())
    where = f"{clean(entry.file.path)}: tensor {clean(entry.key)}"
    if count:
        return f"{where} has {count} non-finite values; the file is damaged, fetch it again"
    largest = mx.max(mx.abs(stored)).item()
    return f"{where} reaches {largest:.3g}, too large for {dtype}; use --precision bf16 or fp32"


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
