"""LoRA files that are written: with the names that most programs read for the model, the scale in the factors, and
only if the loader of this project reads back what was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qwenimg.common.base.atomic_files import write_parts
from qwenimg.common.base.errors import ModelError, NumericsError
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.formats.safetensors import BITS, entry, head
from qwenimg.common.formats.stored import DTYPES
from qwenimg.common.quant.bits import finite, narrowed
from qwenimg.common.weights.loras.delta import LowRank, floats
from qwenimg.common.weights.loras.factors import Factors
from qwenimg.common.weights.loras.lora import fit, read_lora
from qwenimg.common.weights.loras.lora_names import Names, flat

if TYPE_CHECKING:
    import numpy as np

_PEFT = {"down": "lora_A.weight", "up": "lora_B.weight"}
_KOHYA = {"down": "lora_down.weight", "up": "lora_up.weight"}


@dataclass(frozen=True, kw_only=True)
class LayerName:
    """A layer by its name in a file. kohya: with underscores, and alpha beside the factors."""

    prefix: str
    path: str  # dotted
    is_kernel: bool = False  # whether other programs know this matrix as a 1x1 convolution

    @property
    def kohya(self) -> bool:
        return self.prefix.endswith("_")

    @property
    def text(self) -> str:
        return self.prefix + (flat(self.path) if self.kohya else self.path)

    def key(self, role: str) -> str:
        """Return the key of a factor."""
        return f"{self.text}.{(_KOHYA if self.kohya else _PEFT)[role]}"


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerChange:
    """The change of one layer that is written, of so much `rank`. factors: makes it when it is written."""

    component: str
    parameter: str
    layer: LayerName
    weight: Shape  # of the model, with the inputs that the change adds
    rank: int
    factors: Callable[[], Factors]

    @property
    def shapes(self) -> dict[str, Shape]:
        kernel = (1, 1) if self.layer.is_kernel else self.weight[2:]
        ones = (1,) * len(kernel)
        return {"down": (self.rank, self.weight[1], *kernel), "up": (self.weight[0], self.rank, *ones)}


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeChange:
    """A tensor with the shape of a bias or of a norm's weight."""

    component: str
    parameter: str
    key: str
    shape: Shape
    values: Callable[[], np.ndarray] = field(repr=False)


class _Tensor(NamedTuple):
    key: str
    dtype: str
    shape: Shape
    values: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        count = 1
        for side in self.shape:
            count *= side
        return count * BITS[self.dtype] // 8


def write_lora(
    path: Path,
    layers: Sequence[LayerChange],
    wholes: Sequence[WholeChange],
    metadata: Mapping[str, str],
    names: Names,
    *,
    dtype: str,
    overwrite: bool,
) -> None:
    """Write a LoRA; dtype: as headers name it. The file gets its name once it has been read back: all of it matched,
    finite, and not zero. Raises UsageError, DoesNotFit, ModelError and NumericsError."""
    tensors = [*_tensors(layers, wholes, dtype)]
    entries, at = dict[str, object](), 0
    for one in tensors:
        entries[one.key] = entry(one.dtype, one.shape, at, at + one.nbytes)
        at += one.nbytes
    first = head(entries, metadata)

    def parts() -> Iterator[memoryview]:
        yield memoryview(first)
        for one in tensors:
            values = narrowed(one.values(), DTYPES[one.dtype])
            assert values.shape == one.shape, (one.key, values.shape, one.shape)
            if not finite(values).all():
                large = "; write it with --dtype fp32" if one.dtype == "F16" else ""
                where = f"{shown_path(path)}: {clean(one.key, 80)}"
                raise NumericsError(f"{where} is not finite in {DTYPES[one.dtype]}: nothing is written{large}")
            if values.size:
                yield values.reshape(-1).data.cast("B")

    meant = {(one.component, one.parameter) for one in layers} | {(one.component, one.parameter) for one in wholes}
    write_parts(
        path, len(first) + at, parts(), overwrite=overwrite, check=lambda temp: _read_back(temp, path, names, meant)
    )


def _tensors(layers: Sequence[LayerChange], wholes: Sequence[WholeChange], dtype: str) -> Iterator[_Tensor]:
    """Yield the tensors of a file; those of 4 bytes first, so that each begins at a multiple of its size."""
    import numpy as np

    for one in layers:
        if one.layer.kohya:
            rank = np.array(one.rank, np.float32)
            yield _Tensor(f"{one.layer.text}.alpha", "F32", (), lambda rank=rank: rank)  # type: ignore[misc]
    for one in layers:
        kept: list[Factors] = []  # both tensors of one layer are made at once

        def values(role: str, one: LayerChange = one, kept: list[Factors] = kept) -> np.ndarray:
            factors = kept.pop() if role == "up" else one.factors()
            if role == "down":
                kept.append(factors)
            array = factors.down if role == "down" else factors.up
            return np.ascontiguousarray(array, np.float32).reshape(one.shapes[role])

        for role, shape in one.shapes.items():
            yield _Tensor(one.layer.key(role), dtype, shape, lambda role=role, values=values: values(role))  # type: ignore[misc]
    for whole in wholes:
        yield _Tensor(whole.key, dtype, whole.shape, whole.values)


def _read_back(temp: Path, path: Path, names: Names, meant: set[tuple[str, str]]) -> None:
    """Check the file that was written: the loader finds in it the changes that were meant, and one is not zero."""

    def wrong(text: str) -> ModelError:
        return ModelError(f"{shown_path(path)}: {text}: nothing is written; report it")

    try:
        with closing(read_lora(temp)) as lora:
            deltas = fit(lora, names)
            found = {(component, name) for component, by_name in deltas.items() for name in by_name}
            if found != meant:
                raise wrong(f"{len(found ^ meant)} of its {len(meant)} layers are read back as others")
            if not any(_is_change(one) for by_name in deltas.values() for every in by_name.values() for one in every):
                raise NumericsError(f"{shown_path(path)}: changes nothing (every factor up is 0): nothing is written")
    except NumericsError:
        raise
    except ModelError as error:
        shown = str(error).replace(clean(temp), shown_path(path))
        raise wrong(f"is not read back ({shown})") from None


def _is_change(delta: object) -> bool:
    """Return whether a change is not of zeros."""
    piece = delta.parts["up"] if isinstance(delta, LowRank) else getattr(delta, "piece", None)
    return piece is not None and bool(floats(piece).any())
