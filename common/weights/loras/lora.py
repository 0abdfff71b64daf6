"""A LoRA file: its header is read strictly, its keys are recognized, and each module is checked against its weight.

A table made from the model (`lora_names`) gives the weight of a module's name, never a rule that happens to match.
Every module (`lora_keys`) is used, or the file is refused with its name; except for layers that the model has and does
not use, and copies of layers in another layout: these are checked and left out. No factor is read before it is needed;
the scale alpha, one number, is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import OpenFile, bad, closed_on_error, is_file
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean
from qwenimg.common.formats.files import first
from qwenimg.common.formats.safetensors import read_header
from qwenimg.common.formats.stored import TensorSlice
from qwenimg.common.weights.loras import delta
from qwenimg.common.weights.loras.delta import LowRank, Whole
from qwenimg.common.weights.loras.lora_keys import Module, read_modules
from qwenimg.common.weights.loras.lora_names import Names, Target, find, flat
from qwenimg.common.weights.loras.peft_config import ADAPTER, ModuleConfig, read_config
from qwenimg.common.weights.plan import Mode


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraFile:
    """A LoRA file whose header is read. The file stays open until `close`."""

    file: OpenFile
    modules: Mapping[str, Module]  # by their names in the file, in the order of its bytes
    metadata: Mapping[str, str]
    peft: Mapping[str, ModuleConfig]  # PEFT's configuration by module, from the header or the file beside

    def close(self) -> None:
        self.file.close()


Deltas = dict[str, dict[str, tuple[LowRank | Whole, ...]]]
"""The deltas of LoRAs, by component, then by parameter."""


def read_lora(path: Path) -> LoraFile:
    """Return the LoRA in the safetensors file `path`, or in a folder that PEFT saved. Raises ModelError."""
    inside = path / ADAPTER
    path = inside if is_file(inside) else path
    header = read_header(path)
    with closed_on_error(header.file):
        pieces = {key: TensorSlice(key, header.file, *stored) for key, stored in header.tensors.items()}
        modules = read_modules(path, pieces)
        peft = read_config(path, header.metadata, modules)
        return LoraFile(file=header.file, modules=modules, metadata=header.metadata, peft=peft)


def fit(lora: LoraFile, names: Names) -> Deltas:
    """Return the deltas of `lora` for a model with these `names`, at strength 1. Raises ModelError if a module
    belongs to no weight of the model, or does not have its shape, and if none changes the image."""
    path, targets = lora.file.path, _targets(lora, names)
    copies = _copies(targets)
    deltas: Deltas = {}
    for module, target in ((module, target) for module, weights in targets.items() for target in weights):
        every = _deltas(lora, module, target)  # checked, also where they are left out
        if module in copies or not target.used:
            continue
        of_component = deltas.setdefault(target.component, {})
        for name, one in every.items():
            others = of_component.get(name, ())
            is_part = one.rows.reaches_beyond
            if twice := [
                other for other in others if other.rows == one.rows or not (is_part and other.rows.reaches_beyond)
            ]:
                both = f"modules {first([module])} and '{clean(twice[0].module, 80)}' are of one weight"
                raise bad(path, f"{both}: keep one of them")
            of_component[name] = (*others, one)
    if not deltas:
        raise bad(path, f"changes only layers that this model does not use, such as {first(targets)}")
    return deltas


def counts(lora: LoraFile, names: Names) -> str:
    """Return how many modules of a LoRA that fits change the model: `21 of 28 modules (7 are of layers that this model
    does not use)`."""
    targets = _targets(lora, names)
    copies = _copies(targets)
    unused = [module for module, weights in targets.items() if module not in copies and not weights[0].used]
    reasons = {"of layers that this model does not use": unused, "copies under other names": copies}
    notes = ", ".join(f"{len(some)} {'are' if len(some) > 1 else 'is'} {why}" for why, some in reasons.items() if some)
    used = len(targets) - len(copies) - len(unused)
    return f"{used} of {len(targets)} modules" + (f" ({notes})" if notes else "")


def _targets(lora: LoraFile, names: Names) -> dict[str, tuple[Target, ...]]:
    """Return the weights of each module. Raises ModelError for a module without any."""
    targets = {name: find(names, name, norm="norm" in module.whole) for name, module in lora.modules.items()}
    unknown = [module for module, weights in targets.items() if not weights]
    if unknown:
        raise bad(lora.file.path, f"{_stranger(unknown, len(targets))}: not a LoRA for this model")
    return targets


def _copies(targets: Mapping[str, tuple[Target, ...]]) -> set[str]:
    """Return the modules of a file that has layers in two layouts which say the same of them. A module of several
    weights, such as q, k and v in one, is a copy where each of them has a module of its own; and in a file with such
    copies, one under another name than the model's own, where the own one is there too."""
    claims: dict[tuple[str, str], list[tuple[str, Target]]] = {}
    for module, weights in targets.items():
        for target in weights:
            claims.setdefault((target.component, target.name), []).append((module, target))

    def has_better(target: Target, better: Callable[[str, Target], bool]) -> bool:
        return any(better(module, other) for module, other in claims[target.component, target.name])

    def is_single(module: str, target: Target) -> bool:
        return target.rows.of == 1

    def is_own(module: str, target: Target) -> bool:
        return flat(module).endswith(flat(target.name.removesuffix(".weight")))

    fused = {
        module
        for module, weights in targets.items()
        if all(target.rows.of > 1 and has_better(target, is_single) for target in weights)
    }
    renamed = {
        module
        for module, weights in targets.items()
        if fused and all(not is_own(module, target) and has_better(target, is_own) for target in weights)
    }
    return fused | renamed


