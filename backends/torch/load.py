"""Executes a LoadPlan: bytes -> tensor -> dtype and device -> parameter. Every value is checked to be finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from qwenimg.backends.torch.ops import DTYPES, Linear
from qwenimg.backends.torch.ops.cpu import laid_out
from qwenimg.backends.torch.ops.quantised import QuantisedLinear
from qwenimg.common.weights.plan import Entry, LoadPlan, kept_arrays, not_finite, read, read_branch
from qwenimg.common.weights.precision import Precision
from qwenimg.common.weights.storage import Packed

Model = TypeVar("Model", bound=torch.nn.Module)


def empty(build: Callable[[], Model], precision: Precision | None = None, role: str = "") -> Model:
    """A model without memory for its parameters, each of its layers knowing its own path, and how it computes where
    that is another dtype than its weight's."""
    with torch.device("meta"):
        model = build()
    for path, module in model.named_modules():
        if hasattr(module, "path"):
            module.path = path
        compute = precision.computes(role, path) if precision is not None and hasattr(module, "compute") else None
        if compute is not None:
            module.compute = compute
    model.requires_grad_(False)
    model.eval()
    return model


def fill(model: torch.nn.Module, plan: LoadPlan, device: torch.device) -> None:
    """Reads every tensor of `plan` into the parameter of its name. Nothing may be missing from the model."""
    for entry in plan.entries.values():
        fill_one(model, entry, device)
    branch(model, plan, device)


def fill_one(model: torch.nn.Module, entry: Entry, device: torch.device) -> None:
    put(model, entry, read_tensors(entry, device))


def read_tensors(entry: Entry, device: torch.device) -> list[torch.Tensor]:
    """What is kept of `entry`: its values, or its codes and what they mean. Raises ModelError."""
    if isinstance(entry.storage, Packed):
        return [part.to(device) for part in converted(entry, kept_arrays(entry))]
    return [tensor(entry, device)]


def put(model: torch.nn.Module, entry: Entry, tensors: Sequence[torch.Tensor]) -> None:
    """Puts what is kept of `entry` into its parameter."""
    if isinstance(entry.storage, Packed):
        _pack(model, entry, tensors)
    else:
        _put(model, entry.name, laid_out(tensors[0]))


def branch(model: torch.nn.Module, plan: LoadPlan, device: torch.device) -> None:
    """Gives every linear layer whose weight is in `plan` what is to be beside it, or nothing."""
    for name, entry in plan.entries.items():
        layer, leaf = _owner(model, name)
        if not isinstance(layer, Linear) or leaf != "weight":
            assert not entry.is_beside, name
            continue
        found = read_branch(entry)
        layer.branch = found and (_factor(found[0], layer, device), _factor(found[1], layer, device))


def blank(model: torch.nn.Module, dtypes: Mapping[str, str]) -> None:
    """Gives the parameters of `dtypes` theirs, still without memory: for counting what a forward would do."""
    for name, dtype in dtypes.items():
        _put(model, name, torch.empty(model.get_parameter(name).shape, dtype=DTYPES[dtype], device="meta"))


def drop(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Frees these parameters; `fill` can bring them back."""
    for name in names:
        owner, leaf = _owner(model, name)
        if isinstance(owner, Linear) and leaf == "weight":
            owner.branch = None
        if isinstance(owner, QuantisedLinear) and leaf == "weight":
            owner.drop()
        else:
            _put(model, name, getattr(owner, leaf).to("meta"))


def widen(model: torch.nn.Module, path: str) -> None:
    """Makes the module at `path` compute in float64, with the weights that it has: the reference of all comparisons."""
    top = model.get_submodule(path)
    for name, module in list(top.named_modules(prefix=path)):
        if isinstance(module, QuantisedLinear):
            parent, own = _owner(model, name)
            setattr(parent, own, _decoded(module))
        elif getattr(module, "compute", None) is not None:
            module.compute = None
        elif hasattr(module, "stream"):
            module.stream = torch.float64
    model.get_submodule(path).double()


def _decoded(layer: QuantisedLinear) -> Linear:
    """A linear layer of the same values."""
    weight = layer.weight
    made = Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None, device="meta")
    made.path = layer.path
    made.weight, made.bias = torch.nn.Parameter(weight, requires_grad=False), layer.bias
    return made


def tensor(entry: Entry, device: torch.device) -> torch.Tensor:
    """One tensor of a checkpoint in the dtype of its storage, finite. Raises ModelError."""
    stored, dtype = _stored(entry, read(entry)), DTYPES[entry.storage.dtype]
    made = stored.to(device).to(dtype)  # in this order, so that the smaller dtype travels
    extremes = torch.stack(torch.aminmax(made))  # NaN where there is one; unlike isfinite it takes no memory
    if not bool(torch.isfinite(extremes).all()):
        raise not_finite(entry, int((~torch.isfinite(stored)).sum()), float(stored.abs().max()), dtype)
    return made


def converted(entry: Entry, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """What is kept of `entry`, of the arrays that were read for it, unchecked."""
    if isinstance(entry.storage, Packed):
        codes, *rest = (torch.from_numpy(part) for part in arrays)
        return [codes.view(torch.int32), *rest]
    return [_stored(entry, arrays[0]).to(DTYPES[entry.storage.dtype])]


def _stored(entry: Entry, array: np.ndarray) -> torch.Tensor:
    stored = torch.from_numpy(array)
    return stored.view(torch.bfloat16) if entry.dtype == "bfloat16" else stored


def _pack(model: torch.nn.Module, entry: Entry, tensors: Sequence[torch.Tensor]) -> None:
    """Puts the codes of `entry` into its layer, which becomes one of codes the first time."""
    layer, leaf = _owner(model, entry.name)
    assert isinstance(entry.storage, Packed) and leaf == "weight", entry.name
    if not isinstance(layer, QuantisedLinear):
        assert isinstance(layer, Linear), entry.name
        layer = QuantisedLinear(layer, entry.storage.code, DTYPES[entry.storage.dtype])
        parent, own = _owner(model, entry.name.rpartition(".")[0])
        setattr(parent, own, layer)
    layer.put(*tensors)


def _factor(values: np.ndarray, layer: Linear, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device).to(layer.dtype)


def _owner(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _put(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    owner, leaf = _owner(model, name)
    old = getattr(owner, leaf)
    assert isinstance(old, torch.nn.Parameter) and old.shape == value.shape, (name, old.shape, value.shape)
    setattr(owner, leaf, torch.nn.Parameter(value, requires_grad=False))
