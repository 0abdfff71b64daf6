"""The load plan: for each parameter of a component its source, storage dtype, LoRA deltas and residency.

`keys` makes a plan and reads headers only. Pure functions rewrite it (`stored`, `with_deltas`, `only`, `when`). A
backend's `load.py` executes it, with `values`. The network knows nothing of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.formats.stored import DTYPES, TensorSlice
from qwenimg.common.precision.precision import BYTES, Precision
from qwenimg.common.precision.residency import ALWAYS, Residency
from qwenimg.common.quant.affine import Affine
from qwenimg.common.quant.block_float import BlockFloat
from qwenimg.common.quant.gguf_blocks import GGUFBlocks
from qwenimg.common.quant.quantized_tensor import QuantStorage
from qwenimg.common.quant.rotated import Rotated
from qwenimg.common.weights.storage import Dense, Packed, QuantFormat, Storage

if TYPE_CHECKING:
    import numpy as np

# The change from a stored tensor to its use, beside dropping dimensions of 1: rows and columns exchanged; the last tap
# [O I kh kw] of a causal convolution over time [O I T kh kw], all that one frame uses, since those before it see zeros;
# the two halves of the rows swapped, such as scale and shift in another order; or columns of zeros behind its own, for
# the inputs that a LoRA adds.
Decode = Literal["transposed", "last_tap", "swapped", "widened"]


class Code(Protocol):
    """The code of a quantized weight: the meaning of its pieces."""

    def shape(self, pieces: Sequence[TensorSlice]) -> Shape:
        """Return the shape of the values."""

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values in float32, in any shape, from `raw` of the pieces."""


StaysQuantized: TypeAlias = Affine | BlockFloat | GGUFBlocks | Rotated
"""Codes of weights that can stay quantized in memory: `storage` names their storage, `coded` makes it. All others are
decoded while they are read."""

Mode = Literal["auto", "fuse", "side"]
"""A LoRA is fused into the weight, or computed as a branch beside it; auto: beside quantized weights, else fused."""


