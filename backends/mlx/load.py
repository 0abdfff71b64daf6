"""Executes a LoadPlan: bytes -> array -> dtype and layout -> parameter. Every value is checked to be finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn

from qwenimg.backends.mlx.ops import DTYPES, Linear, writable
from qwenimg.backends.mlx.ops.quantised import QuantisedLinear
from qwenimg.common.formats.arrays import WORTH_A_THREAD
from qwenimg.common.formats.stored import NUMPY, into
from qwenimg.common.formats.tensor_file import NAME, TensorFile
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.finite import check_largest, read_finite
from qwenimg.common.weights.plan import Entry, LoadPlan, read, read_branch, read_codes
from qwenimg.common.weights.storage import Packed

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
    for entry in plan.entries.values():
        fill_one(model, entry)
    branch(model, plan)


def fill_one(model: mlx.nn.Module, entry: Entry) -> None:
    """Raises ModelError."""
    packed = isinstance(entry.storage, Packed)
    put(model, entry, [mx.array(part) for part in read_codes(entry).arrays] if packed else [tensor(entry)])


def put(model: mlx.nn.Module, entry: Entry, arrays: Sequence[mx.array]) -> None:
    """Puts what is kept of `entry` into its parameter."""
    if isinstance(entry.storage, Packed):
        _pack(model, entry, arrays)
    else:
        _put(model, entry.name, arrays[0])


def branch(model: mlx.nn.Module, plan: LoadPlan) -> None:
    """Gives every linear layer whose weight is in `plan` what is to be beside it, or nothing."""
    for name, entry in plan.entries.items():
        layer, leaf = _owner(model, name)
        if not isinstance(layer, Linear) or leaf != "weight":
            assert not entry.is_beside, name
            continue
        found = read_branch(entry)
        layer.branch = () if found is None else tuple(mx.array(part).astype(layer.dtype) for part in found)


def blank(model: mlx.nn.Module, dtypes: Mapping[str, str], make: Callable[[Sequence[int], mx.Dtype], mx.array]) -> None:
    """Gives the parameters of `dtypes` theirs, of no value, as `make` makes them: for counting what a forward would
    do."""
    for name, dtype in dtypes.items():
        _put(model, name, make(_owner(model, name)[0][name.rpartition(".")[2]].shape, DTYPES[dtype]))


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


def widen(model: mlx.nn.Module, path: str) -> None:
    """Make the module at `path` compute in float32, with the weights that it has."""
    for name, module in list(model.named_modules()):
        if path and name != path and not name.startswith(f"{path}."):
            continue
        if isinstance(module, QuantisedLinear):
            _replace(model, name, _decoded(module))
            continue
        if getattr(module, "compute", None) is not None:
            module.compute = None
        if hasattr(module, "stream"):
            module.stream = mx.float32
        if isinstance(module, Linear):
            module.branch = tuple(part.astype(mx.float32) for part in module.branch)
        for leaf, value in list(module.items()):
            if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
                module[leaf] = value.astype(mx.float32)


def _decoded(layer: QuantisedLinear) -> Linear:
    """A linear layer of the same values, in float32."""
    weight = layer.weight.astype(mx.float32)
    made = Linear(weight.shape[1], weight.shape[0], bias="bias" in layer)
    made.path, made.weight = layer.path, weight
    made.branch = tuple(part.astype(mx.float32) for part in layer.branch)
    if "bias" in layer:
        made.bias = layer.bias.astype(mx.float32)
    return made


def tensor(entry: Entry) -> mx.array:
    """One tensor of a checkpoint in the dtype of its storage, finite; convolutions [O I h w] -> [O h w I]. Raises
    ModelError."""
    plain = entry.source.is_plain and not entry.fused and entry.nbytes >= WORTH_A_THREAD
    stored = _straight(entry) if plain else _by_numpy(entry)
    return _laid_out(entry, stored)


def _laid_out(entry: Entry, stored: mx.array) -> mx.array:
    """`stored` as it is kept, made at once, so that `stored` can go: MLX would make it in the forward, beside all that
    was laid out before. Moved in its own dtype, which is the smaller one."""
    if len(entry.shape) == 4:
        stored = mx.contiguous(stored.transpose(0, 2, 3, 1))
    made = mx.contiguous(stored.astype(DTYPES[entry.storage.dtype]))
    mx.eval(made)
    return made


def _straight(entry: Entry) -> mx.array:
    """Read by MLX into its own memory, in a thread of its own: no copy on the way."""
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


def fetched_again(entry: Entry) -> list[mx.array]:
    """What is read for `entry` as it is kept, where it was checked before."""
    if isinstance(entry.storage, Packed):
        return [mx.array(part) for part in read_codes(entry).arrays]
    if not entry.source.is_plain or entry.fused:
        return [mx.array(read(entry))]
    found, view = writable(entry.shape, NUMPY[entry.source.first.dtype])
    into(entry.source.first, view)
    return [found]


def converted(entry: Entry, arrays: Sequence[mx.array]) -> list[mx.array]:
    """What is kept of `entry`, of what was fetched again."""
    if isinstance(entry.storage, Packed):
        return list(arrays)
    return [_laid_out(entry, arrays[0].view(mx.bfloat16) if entry.dtype == "bfloat16" else arrays[0])]


def _pack(model: mlx.nn.Module, entry: Entry, arrays: Sequence[mx.array]) -> None:
    """Puts the codes of `entry` into its layer, which becomes one of codes the first time."""
    layer, leaf = _owner(model, entry.name)
    assert isinstance(entry.storage, Packed) and leaf == "weight", entry.name
    if not isinstance(layer, QuantisedLinear):
        layer = QuantisedLinear(layer, entry.storage.code, DTYPES[entry.storage.dtype])
        _replace(model, entry.name.rpartition(".")[0], layer)
    layer.put(*arrays)


def _replace(model: mlx.nn.Module, path: str, layer: mlx.nn.Module) -> None:
    parent, own = _owner(model, path)
    if own.isdigit():
        parent[int(own)] = layer
    else:
        parent[own] = layer


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
