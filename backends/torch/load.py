"""Execution of a LoadPlan: bytes -> tensor -> dtype and device -> parameter. Every value is checked to be finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.ops import DTYPES, Linear
from qwenimg.backends.torch.ops.cpu import laid_out
from qwenimg.backends.torch.ops.quantized import DecodeBuffer, QuantizedLinear
from qwenimg.common.formats.arrays import ahead
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.quant.quantized_tensor import QuantizedTensor
from qwenimg.common.weights.plan import Entry, LoadPlan
from qwenimg.common.weights.storage import Packed
from qwenimg.common.weights.values import read, read_branch, read_finite, read_quantized

Model = TypeVar("Model", bound=torch.nn.Module)
Result = TypeVar("Result")


def empty(build: Callable[[], Model], precision: Precision | None = None, role: str = "") -> Model:
    """Build a model without memory for its parameters. Each layer gets its path, and its compute dtype where that
    differs from its weight's."""
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
    """Read every tensor of `plan` into the parameter of its name. Every name must be in the model."""
    for entry, values in ahead(plan.entries.values(), fetched, lambda entry: entry.nbytes):
        put(model, entry, kept(entry, values, device))
    branch(model, plan, device)


def put(model: torch.nn.Module, entry: Entry, tensors: Sequence[torch.Tensor]) -> None:
    """Put the tensors of `entry` into its parameter."""
    if isinstance(entry.storage, Packed):
        _pack(model, entry, tensors)
    else:
        _put(model, entry.name, laid_out(tensors[0], tensors[0].device.type))


def branch(model: torch.nn.Module, plan: LoadPlan, device: torch.device) -> None:
    """Set the LoRA branch of every linear layer with its weight in `plan`; remove it where there is none."""
    for name, entry in plan.entries.items():
        layer, leaf = _owner(model, name)
        if not isinstance(layer, Linear) or leaf != "weight":
            assert not entry.is_branched, name
            continue
        factors = read_branch(entry)
        layer.branch = factors and (_factor(factors[0], layer, device), _factor(factors[1], layer, device))


def drop(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Free these parameters; `fill` can bring them back."""
    for name in names:
        owner, leaf = _owner(model, name)
        if isinstance(owner, Linear) and leaf == "weight":
            owner.branch = None
        if isinstance(owner, QuantizedLinear) and leaf == "weight":
            owner.drop()
        else:
            _put(model, name, getattr(owner, leaf).to("meta"))


def briefly(
    model: torch.nn.Module, plan: LoadPlan, device: torch.device, prefix: str, use: Callable[[], Result]
) -> Result:
    """Return the computed result of `use`, called while the weights under `prefix` that only make modulation are
    loaded."""
    part = plan.when(ONCE).only(lambda name: name.startswith(prefix))
    fill(model, part, device)
    result = ops.eval(use())
    drop(model, part.entries)
    return result


def fetched(entry: Entry) -> QuantizedTensor | np.ndarray:
    """Read the values of `entry` as they are stored, finite. Raises ModelError."""
    return read_quantized(entry) if isinstance(entry.storage, Packed) else read_finite(entry)


def fetched_again(entry: Entry) -> QuantizedTensor | np.ndarray:
    """Read the values of `entry`, which `fetched` has checked before."""
    return read_quantized(entry) if isinstance(entry.storage, Packed) else read(entry)


def kept(entry: Entry, values: QuantizedTensor | np.ndarray, device: torch.device) -> list[torch.Tensor]:
    """Return the tensors that memory holds for `entry`, from what was fetched: its values, or its codes, scales and
    biases."""
    if not isinstance(values, QuantizedTensor):
        return [tensor(entry, device, values)]
    codes, *rest = (torch.from_numpy(part).to(device) for part in values.arrays)
    return [codes.view(torch.int32), *rest]


@contextmanager
def widened(model: torch.nn.Module, path: str, dtype: torch.dtype) -> Iterator[None]:
    """Make the module at `path` compute in `dtype` with the weights that it has, while the context is open. In float64
    it is the reference of all comparisons."""
    before: list[tuple[torch.nn.Module, str, Any]] = []  # what the next weights are loaded into: LoRA factors too

    def change(module: torch.nn.Module, attribute: str, value: Any) -> None:
        before.append((module, attribute, getattr(module, attribute)))
        setattr(module, attribute, value)

    for name, module in list(model.get_submodule(path).named_modules(prefix=path)):
        if isinstance(module, QuantizedLinear):
            change(*_owner(model, name), _decoded(module))
        elif getattr(module, "compute", None) is not None:
            change(module, "compute", None)
        elif hasattr(module, "stream"):
            change(module, "stream", dtype)
    for module in model.get_submodule(path).to(dtype).modules():
        if isinstance(module, Linear) and module.branch is not None:
            module.branch = module.branch[0].to(dtype), module.branch[1].to(dtype)
    try:
        yield
    finally:
        for module, attribute, value in before:
            setattr(module, attribute, value)


def move(module: torch.nn.Module, share: float, seed: int) -> None:
    """Move every weight of `module` up or down by `share` of itself."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        signs = 2 * torch.randint(0, 2, parameter.shape, generator=generator) - 1
        parameter.data.mul_(1 + share * signs.to(parameter))


def _decoded(layer: QuantizedLinear) -> Linear:
    """Return a linear layer with the values of a quantized one."""
    weight = layer.weight.clone()
    linear = Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None, device="meta")
    linear.path = layer.path
    linear.branch, linear.rotation = layer.branch, layer.rotation
    linear.weight, linear.bias = torch.nn.Parameter(weight, requires_grad=False), layer.bias
    return linear


def tensor(entry: Entry, device: torch.device, values: np.ndarray | None = None) -> torch.Tensor:
    """Return one tensor of a checkpoint in the dtype of its storage, finite.

    values: what `read_finite` returned for it, if it was read before. Raises ModelError.
    """
    stored = torch.from_numpy(read_finite(entry) if values is None else values)
    if entry.dtype == "bfloat16":
        stored = stored.view(torch.bfloat16)
    return stored.to(device).to(DTYPES[entry.storage.dtype])  # in this order, so that the smaller dtype travels


def _pack(model: torch.nn.Module, entry: Entry, tensors: Sequence[torch.Tensor]) -> None:
    """Put the codes of `entry` into its layer, which is replaced by a quantized one the first time."""
    layer, leaf = _owner(model, entry.name)
    assert isinstance(entry.storage, Packed) and leaf == "weight", entry.name
    if not isinstance(layer, QuantizedLinear):
        assert isinstance(layer, Linear), entry.name
        shared = None if entry.residency is ONCE else vars(model).setdefault("decoded", DecodeBuffer())
        layer = QuantizedLinear(layer, entry.storage.code, DTYPES[entry.storage.dtype], shared)
        parent, attribute = _owner(model, entry.name.rpartition(".")[0])
        layer.int8 = entry.storage.int8 and layer.compute is None
        setattr(parent, attribute, layer)
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
