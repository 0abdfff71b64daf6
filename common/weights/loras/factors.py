"""The change of a LoRA as two factors, exact for every kind but DoRA, and the nearest one of a lower rank.

- LoRA: its factors. Tucker: the core joins the right one.
- LoHa, (a1 b1) * (a2 b2): the products of columns of a1 and a2, and of rows of b1 and b2; the rank is that of both.
- LoKr, kron(a1 b1, a2 b2) = kron(a1, a2) kron(b1, b2).

The nearest change of a lower rank, in the sum of squares, has the largest singular values: of the small matrix between
the QR decompositions of both factors, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from qwenimg.common.base.shape import Shape
from qwenimg.common.weights.loras.delta import (
    LOHA,
    LOKR,
    LORA,
    MAX_RANK,
    LowRank,
    core_product,
    flat_factor,
    floats,
    not_finite,
    rows_of,
)

if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray]


class Factors(NamedTuple):
    """A change up @ down: down [rank in], up [out rank], float32."""

    down: np.ndarray
    up: np.ndarray


class Reduced(NamedTuple):
    """Factors of a lower rank, and the share of the change's norm that they have, 0 to 1."""

    factors: Factors
    share: float


def exact(delta: LowRank, inputs: int) -> Factors:
    """Return the factors of a change of a weight of so many `inputs`, with scale and strength in `up`.

    Raises ModelError for values that are not finite, and ValueError for a kind whose change depends on the weight or
    has too high a rank."""
    import numpy as np

    if delta.magnitude is not None:
        raise ValueError(
            "is DoRA, whose change depends on the model's weights: merge it into a model by qwenimg convert --lora"
        )
    if exact_rank(delta) > MAX_RANK:
        raise ValueError(f"has rank {exact_rank(delta)}, and a LoRA at most {MAX_RANK}: use the file as it is")
    arrays = {role: flat_factor(role, floats(piece)) for role, piece in delta.parts.items()}
    with np.errstate(all="ignore"):  # the check below refuses values that are not finite
        up, down = _sides(delta.kind, arrays)
        up = rows_of(up, delta.rows, swapped=delta.swapped) * np.float32(delta.scale * delta.strength)
    if not (np.isfinite(down).all() and np.isfinite(up).all()):
        raise not_finite(next(iter(delta.parts.values())), delta.module)
    return Factors(np.pad(down, ((0, 0), (0, inputs - down.shape[1]))), up)


def exact_rank(delta: LowRank) -> int:
    """Return the rank of the exact factors, by the shapes alone."""
    shapes = {role: piece.shape for role, piece in delta.parts.items()}
    if delta.kind == LOKR:
        return _lokr_rank(shapes, "1") * _lokr_rank(shapes, "2")
    if delta.kind == LOHA:
        return shapes["hada_w1_b"][0] * shapes["hada_w2_b"][0]
    return shapes["down"][0]


def _lokr_rank(shapes: Mapping[str, Shape], number: str) -> int:
    whole = shapes.get(f"lokr_w{number}")
    return shapes[f"lokr_w{number}_b"][0] if whole is None else min(whole[0], prod(whole[1:]))


def _sides(kind: str, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Return the left and the right factor of a module, without scale."""
    import numpy as np

    if kind == LORA:
        return arrays["up"], arrays["down"]
    if kind == LOKR:
        (a1, b1), (a2, b2) = (_half(arrays, number) for number in "12")
        return np.kron(a1, a2), np.kron(b1, b2)
    if kind == LOHA:
        (a1, b1), (a2, b2) = (_hada(arrays, number) for number in "12")
        left = (a1[:, :, None] * a2[:, None, :]).reshape(len(a1), -1)
        return left, (b1[:, None, :] * b2[None, :, :]).reshape(-1, b1.shape[1])
    return arrays["up"], _with_core(arrays["mid"], arrays["down"])


def _with_core(core: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the sum over s of core[r s k l] right[s i], as [r, i * k * l]."""
    import numpy as np

    return core_product(core, np.eye(len(core), dtype=np.float32), right)


def _hada(arrays: Arrays, number: str) -> tuple[np.ndarray, np.ndarray]:
    a, b, core = arrays[f"hada_w{number}_a"], arrays[f"hada_w{number}_b"], arrays.get(f"hada_t{number}")
    return (a, b) if core is None else (a.T, _with_core(core, b))


def _half(arrays: Arrays, number: str) -> tuple[np.ndarray, np.ndarray]:
    """Return two factors of one half of LoKr; of a whole one, itself and a unit matrix."""
    import numpy as np

    name = f"lokr_w{number}"
    if name in arrays:
        whole = arrays[name]
        unit = np.eye(min(whole.shape), dtype=np.float32)
        return (unit, whole) if whole.shape[0] <= whole.shape[1] else (whole, unit)
    if f"lokr_t{number}" in arrays:
        return arrays[f"{name}_a"].T, _with_core(arrays[f"lokr_t{number}"], arrays[f"{name}_b"])
    return arrays[f"{name}_a"], arrays[f"{name}_b"]


def joined(several: list[Factors]) -> Factors:
    """Return the factors of the sum of changes of one weight: their ranks one after the other."""
    import numpy as np

    if len(several) == 1:
        return several[0]
    return Factors(np.concatenate([one.down for one in several]), np.concatenate([one.up for one in several], axis=1))


def reduced(factors: Factors, rank: int) -> Reduced:
    """Return the nearest factors of at most this rank, both of the same size."""
    import numpy as np

    left, left_rest = np.linalg.qr(factors.up.astype(np.float64))
    right, right_rest = np.linalg.qr(factors.down.T.astype(np.float64))
    u, values, v = np.linalg.svd(left_rest @ right_rest.T)
    total = float(np.square(values).sum())
    rank = min(rank, len(values))
    root = np.sqrt(values[:rank])
    up, down = left @ (u[:, :rank] * root), (root[:, None] * v[:rank]) @ right.T
    share = (float(np.square(values[:rank]).sum()) / total) ** 0.5 if total else 1.0
    return Reduced(Factors(down.astype(np.float32), up.astype(np.float32)), share)
