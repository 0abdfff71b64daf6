"""Of every parameter of a component where it is, how it is kept, what is added to it and when it is there.

A plan is made by `keys`, which reads headers only, and rewritten by pure functions (`stored`, `with_deltas`, `only`,
`when`); a backend's `load.py` executes it, reading values with `read`. The network never knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from qwenimg.common.base.safe_files import OpenFile, bad
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.codes.affine import Affine, Coded, Kept, encode
from qwenimg.common.codes.bits import finite, widened
from qwenimg.common.codes.block_float import BlockFloat
from qwenimg.common.codes.gguf_blocks import Blocks
from qwenimg.common.formats.stored import DTYPES, NUMPY, TOO_LARGE, Piece, raw
from qwenimg.common.precision.precision import BYTES, Precision
from qwenimg.common.precision.residency import ALWAYS, Residency
from qwenimg.common.weights.not_finite import not_finite
from qwenimg.common.weights.storage import Codes, Packed, Storage

if TYPE_CHECKING:
    import numpy as np

PART = 1 << 20  # values of a tensor that is read in parts

# What is done to a tensor as it is stored, beside dropping dimensions of 1: rows and columns exchanged; or of a causal
# convolution over time [O I T kh kw] the last tap [O I kh kw], all that one frame uses: those before it are zero.
Decode = Literal["transposed", "last_tap"]


class Code(Protocol):
    """How the pieces of a weight that is stored in fewer bits mean its values."""

    def shape(self, pieces: Sequence[Piece]) -> Shape:
        """Of the values."""

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The values in float32, of `raw` of the pieces, in any shape."""


Keeping: TypeAlias = Affine | BlockFloat | Blocks
"""Codes that can stay codes in memory: as what `kept` says, by `coded`. All others are decoded while they are read."""

Mode = Literal["auto", "fuse", "side"]
"""Of a LoRA: in the weight, or beside it as a branch; auto: beside a weight that is kept in codes, in every other."""


class Delta(Protocol):
    """What is added to a weight: a module of a LoRA."""

    @property
    def strength(self) -> float:
        """At 0 nothing is added."""

    @property
    def mode(self) -> Mode:
        """Where it is to be added."""

    @property
    def is_product(self) -> bool:
        """Whether it has `factors`."""

    @property
    def rank(self) -> int | None:
        """Of its factors."""

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """float32 [rank in] and [out rank], whose product it is."""

    def added(self, weight: np.ndarray) -> np.ndarray:
        """float32, in the shape of `weight`, the values that it is added to."""


class Source(NamedTuple):
    """Where a parameter comes from. Messages name its first piece."""

    pieces: tuple[Piece, ...]
    code: Code | None = None
    decode: Decode | None = None
    channels_last: bool = False  # the file has the channels of a kernel's input behind its points

    @property
    def first(self) -> Piece:
        return self.pieces[0]

    @property
    def dtype(self) -> str:
        """Of the values that `read` returns."""
        return "float32" if self.code else DTYPES[self.first.dtype]

    @property
    def kept(self) -> Kept | None:
        """As what its own codes can stay in memory, where they can."""
        return self.code.kept(self.pieces) if isinstance(self.code, Keeping) and self.decode is None else None

    @property
    def shape(self) -> Shape:
        """Of the values, before `decode`."""
        if self.channels_last:
            rows, *points, channels = self.first.shape
            return (rows, channels, *points)
        return self.code.shape(self.pieces) if self.code else self.first.shape

    @property
    def is_plain(self) -> bool:
        """Whether its values are the bytes of one tensor, in their order."""
        return self.code is None and self.decode is None and not self.channels_last


class Use(NamedTuple):
    """What a forward makes of a parameter: the shape it has there, how that comes from what is stored, and when."""

    shape: Shape
    decode: Decode | None = None
    residency: Residency = ALWAYS


