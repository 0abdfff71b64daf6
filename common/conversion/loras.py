"""LoRA files made of others: several added up, and one of a lower rank.

A sum is exact: the ranks of each layer stand one after the other. With a rank, each layer has the nearest change of
that rank (`factors.reduced`). Layers are made one by one while the file is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean
from qwenimg.common.families.registry import OpenModel
from qwenimg.common.formats.file_hash import data_sha256
from qwenimg.common.formats.stored import DTYPES
from qwenimg.common.weights.loras import lora_metadata
from qwenimg.common.weights.loras.delta import MAX_RANK, LowRank, Whole
from qwenimg.common.weights.loras.factors import Factors, exact, exact_rank, joined, reduced
from qwenimg.common.weights.loras.lora import Deltas, LoraFile, fit, strengthened
from qwenimg.common.weights.loras.lora import joined as all_of
from qwenimg.common.weights.loras.lora_metadata import Json
from qwenimg.common.weights.loras.lora_writing import LayerChange, LayerName, WholeChange, write_lora

if TYPE_CHECKING:
    import numpy as np

_WIDEST = ("F32", "BF16", "F16")  # of two 16-bit dtypes neither holds the other: float32 then


@dataclass(frozen=True, kw_only=True, eq=False)
class Term:
    """One LoRA of a sum, with its strength."""

    lora: LoraFile
    strength: float

    @property
    def described(self) -> dict[str, Json]:
        path = self.lora.file.path
        return {"file": clean(path.name, 100), "strength": self.strength, "sha256": data_sha256(self.lora.file)}


@dataclass(kw_only=True)
class Made:
    """A LoRA that was made: its layers, ranks, and the least and the mean share of the changes that it has."""

    layers: int
    ranks: tuple[int, ...]
    dtype: str
    shares: list[float] = field(default_factory=list)

    @property
    def line(self) -> str:
        low, high = min(self.ranks), max(self.ranks)
        ranks = f"rank {low}" if low == high else f"ranks {low} to {high}"
        line = f"{self.layers} layers, {ranks}, {DTYPES[self.dtype]}"
        if not self.shares:
            return f"{line}; exact but for the rounding to it"
        mean = sum(self.shares) / len(self.shares)
        return f"{line}; {100 * mean:.1f} % of the change is left, {100 * min(self.shares):.1f} % in the worst layer"


def add_up(
    terms: Sequence[Term], model: OpenModel, path: Path, *, rank: int | None, dtype: str | None, overwrite: bool
) -> Made:
    """Write the sum of `terms`, LoRAs for `model`. rank: of each layer at most; None: exact. dtype: as headers name it;
    None: the widest of the terms. Raises QwenimgError."""
    if rank is not None and not 1 <= rank <= MAX_RANK:
        raise UsageError(f"--rank is {rank}; choose 1 to {MAX_RANK}")
    names = model.family.lora_names(model.checkpoint)
    fitted = [strengthened(fit(one.lora, names), one.strength) for one in terms if one.strength]
    if not fitted:
        raise UsageError("every strength is 0: nothing would be left; give a strength, as in FILE:0.5")
    deltas = all_of(fitted)
    _check_several(deltas)
    layer = model.family.lora_layer_names(model.checkpoint)
    shapes = {name: part.plan.shapes for name, part in model.checkpoint.components.items()}
    dtype = dtype or _widest(terms)
    made = Made(layers=0, ranks=(), dtype=dtype)
    layers, wholes = list[LayerChange](), list[WholeChange]()
    for component, by_name in deltas.items():
        for name, every in by_name.items():
            low = [one for one in every if isinstance(one, LowRank)]
            if low:
                layers.append(_layer(component, name, low, shapes[component][name], layer(component, name), rank, made))
            else:
                whole = [one for one in every if isinstance(one, Whole)]
                wholes.append(_whole(component, name, whole, shapes[component][name], layer(component, name)))
    made.layers, made.ranks = len(layers), tuple(one.rank for one in layers)
    write_lora(path, layers, wholes, _metadata(terms, model, made, path), names, dtype=dtype, overwrite=overwrite)
    return made


def _layer(
    component: str, name: str, every: Sequence[LowRank], shape: Shape, layer: LayerName, rank: int | None, made: Made
) -> LayerChange:
    """Return the sum of the changes of one weight."""
    widths = [one.inputs or shape[1] for one in every]
    weight: Shape = (shape[0], max(widths), *shape[2:])
    inputs = weight[1]
    for side in weight[2:]:
        inputs *= side
    full, most = sum(map(exact_rank, every)), min(rank or MAX_RANK, weight[0], inputs)

    def factors() -> Factors:
        parts = [_exact(one, inputs) for one in every]
        whole = joined(parts)
        if full <= most:
            return whole
        lower = reduced(whole, most)
        made.shares.append(lower.share)
        return lower.factors

    return LayerChange(
        component=component, parameter=name, layer=layer, weight=weight, rank=min(full, most), factors=factors
    )


def _exact(one: LowRank, inputs: int) -> Factors:
    try:
        return exact(one, inputs)
    except ModelError:
        raise
    except ValueError as error:
        path = next(iter(one.parts.values())).file.path
        raise bad(path, f"module '{clean(one.module, 80)}' {error}") from None


def _whole(component: str, name: str, every: Sequence[Whole], shape: Shape, layer: LayerName) -> WholeChange:
    """Return the sum of biases, or the norm's weight of the only term that has one."""
    role = "weight" if every[0].replaces else "lora_B.bias"

    def values() -> np.ndarray:
        import numpy as np

        zero = np.zeros(shape, np.float32)
        total: np.ndarray = sum((one.added(zero) for one in every), zero)
        return total

    return WholeChange(component=component, parameter=name, key=f"{layer.text}.{role}", shape=shape, values=values)


def _check_several(deltas: Deltas) -> None:
    """Raise ModelError for two norms in place of one, which have no sum."""
    for by_name in deltas.values():
        for every in by_name.values():
            norms = [one for one in every if isinstance(one, Whole) and one.replaces]
            if len(norms) > 1:
                shown = clean(norms[1].module, 80)
                raise bad(norms[1].piece.file.path, f"module '{shown}' is a norm's weight that another file has too")


def _widest(terms: Sequence[Term]) -> str:
    """Return the dtype that holds the factors of all terms."""
    found = {
        piece.dtype for term in terms for module in term.lora.modules.values() for piece in module.parts.values()
    } & {*_WIDEST, "F64"}
    return found.pop() if len(found) == 1 and found <= {*_WIDEST} else "F32" if found else "BF16"


def _metadata(terms: Sequence[Term], model: OpenModel, made: Made, path: Path) -> Mapping[str, str]:
    words = dict.fromkeys(filter(None, (lora_metadata.trigger(term.lora.metadata) for term in terms)))
    return lora_metadata.made(
        model.family.base_of_loras(model.checkpoint),
        title=clean(path.stem, 100),
        rank=made.ranks[0] if len(set(made.ranks)) == 1 else None,
        run={"made": "sum" if len(terms) > 1 else "change of rank", "of": [term.described for term in terms]},
        trigger=", ".join(words),
    )