class Delta(Protocol):
    """The change of a weight by one module of a LoRA."""

    @property
    def strength(self) -> float:
        """The user's strength. At 0 nothing changes."""

    @property
    def mode(self) -> Mode:
        """The user's choice between fusing and a branch."""

    @property
    def is_product(self) -> bool:
        """True if the delta has `factors`."""

    @property
    def rank(self) -> int | None:
        """The rank of its factors."""

    @property
    def inputs(self) -> int | None:
        """The number of the weight's inputs that it changes, of a weight that a LoRA may widen; None: all."""

    def factors(self, inputs: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the factors down [rank in] and up [out rank], float32, for a weight of so many `inputs`; the delta is
        up @ down."""

    def added(self, weight: np.ndarray) -> np.ndarray:
        """Return the delta to add to `weight`, float32, in its shape."""


class Source(NamedTuple):
    """The source of a parameter. Messages name its first piece."""

    pieces: tuple[TensorSlice, ...]
    code: Code | None = None
    decode: Decode | None = None
    channels_last: bool = False  # the file has the channels of a kernel's input behind its points

    @property
    def first(self) -> TensorSlice:
        return self.pieces[0]

    @property
    def dtype(self) -> str:
        """The dtype of the values that `read` returns: "float32", where a file's header says "F32"."""
        return "float32" if self.code else DTYPES[self.first.dtype]

    @property
    def quant_storage(self) -> QuantStorage[QuantFormat] | None:
        """The quantized storage that can be kept without decoding, or None."""
        return self.code.storage(self.pieces) if isinstance(self.code, StaysQuantized) and self.decode is None else None

    @property
    def shape(self) -> Shape:
        """The shape of the values, before `decode`."""
        if self.channels_last:
            rows, *points, channels = self.first.shape
            return (rows, channels, *points)
        return self.code.shape(self.pieces) if self.code else self.first.shape

    @property
    def is_plain(self) -> bool:
        """True if the values are the bytes of one tensor, in their order."""
        return self.code is None and self.decode is None and not self.channels_last


class ParamUse(NamedTuple):
    """The use of a parameter in a forward: its shape there, the change from the stored tensor, and its residency."""

    shape: Shape
    decode: Decode | None = None
    residency: Residency = ALWAYS


ParamUses = dict[str, ParamUse]


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """One parameter: its path in the model, the shape in which the forward uses it, its source and its storage."""

    name: str
    shape: Shape
    source: Source
    storage: Storage
    role: str = ""  # the part of the model whose precision `storage` has: text, transformer or vae
    deltas: tuple[Delta, ...] = ()  # changes by LoRAs
    residency: Residency = ALWAYS
    block: str = ""  # if streamed, the path of the module that needs it
    table: bool = False  # rows are looked up, not multiplied

    @property
    def is_branched(self) -> bool:
        """True if its deltas are computed as a branch (y += up(down(x))), without changing the weight."""
        if self.table or len(self.shape) != 2 or not all(delta.is_product for delta in self.deltas):
            return False
        modes = {delta.mode for delta in self.deltas}
        return "side" in modes or (modes == {"auto"} and isinstance(self.storage, Packed))

    @property
    def fused(self) -> tuple[Delta, ...]:
        """The deltas that are added to the weight's values."""
        return () if self.is_branched else self.deltas

    @property
    def branch(self) -> tuple[Delta, ...]:
        """The deltas that are computed as a branch."""
        return self.deltas if self.is_branched else ()

    def with_deltas(self, deltas: tuple[Delta, ...]) -> Entry:
        """Return it with `deltas` in place of any earlier ones, and with the inputs that they add to it. Added ones are
        beside the quantized weights of its file, so that such are decoded."""
        changed = replace(self, deltas=deltas)
        most = max((one.inputs or 0 for one in deltas if one.strength), default=0)
        is_wide, own = self.source.decode == "widened", self.source.shape
        if not is_wide and (not most or most <= self.shape[1]):
            return changed
        if most > own[1]:
            source = self.source._replace(decode="widened")
            dense = Dense(self.storage.dtype) if isinstance(self.storage, Packed) else self.storage
            return replace(changed, shape=(own[0], most), source=source, storage=dense)
        source = self.source._replace(decode=None)
        packed = source.quant_storage
        keeps = packed is not None and packed.code.fits(own) and not self.table
        before = Packed(packed.code, self.storage.dtype, packed.scale) if packed and keeps else self.storage
        return replace(changed, shape=own, source=source, storage=before)

    @property
    def dtype(self) -> str:
        """The dtype of the values that `read` returns."""
        return "float32" if self.fused else self.source.dtype

    @cached_property
    def nbytes(self) -> int:
        return self._bytes(self.storage)

    def _bytes(self, storage: Storage) -> int:
        ranks = sum(delta.rank or 0 for delta in self.branch) if self.deltas else 0
        return storage.nbytes(self.shape) + ranks * sum(self.shape) * BYTES[storage.dtype]

    def storage_under(self, precision: Precision, role: str) -> Storage:
        """Return its storage under a policy. Quantized weights stay quantized, and compute in the policy's dtype."""
        about = role, self.name, self.residency
        return self.storage.computing(precision.weight_dtype(*about), precision.rounds(*about))

    def bytes_under(self, precision: Precision, role: str) -> int:
        return self._bytes(self.storage_under(precision, role))


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadPlan:
    """The parameters of one component, in the order of their bytes on disk. Holds its files open."""

    component: str
    entries: dict[str, Entry]
    files: tuple[OpenFile, ...]
    precision: Precision | None = None  # the policy of its storage; None: the dtypes of the files
    known: frozenset[str] = frozenset()  # all tensors of the files that belong to it, used or not

    def stored(self, precision: Precision, role: str | None = None) -> LoadPlan:
        """Return the plan with every parameter stored in the dtype that `precision` has for `role`: text, transformer
        or vae, by default the component's name. Quantized weights stay quantized and compute in that dtype."""
        part = role or self.component
        stored = self.mapped(lambda entry: replace(entry, storage=entry.storage_under(precision, part), role=part))
        return replace(stored, precision=precision)

    def with_deltas(self, deltas: Mapping[str, tuple[Delta, ...]]) -> LoadPlan:
        """Return the plan with `deltas` (by parameter) in place of any earlier ones: added in float32 when weights are
        read, and rounded once; or computed as branches."""
        assert deltas.keys() <= self.entries.keys(), f"in no file: {deltas.keys() - self.entries.keys()}"
        return self.mapped(lambda entry: entry.with_deltas(deltas.get(entry.name, ())))

    def same_deltas(self, other: LoadPlan) -> bool:
        """Return whether every parameter has the same deltas as in `other`, a plan of the same parameters."""
        return all(entry.deltas == other.entries[name].deltas for name, entry in self.entries.items())

    def packed(self, storage_of: Callable[[Entry], QuantStorage[QuantFormat] | None]) -> LoadPlan:
        """Return the plan with the weights quantized for which `storage_of` returns a storage."""

        def quantized(entry: Entry) -> Entry:
            chosen = storage_of(entry)
            if chosen is None:
                return entry
            return replace(entry, storage=Packed(chosen.code, entry.storage.dtype, chosen.scale))

        return self.mapped(quantized)

    def mapped(self, change: Callable[[Entry], Entry]) -> LoadPlan:
        """Return the plan with each entry as `change` returns it."""
        return replace(self, entries={name: change(entry) for name, entry in self.entries.items()})

    def only(self, predicate: Callable[[str], bool]) -> LoadPlan:
        """Return the plan for the parameters whose name satisfies `predicate`. Closing either plan closes both."""
        return replace(self, entries={name: e for name, e in self.entries.items() if predicate(name)})

    def under(self, path: str) -> LoadPlan:
        """Return the plan for the parameters of the module at `path`; for all if `path` is empty."""
        return self.only(lambda name: not path or name.startswith(f"{path}."))

    def when(self, residency: Residency) -> LoadPlan:
        """Return the plan for the parameters of this residency. Closing either plan closes both."""
        return self.only(lambda name: self.entries[name].residency is residency)

    @property
    def shapes(self) -> Manifest:
        """The shapes of the parameters, as the forward uses them."""
        return {name: entry.shape for name, entry in self.entries.items()}

    @property
    def parameters(self) -> int:
        """The number of values that the forward uses."""
        return sum(prod(entry.shape) for entry in self.entries.values())

    @property
    def nbytes(self) -> int:
        """The bytes of the parameters in memory: as in the files, until `stored` gives them other dtypes."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def dtypes(self) -> Counter[str]:
        """The number of parameters in each stored dtype, by the file's names."""
        return Counter(entry.source.first.dtype for entry in self.entries.values())

    def close(self) -> None:
        """Close the files. Nothing can be read after that."""
        for file in self.files:
            file.close()


def stored_uses(manifest: Manifest) -> ParamUses:
    """Return a use of every parameter in its stored shape, always in memory."""
    return {name: ParamUse(shape) for name, shape in manifest.items()}


def uses_for_export(stored: Manifest, uses: ParamUses) -> ParamUses:
    """Return the uses for exporting all stored parameters: the forward's use where it takes every value, else the
    stored shape."""
    stored_uses = {name: ParamUse(shape) for name, shape in stored.items()}
    return stored_uses | {name: use for name, use in uses.items() if use.decode is None}


@contextmanager
def closed_on_failure() -> Iterator[Callable[[LoadPlan], LoadPlan]]:
    """Yield a function that takes a plan and returns it; the plan is closed if the body fails later."""
    with ExitStack() as stack:

        def keep(plan: LoadPlan) -> LoadPlan:
            stack.callback(plan.close)
            return plan

        yield keep
        stack.pop_all()