Uses = dict[str, Use]


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """One parameter: its path in the model, the shape in which the forward uses it, and how it gets there."""

    name: str
    shape: Shape
    source: Source
    storage: Storage
    role: str = ""  # the part of the model whose precision `storage` has: text, transformer or vae
    deltas: tuple[Delta, ...] = ()  # what is added to it
    residency: Residency = ALWAYS
    block: str = ""  # where it is streamed, the path of the module that it is there for
    table: bool = False  # it is looked up and not multiplied

    @property
    def is_beside(self) -> bool:
        """Whether its deltas are a branch beside it, and it stays as it is."""
        if self.table or len(self.shape) != 2 or not all(delta.is_product for delta in self.deltas):
            return False
        modes = {delta.mode for delta in self.deltas}
        return "side" in modes or (modes == {"auto"} and isinstance(self.storage, Packed))

    @property
    def fused(self) -> tuple[Delta, ...]:
        """Those that are added to its values."""
        return () if self.is_beside else self.deltas

    @property
    def branch(self) -> tuple[Delta, ...]:
        """Those that are computed beside it."""
        return self.deltas if self.is_beside else ()

    @property
    def dtype(self) -> str:
        """Of the values that `read` returns."""
        return "float32" if self.fused else self.source.dtype

    @cached_property
    def nbytes(self) -> int:
        return self._bytes(self.storage)

    def _bytes(self, storage: Storage) -> int:
        ranks = sum(delta.rank or 0 for delta in self.branch) if self.deltas else 0
        return storage.nbytes(self.shape) + ranks * sum(self.shape) * BYTES[storage.dtype]

    def under(self, precision: Precision, role: str) -> Storage:
        """Its storage under a policy. Codes stay codes, and are computed in its dtype."""
        return self.storage.computing(precision.weight_dtype(role, self.name, self.residency))

    def bytes_under(self, precision: Precision, role: str) -> int:
        return self._bytes(self.under(precision, role))


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadPlan:
    """The parameters of one component, in the order of their bytes on disk. Holds its files open."""

    component: str
    entries: dict[str, Entry]
    files: tuple[OpenFile, ...]
    precision: Precision | None = None  # whose storage it has; None is the files'
    known: frozenset[str] = frozenset()  # tensors of the files that belong to it, of use or not

    def stored(self, precision: Precision, role: str | None = None) -> LoadPlan:
        """The plan with every parameter in the dtype that `precision` says of its `role`: text, transformer or vae,
        by default the one that the component's name says. Codes stay codes, and are computed in it."""
        part = role or self.component

        def kept(entry: Entry) -> Entry:
            return replace(entry, storage=entry.under(precision, part), role=part)

        return replace(self, entries={n: kept(entry) for n, entry in self.entries.items()}, precision=precision)

    def with_deltas(self, deltas: Mapping[str, tuple[Delta, ...]]) -> LoadPlan:
        """The plan with `deltas`, by parameter and nothing else, added to its weights: fused when they are read, in
        float32, and rounded once; or a branch beside them."""
        assert deltas.keys() <= self.entries.keys(), f"in no file: {deltas.keys() - self.entries.keys()}"
        changed = {name: replace(entry, deltas=deltas.get(name, ())) for name, entry in self.entries.items()}
        return replace(self, entries=changed)

    def same_deltas(self, other: LoadPlan) -> bool:
        """Whether the deltas of every parameter are those of `other`, a plan of the same parameters."""
        return all(entry.deltas == other.entries[name].deltas for name, entry in self.entries.items())

    def packed(self, kept_as: Callable[[Entry], Kept | None]) -> LoadPlan:
        """The plan with the weights of which `kept_as` gives a code kept in it."""

        def kept(entry: Entry) -> Entry:
            found = kept_as(entry)
            return (
                entry if found is None else replace(entry, storage=Packed(found.code, entry.storage.dtype, found.scale))
            )

        return replace(self, entries={name: kept(entry) for name, entry in self.entries.items()})

    def only(self, predicate: Callable[[str], bool]) -> LoadPlan:
        """The plan for the parameters whose name satisfies `predicate`; closing either plan closes both."""
        return replace(self, entries={name: e for name, e in self.entries.items() if predicate(name)})

    def under(self, path: str) -> LoadPlan:
        """The plan for the parameters of the module at `path`; all where that is empty."""
        return self.only(lambda name: not path or name.startswith(f"{path}."))

    def when(self, residency: Residency) -> LoadPlan:
        """The plan for the parameters of this residency; closing either plan closes both."""
        return self.only(lambda name: self.entries[name].residency is residency)

    @property
    def shapes(self) -> Manifest:
        """Of the parameters, as the forward uses them."""
        return {name: entry.shape for name, entry in self.entries.items()}

    @property
    def parameters(self) -> int:
        """Number of values that the forward uses."""
        return sum(prod(entry.shape) for entry in self.entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters in memory: as the file has them, until `stored` says otherwise."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def dtypes(self) -> Counter[str]:
        """How many parameters are stored in each dtype, by the file's names."""
        return Counter(entry.source.first.dtype for entry in self.entries.values())

    def close(self) -> None:
        """Close the files; nothing can be read after that."""
        for file in self.files:
            file.close()


def as_stored(manifest: Manifest) -> Uses:
    """Every parameter in the shape in which it is stored, always there."""
    return {name: Use(shape) for name, shape in manifest.items()}


def whole(stored: Manifest, uses: Uses) -> Uses:
    """Every parameter of `stored`, to be written again: as the forward has it, where that is all of its values."""
    found = {name: Use(shape) for name, shape in stored.items()}
    return found | {name: use for name, use in uses.items() if use.decode is None}


@contextmanager
def closed_on_failure() -> Iterator[Callable[[LoadPlan], LoadPlan]]:
    """Gives a function that returns its plan, which is closed where the body fails later."""
    with ExitStack() as stack:

        def keep(plan: LoadPlan) -> LoadPlan:
            stack.callback(plan.close)
            return plan

        yield keep
        stack.pop_all()


def read(entry: Entry) -> np.ndarray:
    """The values of `entry`, shape `entry.shape`: float32, float16, or uint16 holding the bits of bfloat16; float32
    with the deltas that are fused, where it has any. Raises ModelError as `raw` does."""
    import numpy as np

    source = entry.source
    arrays = [raw(piece) for piece in source.pieces]
    if source.code:
        array = source.code.values(arrays).reshape(source.shape)
    else:
        (array,) = arrays
    if source.channels_last:
        array = np.moveaxis(array, -1, 1)
    if source.decode == "last_tap":
        array = array[:, :, -1]
    if source.decode == "transposed":
        array = array.T
    array = np.ascontiguousarray(array).reshape(entry.shape)
    return fused(widened(array), entry.fused) if entry.fused else array


def parts(entry: Entry) -> Iterator[np.ndarray]:
    """`read`, a few rows at a time: what is used as it is stored is never in memory as a whole. Raises ModelError."""
    import numpy as np

    source = entry.source
    if not source.is_plain or entry.fused:
        yield read(entry)
        return
    piece, (height, *row) = source.first, entry.shape or (1,)
    step = max(1, PART // max(1, prod(row)))
    size = prod(row) * np.dtype(NUMPY[piece.dtype]).itemsize
    for start in range(0, height, step):
        end = min(height, start + step)
        begin = piece.begin + start * size
        yield raw(piece._replace(shape=(end - start, *row), begin=begin, end=begin + (end - start) * size))


def fused(weight: np.ndarray, deltas: tuple[Delta, ...]) -> np.ndarray:
    """`weight`, float32, with all of `deltas`, each made for the weight as it was. Strength 0 changes no bit."""
    total = weight
    for delta in deltas:
        if delta.strength:
            added = delta.added(weight)
            added += total  # in place: these are the largest arrays of a load
            total = added
    return total


def read_branch(entry: Entry) -> tuple[np.ndarray, np.ndarray] | None:
    """What `entry` has beside it, float32: down [R in] and up [out R], all of its deltas along one rank; None where
    there is nothing. Raises ModelError."""
    import numpy as np

    factors = [delta.factors() for delta in entry.branch if delta.strength]
    if not factors:
        return None
    downs, ups = zip(*factors, strict=True)
    return np.concatenate(downs), np.concatenate(ups, axis=1)


def read_codes(entry: Entry) -> Coded:
    """The codes of an `entry` that is kept packed: the file's own where it has them so, else made of its values. Raises
    ModelError as `raw` does, and where a scale or value is not finite."""
    assert isinstance(entry.storage, Packed)
    code, source = entry.storage.code, entry.source
    own = source.kept
    if isinstance(source.code, Keeping) and own and own.code == code and not entry.fused:
        made = source.code.coded([raw(piece) for piece in source.pieces], entry.shape)
        count = sum(map(_not_finite, made.arrays[1:] if isinstance(code, Affine) else [code.values(made.arrays)]))
        if count:
            raise not_finite(entry, count, 0.0, "")
    elif isinstance(code, Affine):
        made = encode(_finite_parts(entry), entry.shape, code)
    else:
        raise bad(source.first.file.path, f"is in {code.mode}, into which no LoRA can be fused; convert the original")
    largest = _largest(made, code) if entry.storage.dtype == "float16" else 0.0
    if largest >= TOO_LARGE["float16"]:
        raise not_finite(entry, 0, largest, entry.storage.dtype)
    return made


def _finite_parts(entry: Entry) -> Iterator[np.ndarray]:
    """`parts`. Raises ModelError where a value is not finite."""
    found = parts(entry)
    for part in found:
        if count := _not_finite(part):
            raise not_finite(entry, count + sum(map(_not_finite, found)), 0.0, "")
        yield part


def _not_finite(array: np.ndarray) -> int:
    """How many of its numbers are not finite."""
    return int((~finite(array)).sum())


def _largest(made: Coded, code: Codes) -> float:
    """The largest size that its codes decode to. They are decoded only where a group's ends do not settle it."""
    import numpy as np

    if isinstance(code, Affine):
        scales, biases = (widened(part) for part in made.arrays[1:])
        bound = float(np.maximum(np.abs(biases), np.abs(biases + (2**code.bits - 1) * scales)).max(initial=0))
        if bound < TOO_LARGE["float16"]:
            return bound
    return float(np.abs(code.values(made.arrays)).max(initial=0))
