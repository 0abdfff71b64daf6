"""A LoRA file: its header is read strictly, its keys are recognized, and each module is checked against its weight.

A key is a module's name and the role of the tensor in it, with any of the endings that trainers write. A table made
from the model (`lora_names`) gives the weight of a module's name, never a rule that happens to match. Every key is
used, or the file is refused with the key's name. No factor is read before it is needed; the scale alpha, one number,
is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from qwenimg.common.base.safe_files import OpenFile, bad, closed_on_error, is_file
from qwenimg.common.base.text import clean
from qwenimg.common.formats.files import first
from qwenimg.common.formats.safetensors import read_header
from qwenimg.common.formats.stored import TensorSlice
from qwenimg.common.weights.loras import delta
from qwenimg.common.weights.loras.delta import LowRank
from qwenimg.common.weights.loras.lora_names import Names, Target, find
from qwenimg.common.weights.loras.peft_config import ADAPTER, ModuleConfig, read_config
from qwenimg.common.weights.plan import Mode

# The ends of keys behind the module: PEFT's (with the adapter's name or without), kohya's, old diffusers', LyCORIS's
_ENDINGS = (
    (re.compile(r"(.+)\.lora_A(?:\.[A-Za-z0-9_-]+)??(?:\.weight)?"), "down"),
    (re.compile(r"(.+)\.lora_B(?:\.[A-Za-z0-9_-]+)??(?:\.weight)?"), "up"),
    (re.compile(r"(.+)\.lora_(?P<role>down|up|mid)(?:\.[A-Za-z0-9_-]+)?\.weight"), None),
    (re.compile(r"(.+)[._]lora\.(?P<role>down|up)\.weight"), None),
    (re.compile(r"(.+_lora[12])\.(?P<role>down|up)\.weight"), None),  # XLabs': of the image stream, of the text stream
    (re.compile(r"(.+)\.lora_linear_layer\.(?P<role>down|up)\.weight"), None),
    (re.compile(r"(.+)\.lora_magnitude_vector(?:\.[A-Za-z0-9_-]+)??(?:\.weight)?"), "magnitude"),
    (re.compile(r"(.+)\.(?P<role>alpha|dora_scale|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2))"), None),
)
_SCALES = ("alpha", "dora_scale", "magnitude")  # roles that are no factors
# Ends of keys that are known and not read
_REFUSED = (
    (re.compile(r".*\.(oft_[A-Za-z]+|.*boft.*)(\.weight)?"), "is an OFT or BOFT adapter"),
    (re.compile(r".*\.[ab][12]\.weight"), "is a GLoRA adapter"),
    (re.compile(r".*\.(diff|diff_b|w_norm|b_norm|set_weight)"), "holds whole differences of weights (diff)"),
    (re.compile(r".*\.lora_B(\..+)?\.bias"), "adds to biases (lora_B.bias)"),
    (re.compile(r".*\.lora_embedding_[AB](\..+)?"), "adds to embeddings (lora_embedding)"),
    (re.compile(r"lora_controlnet|input_blocks\..*\.(up|down)|input_hint_block\..*"), "is a ControlNet-LoRA"),
    (re.compile(r"bundle_emb\..*"), "holds a textual inversion (bundle_emb)"),
    (re.compile(r".*\.on_input"), "is an IA3 adapter"),
)


class Module(NamedTuple):
    """The tensors of a file for one weight, by role."""

    parts: Mapping[str, TensorSlice]  # the factors
    scales: Mapping[str, TensorSlice]  # alpha, dora_scale or magnitude


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraFile:
    """A LoRA file whose header is read. The file stays open until `close`."""

    file: OpenFile
    modules: Mapping[str, Module]  # by their names in the file, in the order of its bytes
    metadata: Mapping[str, str]
    peft: Mapping[str, ModuleConfig]  # PEFT's configuration by module, from the header or the file beside

    def close(self) -> None:
        self.file.close()


Deltas = dict[str, dict[str, tuple[LowRank, ...]]]
"""The deltas of LoRAs, by component, then by parameter."""


def read_lora(path: Path) -> LoraFile:
    """Return the LoRA in the safetensors file `path`, or in a folder that PEFT saved. Raises ModelError."""
    inside = path / ADAPTER
    path = inside if is_file(inside) else path
    header = read_header(path)
    with closed_on_error(header.file):
        pieces = {key: TensorSlice(key, header.file, *stored) for key, stored in header.tensors.items()}
        modules = _modules(path, pieces)
        peft = read_config(path, header.metadata, modules)
        return LoraFile(file=header.file, modules=modules, metadata=header.metadata, peft=peft)


def fit(lora: LoraFile, names: Names) -> Deltas:
    """Return the deltas of `lora` for a model with these `names`, at strength 1. Raises ModelError if a module
    belongs to no weight of the model, or does not have its shape."""
    path = lora.file.path
    targets = {module: find(names, module) for module in lora.modules}
    unknown = [module for module, weights in targets.items() if not weights]
    if unknown:
        raise bad(path, f"{_stranger(unknown, len(targets))}: not a LoRA for this model")
    deltas: Deltas = {}
    for module, target in ((module, target) for module, weights in targets.items() for target in weights):
        of_component = deltas.setdefault(target.component, {})
        if target.name in of_component:
            twice = of_component[target.name][0].module
            raise bad(path, f"modules {first([module])} and '{clean(twice, 80)}' are of one weight")
        of_component[target.name] = (_low_rank(lora, module, target),)
    return deltas


def strengthened(deltas: Deltas, strength: float, mode: Mode = "auto") -> Deltas:
    """Return the deltas at another strength, in the weights or as branches beside them."""
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


# Keys


def _modules(path: Path, pieces: Mapping[str, TensorSlice]) -> dict[str, Module]:
    roles: dict[str, dict[str, TensorSlice]] = {}
    for key, piece in pieces.items():
        name, role = _parsed(path, key)
        other = roles.setdefault(name, {}).setdefault(role, piece)
        if other is not piece:
            raise bad(path, f"tensors '{clean(other.key, 80)}' and {first([key])} are the same")
    modules = {
        name: Module(
            {role: piece for role, piece in by_role.items() if role not in _SCALES},
            {role: piece for role, piece in by_role.items() if role in _SCALES},
        )
        for name, by_role in roles.items()
    }
    if not modules:
        raise bad(path, "holds no tensors")
    for module in modules.values():
        if not module.parts:
            key = next(iter(module.scales.values())).key
            raise bad(path, f"tensor {first([key])} is of a module without factors: the file is incomplete")
        for piece in module.parts.values():
            if len(piece.shape) < 2 or 0 in piece.shape:
                raise bad(path, f"tensor {first([piece.key])} has shape {list(piece.shape)}, which no factor has")
    return modules


def _parsed(path: Path, key: str) -> tuple[str, str]:
    """Return the module and the role of a key. Raises ModelError."""
    for pattern, what in _REFUSED:
        if pattern.fullmatch(key):
            raise bad(path, f"{what}, see tensor {first([key])}: LoRA, LoCon, LoHa, LoKr and DoRA are read")
    for pattern, role in _ENDINGS:
        if match := pattern.fullmatch(key):
            return match[1], role or match["role"]
    raise bad(path, f"tensor {first([key])} is of no LoRA that is known: LoRA, LoCon, LoHa, LoKr and DoRA are read")


# One module


def _low_rank(lora: LoraFile, module: str, target: Target) -> LowRank:
    path, parts_of = lora.file.path, lora.modules[module]
    kind = delta.kind_of(frozenset(parts_of.parts))
    if kind is None:
        raise delta.not_complete(path, module, frozenset(parts_of.parts))
    magnitude = parts_of.scales.get("dora_scale") or parts_of.scales.get("magnitude")
    try:
        rank = delta.check(kind, parts_of.parts, target.layer)
        of_peft = "magnitude" in parts_of.scales
        by_inputs = magnitude is not None and delta.check_magnitude(magnitude, target.layer, of_peft=of_peft)
        if by_inputs and target.layer != target.shape:
            raise ValueError("its magnitude is of the inputs of several layers at once, which is not read")
        scale = scale_of(lora, module, rank)
    except ValueError as error:
        raise bad(path, f"module {first([module])}: {error}: not a LoRA for this model") from None
    return LowRank(
        module=module,
        kind=kind,
        parts=parts_of.parts,
        rank=rank,
        scale=scale,
        magnitude=magnitude,
        by_inputs=by_inputs,
        rows=target.rows,
        swapped=target.swapped,
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
