"""The change that one LoRA makes to one weight: a few small factors, and the formula that makes a whole weight of them.

Everything is computed here, in float32 and for both backends alike, so that a fused weight has the same bits on both.
Every formula is over the weight as rows of outputs, [out, in] or [out, in * kh * kw]:

- LoRA, and LoCon of a convolution: up @ down; with `mid` (Tucker) the sum over r, s of up[o r] mid[r s k l] down[s i];
- LoHa: (w1_a @ w1_b) * (w2_a @ w2_b), each with a core t1 and t2 in the Tucker form;
- LoKr: kron(w1, w2), either of them whole or as w_a @ w_b;
- DoRA, on top of any of them: m V / |V| - W with V = W + scale * product, the norm over rows of outputs or of inputs.

Where a module is of a layer that is several weights here, such as q, k and v in one, a delta is some rows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean
from qwenimg.common.formats.stored import DTYPES, TensorSlice, raw
from qwenimg.common.quant.bits import widened
from qwenimg.common.quant.eight_bits import FORMATS, EightBits, format_of
from qwenimg.common.weights.keys import ALL, Rows
from qwenimg.common.weights.plan import Mode

if TYPE_CHECKING:
    import numpy as np

MAX_RANK = 4096
LORA, TUCKER, LOHA, LOKR = "LoRA", "LoRA, Tucker", "LoHa", "LoKr"
FACTORS = (*DTYPES, *FORMATS)  # dtypes that are read

# The required factors of each kind; optional ones follow
_ROLES: Mapping[str, frozenset[str]] = {
    LORA: frozenset({"up", "down"}),
    TUCKER: frozenset({"up", "down", "mid"}),
    LOHA: frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}),
}
_LOHA_CORES = frozenset({"hada_t1", "hada_t2"})
_CORES = frozenset({"mid", "lokr_t2", "hada_t1", "hada_t2"})
_LOKR_HALVES = (
    ({"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"}),
    (
        {"lokr_w2"},
        {"lokr_w2_a", "lokr_w2_b"},
        {"lokr_w2_a", "lokr_w2_b", "lokr_t2"},
    ),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """One module of a LoRA file for one weight. `scale`: the file's alpha / rank; `strength`: the user's."""

    module: str  # its name in the file
    kind: str
    parts: Mapping[str, TensorSlice]  # by role
    rank: int | None  # None: whole factors
    scale: float
    strength: float = 1.0
    mode: Mode = "auto"
    magnitude: TensorSlice | None = None  # DoRA's
    by_inputs: bool = False  # whether its norm is over inputs, not outputs
    rows: Rows = ALL  # of the module, those of the weight
    swapped: bool = False  # whether the weight has the two halves of its rows swapped
    inputs: int | None = None  # of the weight, those that it changes: the first ones; None: all

    @property
    def is_product(self) -> bool:
        """True if the delta is just `up` times `down`, so that it can be computed as a branch."""
        return self.kind == LORA and self.magnitude is None

    def factors(self, inputs: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the factors of a product, float32: down [rank in], and up [out rank] times scale and strength, for a
        weight of so many `inputs`. Raises ModelError for values that are not finite."""
        import numpy as np

        assert self.is_product
        down, up = (flat_factor(role, floats(self.parts[role])) for role in ("down", "up"))
        if self.inputs is not None and inputs > self.inputs:
            down = np.pad(down, ((0, 0), (0, inputs - self.inputs)))
        with np.errstate(all="ignore"):  # the check below refuses values that are not finite
            up = self._taken(up) * np.float32(self.scale * self.strength)
        if not (np.isfinite(down).all() and np.isfinite(up).all()):
            raise self._not_finite()
        return down, up

    def added(self, weight: np.ndarray) -> np.ndarray:
        """Return the LoRA's addition to `weight`, float32, in its shape. Raises ModelError for values that are not
        finite."""
        import numpy as np

        if self.inputs is not None and weight.shape[1] > self.inputs:
            change = replace(self, inputs=None).added(weight[:, : self.inputs])
            return np.pad(change, ((0, 0), (0, weight.shape[1] - self.inputs)))
        with np.errstate(all="ignore"):  # the check below refuses values that are not finite
            if self.magnitude is None:
                change = self._product(self.scale * self.strength).reshape(weight.shape)
            else:
                change = self._decomposed(weight, self._product(self.scale).reshape(weight.shape))
                change *= np.float32(self.strength)
            sound = np.isfinite(change.sum()) or np.isfinite(change).all()  # a sum is faster, and may be too large
        if not sound:
            raise self._not_finite()
        return change

    def _not_finite(self) -> ModelError:
        return not_finite(next(iter(self.parts.values())), self.module)

    def _product(self, scale: float) -> np.ndarray:
        """Return scale times the product of the factors. Scaling one of two factors is less work than scaling their
        product."""
        import numpy as np

        arrays = {role: flat_factor(role, floats(piece)) for role, piece in self.parts.items()}
        if self.kind == LOHA:
            product: np.ndarray = _hadamard(arrays, "1") * _hadamard(arrays, "2")
            return self._taken(product) * np.float32(scale)
        if self.kind == LOKR:
            return self._taken(_kronecker(arrays)) * np.float32(scale)
        up = self._taken(arrays["up"]) * np.float32(scale)
        if self.kind == TUCKER:
            return core_product(arrays["mid"], up.T, arrays["down"])
        change: np.ndarray = up @ arrays["down"]
        return change

    def _taken(self, module: np.ndarray) -> np.ndarray:
        """Return the rows of a module that belong to the weight, in the weight's order."""
        return rows_of(module, self.rows, swapped=self.swapped)

    def _decomposed(self, weight: np.ndarray, change: np.ndarray) -> np.ndarray:
        """Return the change by PEFT's formula for DoRA, which divides by the norm of the changed weight. (ComfyUI
        divides by the norm of the unchanged weight.)"""
        import numpy as np

        assert self.magnitude is not None
        changed = weight + change
        axes = tuple(i for i in range(weight.ndim) if i != int(self.by_inputs))
        norm = np.sqrt(np.square(changed).sum(axis=axes, keepdims=True))
        magnitude = floats(self.magnitude)
        wanted = (magnitude if self.by_inputs else self._taken(magnitude.reshape(-1))).reshape(norm.shape)
        result: np.ndarray = changed * (wanted / np.maximum(norm, np.finfo(np.float32).tiny)) - weight
        return result