def strengthened(deltas: Deltas, strength: float, mode: Mode = "auto") -> Deltas:
    """Return the deltas at another strength, to be merged into the weights or computed as branches (`mode`)."""
    return {
        component: {
            name: tuple(replace(one, strength=strength, mode=mode) for one in every) for name, every in by_name.items()
        }
        for component, by_name in deltas.items()
    }


def joined(several: Sequence[Deltas]) -> Deltas:
    """Return for each weight the deltas of all of `several`, in their order."""
    result: Deltas = {}
    for deltas in several:
        for component, by_name in deltas.items():
            for name, every in by_name.items():
                of_component = result.setdefault(component, {})
                of_component[name] = of_component.get(name, ()) + every
    return result


def _stranger(unknown: list[str], count: int) -> str:
    if len(unknown) == count:
        return f"none of its {count} modules, such as {first(unknown[:1])}, is a layer of this model"
    return f"module {first(unknown)} is no layer of this model"


# One module


def _deltas(lora: LoraFile, module: str, target: Target) -> dict[str, LowRank | Whole]:
    """Return the deltas of one module for one weight and its bias, by their parameters."""
    path, whole = lora.file.path, lora.modules[module].whole
    try:
        if "norm" in whole:
            return {target.name: _whole(target, module, whole["norm"], replaces=True)}
        delta_of_weight = _low_rank(lora, module, target)
        deltas: dict[str, LowRank | Whole] = {target.name: delta_of_weight}
        if "bias" in whole:
            if not target.has_bias:
                raise ValueError("adds to a bias, and the layer has none")
            if delta_of_weight.magnitude is not None:
                raise ValueError("adds to a bias beside a magnitude, which is not read")
            bias = _whole(target, module, whole["bias"], replaces=False)
            deltas[f"{target.name.removesuffix('weight')}bias"] = replace(bias, scale=delta_of_weight.scale)
    except ModelError:
        raise
    except ValueError as error:
        raise bad(path, f"module {first([module])}: {error}: not a LoRA for this model") from None
    return deltas


