"""Executes a LoadPlan: bytes -> tensor -> dtype and device -> parameter. Every value is checked to be finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from qwenimg.backends.torch.ops import DTYPES
from qwenimg.backends.torch.ops.cpu import laid_out
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean
from qwenimg.common.weights.plan import Entry, LoadPlan, read

Model = TypeVar("Model", bound=torch.nn.Module)
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def empty(build: Callable[[], Model]) -> Model:
    """A model without memory for its parameters, each of its layers knowing its own path."""
    with torch.device("meta"):
        model = build()
    for path, module in model.named_modules():
        if hasattr(module, "path"):
            module.path = path
    model.requires_grad_(False)
    model.eval()
    return model


def fill(model: torch.nn.Module, plan: LoadPlan, dtype_of: Callable[[str], str], device: torch.device) -> None:
    """Reads every tensor of `plan` into the parameter of its name. Nothing may be missing from the model."""
    for name, entry in plan.entries.items():
        _put(model, name, laid_out(tensor(entry, DTYPES[dtype_of(name)], device)))


def drop(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Frees these parameters; `fill` can bring them back."""
    for name in names:
        owner, leaf = _owner(model, name)
        _put(model, name, getattr(owner, leaf).to("meta"))


def missing(model: torch.nn.Module, needed: Iterable[str]) -> list[str]:
    """Of the parameters `needed`, those without values."""
    parameters = dict(model.named_parameters())
    return [name for name in needed if parameters[name].is_meta]


def tensor(entry: Entry, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One tensor of a checkpoint, finite in `dtype`. Raises ModelError."""
    stored = torch.from_numpy(read(entry)).view(_STORED[entry.dtype])
    made = stored.to(device).to(dtype)  # in this order, so that the smaller dtype travels
    extremes = torch.stack(torch.aminmax(made))  # NaN where there is one; unlike isfinite it takes no memory
    if not bool(torch.isfinite(extremes).all()):
        raise ModelError(_not_finite(entry, stored, dtype))
    return made


def _not_finite(entry: Entry, stored: torch.Tensor, dtype: torch.dtype) -> str:
    count = int((~torch.isfinite(stored)).sum())
    where = f"{clean(entry.file.path)}: tensor {clean(entry.key)}"
    if count:
        return f"{where} has {count} non-finite values; the file is damaged, fetch it again"
    largest = float(stored.abs().max())
    return f"{where} reaches {largest:.3g}, too large for {dtype}; use --precision bf16 or fp32"


def _owner(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _put(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    owner, leaf = _owner(model, name)
    old = getattr(owner, leaf)
    assert isinstance(old, torch.nn.Parameter) and old.shape == value.shape, (name, old.shape, value.shape)
    setattr(owner, leaf, torch.nn.Parameter(value, requires_grad=False))