@dataclass(frozen=True, kw_only=True, eq=False)
class Whole:
    """A tensor of a LoRA file with the shape of a parameter: it is added to a bias, as the factors' own bias, or takes
    the place of a norm's weight, at any strength but 0."""

    module: str  # its name in the file
    piece: TensorSlice
    replaces: bool
    scale: float = 1.0
    strength: float = 1.0
    mode: Mode = "auto"
    rows: Rows = ALL
    swapped: bool = False
    is_product: ClassVar[bool] = False
    rank: ClassVar[None] = None
    inputs: ClassVar[None] = None

    def factors(self, inputs: int = 0) -> tuple[np.ndarray, np.ndarray]:
        raise AssertionError("a whole tensor has no factors")

    def added(self, weight: np.ndarray) -> np.ndarray:
        """Return its addition to `weight`, float32. Raises ModelError for values that are not finite."""
        import numpy as np

        values = rows_of(floats(self.piece), self.rows, swapped=self.swapped)
        with np.errstate(all="ignore"):  # the check below refuses values that are not finite
            change: np.ndarray = values - weight if self.replaces else values * np.float32(self.scale * self.strength)
        if not np.isfinite(change).all():
            raise not_finite(self.piece, self.module)
        return change


def rows_of(module: np.ndarray, rows: Rows, *, swapped: bool) -> np.ndarray:
    """Return the `rows` of a module that belong to a weight, in the weight's order, with zeros beside a part of it."""
    import numpy as np

    begin, end, of = rows
    if rows.reaches_beyond:
        beside = [(-begin * len(module), (end - of) * len(module))]
        return np.pad(module, beside + [(0, 0)] * (module.ndim - 1))
    part = len(module) // of
    own = module if of == 1 else module[begin * part : end * part]
    return np.roll(own, len(own) // 2, axis=0) if swapped else own


def not_finite(piece: TensorSlice, module: str) -> ModelError:
    shown = clean(module, 80)
    return bad(piece.file.path, f"module '{shown}' has values that are not finite: fetch it again")


def floats(piece: TensorSlice) -> np.ndarray:
    """Return the values of a tensor in float32. Raises ModelError if the file changed or ended early."""
    array, format = raw(piece), format_of(piece.dtype)
    return widened(array) if format is None else EightBits(format).values([array])


def flat_factor(role: str, array: np.ndarray) -> np.ndarray:
    """Return a factor as a matrix, with its kernel axes joined to the columns; the core of a Tucker form is returned as
    it is."""
    return array if role in _CORES else array.reshape(len(array), -1)


def core_product(core: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the sum over r, s of left[r o] core[r s k l] right[s i], as [o, i * k * l]."""
    import numpy as np

    product: np.ndarray = np.einsum("ro,rskl,si->oikl", left, core, right, optimize=True)
    return product.reshape(left.shape[1], -1)


def _hadamard(arrays: Mapping[str, np.ndarray], number: str) -> np.ndarray:
    a, b = arrays[f"hada_w{number}_a"], arrays[f"hada_w{number}_b"]
    core = arrays.get(f"hada_t{number}")
    product: np.ndarray = a @ b if core is None else core_product(core, a, b)
    return product


def _kronecker(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the Kronecker product. A kernel's points stay the last axis of the second factor, and so of the
    product's rows."""
    import numpy as np

    first = arrays["lokr_w1"] if "lokr_w1" in arrays else arrays["lokr_w1_a"] @ arrays["lokr_w1_b"]
    if "lokr_w2" in arrays:
        second = arrays["lokr_w2"]
    elif "lokr_t2" in arrays:
        second = core_product(arrays["lokr_t2"], arrays["lokr_w2_a"], arrays["lokr_w2_b"])
    else:
        second = arrays["lokr_w2_a"] @ arrays["lokr_w2_b"]
    product: np.ndarray = np.kron(first, second)
    return product


# Checks by headers: the kind of a LoRA, and whether it fits


def kind_of(roles: frozenset[str]) -> str | None:
    """Return the kind that has these factors, or None for an incomplete or mixed set."""
    for kind, needed in _ROLES.items():
        if roles == needed or (kind == LOHA and roles == needed | _LOHA_CORES):
            return kind
    halves = ([half for half in side if roles & half == half] for side in _LOKR_HALVES)
    chosen = [max(complete, key=len, default=set[str]()) for complete in halves]
    return LOKR if all(chosen) and roles == frozenset().union(*chosen) else None


def rank_of(parts: Mapping[str, TensorSlice]) -> int | None:
    """Return the divisor of alpha, or None for whole factors and for shapes that no factor has."""
    for role in ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b"):
        if role in parts and parts[role].shape and parts[role].shape[0]:
            return parts[role].shape[0]
    return None


def check(kind: str, parts: Mapping[str, TensorSlice], weight: Shape) -> int | None:
    """Return the rank of factors whose product has the shape of `weight`. Raises ValueError with the reason if they do
    not fit."""
    shapes = {role: piece.shape for role, piece in parts.items()}
    for role, piece in parts.items():
        if piece.dtype not in FACTORS:
            raise ValueError(f"{role} is {piece.dtype}, which is not read")
        if not 2 <= len(piece.shape) <= 4 or 0 in piece.shape:
            raise ValueError(f"{role} has shape {list(piece.shape)}")
    flat = (weight[0], prod(weight[1:]))
    shape, rank = {LORA: _check_lora, TUCKER: _check_tucker, LOHA: _check_loha, LOKR: _check_lokr}[kind](shapes, weight)
    if shape != flat:
        raise ValueError(f"makes {list(shape)} of a weight {list(weight)}")
    if rank is not None and not 1 <= rank <= MAX_RANK:
        raise ValueError(f"has rank {rank}; 1 to {MAX_RANK} are read")
    return rank


def check_magnitude(piece: TensorSlice, weight: Shape, *, of_peft: bool) -> bool:
    """Return whether DoRA's magnitude has a value for each input, and not for each output. Raises ValueError if it
    has neither."""
    count = prod(piece.shape)
    if piece.dtype not in FACTORS or not piece.shape:
        raise ValueError(f"its magnitude is {piece.dtype} {list(piece.shape)}, which is not read")
    if count == weight[0] and (of_peft or piece.shape[0] == weight[0]):
        return False
    if not of_peft and len(piece.shape) > 1 and piece.shape[0] == 1 and count == piece.shape[1] == weight[1]:
        return True
    raise ValueError(f"its magnitude has shape {list(piece.shape)}, for a weight {list(weight)}")


_Shapes = Mapping[str, Shape]
_Flat = tuple[tuple[int, int], int | None]


def _matrix(shape: Shape, role: str) -> tuple[int, int]:
    """Return the sides of a factor without a kernel, [a b] or [a b 1 1]."""
    if prod(shape[2:]) != 1:
        raise ValueError(f"{role} has shape {list(shape)}; expected a matrix")
    return shape[0], shape[1]


def _joined(left: int, right: int) -> int:
    if left != right:
        raise ValueError(f"its factors do not fit: ranks {left} and {right}")
    return left


def _kernel(shape: Shape, weight: Shape, role: str) -> None:
    """Check that the axes after the first two, if any, equal the weight's kernel."""
    if tuple(n for n in shape[2:] if n != 1) != tuple(n for n in weight[2:] if n != 1):
        raise ValueError(f"{role} has shape {list(shape)}, for a weight {list(weight)}")


def _check_lora(shapes: _Shapes, weight: Shape) -> _Flat:
    outputs, rank = _matrix(shapes["up"], "up")
    down = shapes["down"]
    _kernel(down, weight, "down")
    return (outputs, prod(down[1:])), _joined(rank, down[0])


def _check_tucker(shapes: _Shapes, weight: Shape) -> _Flat:
    (outputs, left), (right, inputs) = _matrix(shapes["up"], "up"), _matrix(shapes["down"], "down")
    return _cored(shapes["mid"], weight, left, right, "mid", (outputs, inputs)), right


def _cored(core: Shape, weight: Shape, left: int, right: int, role: str, sides: tuple[int, int]) -> tuple[int, int]:
    if len(core) != 4:
        raise ValueError(f"{role} has shape {list(core)}; expected four axes")
    _kernel(core, weight, role)
    _joined(core[0], left)
    _joined(core[1], right)
    return sides[0], sides[1] * prod(core[2:])


def _check_loha(shapes: _Shapes, weight: Shape) -> _Flat:
    shapes_made, ranks = zip(*(_check_half(shapes, weight, number) for number in "12"), strict=True)
    if shapes_made[0] != shapes_made[1]:
        raise ValueError(f"its halves make {list(shapes_made[0])} and {list(shapes_made[1])}")
    return shapes_made[0], ranks[0]


def _check_half(shapes: _Shapes, weight: Shape, number: str) -> tuple[tuple[int, int], int]:
    names = f"hada_w{number}_a", f"hada_w{number}_b"
    a, b = (_matrix(shapes[name], name) for name in names)
    core = f"hada_t{number}"
    if core not in shapes:
        return (a[0], b[1]), _joined(a[1], b[0])
    return _cored(shapes[core], weight, a[0], b[0], core, (a[1], b[1])), b[0]


def _check_lokr(shapes: _Shapes, weight: Shape) -> _Flat:
    """Return the shape and the rank of a LoKr product. The rank is that of its factored side (the second if both are
    factored), None if neither is."""
    rank: int | None = None
    if "lokr_w1" in shapes:
        first = _matrix(shapes["lokr_w1"], "lokr_w1")
    else:
        a, b = (_matrix(shapes[f"lokr_w1_{half}"], f"lokr_w1_{half}") for half in "ab")
        first, rank = (a[0], b[1]), _joined(a[1], b[0])
    if "lokr_w2" in shapes:
        whole = shapes["lokr_w2"]
        _kernel(whole, weight, "lokr_w2") if len(whole) > 2 else None
        second = whole[0], prod(whole[1:])
    else:
        a, b = (_matrix(shapes[f"lokr_w2_{half}"], f"lokr_w2_{half}") for half in "ab")
        if "lokr_t2" in shapes:
            second, rank = _cored(shapes["lokr_t2"], weight, a[0], b[0], "lokr_t2", (a[1], b[1])), b[0]
        else:
            second, rank = (a[0], b[1]), _joined(a[1], b[0])
    return (first[0] * second[0], first[1] * second[1]), rank


def not_complete(path: object, module: str, roles: frozenset[str]) -> ModelError:
    """Return the error for factors that alone make no delta."""
    shown = ", ".join(sorted(roles))
    return bad(str(path), f"module '{clean(module, 80)}' has only {shown}: the file is incomplete, fetch it again")