def _whole(target: Target, module: str, piece: TensorSlice, *, replaces: bool) -> Whole:
    if piece.shape != target.layer[:1]:
        what = "the norm's weight" if replaces else "the bias"
        raise ValueError(f"{what} has {piece.shape[0]} values, expected {target.layer[0]}")
    return Whole(module=module, piece=piece, replaces=replaces, rows=target.rows, swapped=target.swapped)


def _low_rank(lora: LoraFile, module: str, target: Target) -> LowRank:
    path, parts_of = lora.file.path, lora.modules[module]
    kind = delta.kind_of(frozenset(parts_of.parts))
    if kind is None:
        raise delta.not_complete(path, module, frozenset(parts_of.parts))
    magnitude = parts_of.scales.get("dora_scale") or parts_of.scales.get("magnitude")
    layer = _with_inputs(target, parts_of.parts)
    rank = delta.check(kind, parts_of.parts, layer)
    of_peft = "magnitude" in parts_of.scales
    by_inputs = magnitude is not None and delta.check_magnitude(magnitude, layer, of_peft=of_peft)
    if by_inputs and target.layer != target.shape:
        raise ValueError("its magnitude is of the inputs of several layers at once, which is not read")
    if magnitude is not None and target.rows.reaches_beyond:
        raise ValueError("its magnitude is of a part of a layer, which is not read")
    return LowRank(
        module=module,
        kind=kind,
        parts=parts_of.parts,
        rank=rank,
        scale=scale_of(lora, module, rank),
        magnitude=magnitude,
        by_inputs=by_inputs,
        rows=target.rows,
        swapped=target.swapped,
        inputs=layer[1] if target.widths else None,
    )


def _with_inputs(target: Target, parts: Mapping[str, TensorSlice]) -> Shape:
    """Return the shape of the layer, with another number of inputs that a LoRA may have for it where the factor `down`
    has that."""
    down = parts.get("down")
    return (target.layer[0], down.shape[-1]) if down and down.shape[-1] in target.widths else target.layer


def widened(deltas: Deltas, names: Names) -> bool:
    """Return whether `deltas` change more inputs of a layer than it has: those of a control picture."""
    weights = {(one.component, one.name): one for table in names for every in table.names.values() for one in every}
    return any(
        one.inputs is not None and one.inputs > weights[component, name].shape[1]
        for component, by_name in deltas.items()
        for name, every in by_name.items()
        if name.endswith("weight")
        for one in every
    )


def scale_of(lora: LoraFile, module: str, rank: int | None) -> float:
    """Return alpha / rank, with the module's own alpha, else PEFT's, else kohya's for the whole file.

    It is 1 without any alpha, and for LoKr's whole factors unless PEFT's configuration says otherwise. Raises
    ValueError.
    """
    alpha = lora.modules[module].scales.get("alpha")
    if alpha is None and module in lora.peft:
        return lora.peft[module].scale(rank)
    if rank is None:
        return 1.0
    if alpha is not None:
        return _alpha(alpha) / rank
    whole = lora.metadata.get("ss_network_alpha", "None")
    if whole in ("None", ""):
        return 1.0
    try:
        return _finite(float(whole)) / rank
    except ValueError:
        raise ValueError(f"ss_network_alpha is {clean(whole, 30)!r}, not a number") from None


def _alpha(piece: TensorSlice) -> float:
    if math.prod(piece.shape) != 1 or piece.dtype not in (*delta.FACTORS, "F64", "I64", "I32"):
        raise ValueError(f"alpha is {piece.dtype} {list(piece.shape)}; expected one number")
    if piece.dtype in delta.FACTORS:
        return _finite(float(delta.floats(piece).reshape(())))
    import numpy as np

    read = {"F64": "<f8", "I64": "<i8", "I32": "<i4"}[piece.dtype]
    return _finite(float(np.frombuffer(piece.file.read(piece.begin, piece.end - piece.begin), read)[0]))


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"alpha is {value}")
    return value
