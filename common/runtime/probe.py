"""Search for the operation that made a value not finite: the computation runs again while all are observed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qwenimg.common.base.errors import NumericsError
from qwenimg.common.runtime.engine import Array, Engine, NumpyArray


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """The first operation whose result is not finite."""

    where: str  # the path of its parameters, or the block around it; "" if neither is known
    operation: str
    dtype: str  # of the result
    largest: float | None  # the largest finite absolute value of the result, or None

    def __str__(self) -> str:
        text = f"operation {self.operation}, {self.dtype}"
        return f"{self.where}, {text}" if self.where else text

    @property
    def maximum(self) -> str:
        return "nothing in it is finite" if self.largest is None else f"the rest reaches {self.largest:.3g}"


class Overflow(NumericsError):
    """A value that is not finite, in `part` of the model: text, transformer or vae. `found` is its operation, None if
    no operation of the networks made it."""

    def __init__(self, what: str, cure: str, part: str, found: NotFinite | None):
        super().__init__(f"{what}; {cure}")
        self.what, self.part, self.found = what, part, found

    @property
    def operation(self) -> str:
        return "" if self.found is None else self.found.operation


class _Found(Exception):
    """The first operation with a non-finite result; it ends the second run."""

    def __init__(self, found: NotFinite):
        self.found = found


def first_non_finite(engine: Engine, run: Callable[[], object]) -> NotFinite | None:
    """Run `run` again and return the first operation whose result is not finite, or None.

    An operation without parameters (attention, a gated sum) gets the block of the last one that has some.
    """
    last = ""

    def look(operation: str, path: str, result: Array) -> None:
        nonlocal last
        last = path or last
        if not engine.finite(result):
            dtype = str(getattr(result, "dtype", "")).rpartition(".")[2]
            where = path or _block(last)
            largest = _largest(engine.numpy(result))
            raise _Found(NotFinite(where=where, operation=operation, dtype=dtype, largest=largest))

    try:
        with engine.observe(look):
            engine.finite(run())
    except _Found as error:
        return error.found
    return None


def _largest(values: NumpyArray) -> float | None:
    sizes = np.abs(values[np.isfinite(values)])
    return float(sizes.max()) if sizes.size else None


def _block(path: str) -> str:
    """Return the block of a path: `transformer_blocks.3` for `transformer_blocks.3.attn.to_q`."""
    parts = path.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else parts[0]
