"""Which tensor of which file is which parameter: found, checked against the manifest, and only then read.

`plan` opens the files of one component, compares every name, shape and dtype in their headers with the
manifest, and returns a `LoadPlan` without having read a weight or imported a framework. `plan_sources` does
the same for one component of a file that holds several. `read` gives the values of one entry from the
descriptor that was checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qwenimg.common.base.safe_files import OpenFile, bad
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import short
from qwenimg.common.weights.files import Found, find_files
from qwenimg.common.weights.safetensors import BITS, Header, Stored, read_header

if TYPE_CHECKING:
    import numpy as np

DTYPES = ("F32", "F16", "BF16")

Named = dict[str, tuple[str, OpenFile, Stored]]  # parameter -> name in the file, file, place


class Source(NamedTuple):
    """Where a file in another layout has a parameter: in a tensor, in the `part`-th of its `parts` equal ranges of
    rows, or in a matrix with rows and columns exchanged."""

    key: str
    part: int = 0
    parts: int = 1
    transposed: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """One parameter: where it is stored, and the shape in which the forward uses it."""

    name: str  # parameter path in the model, the manifest's key
    key: str  # tensor name in the file
    file: OpenFile
    dtype: str  # as stored: F32, F16 or BF16
    stored: Shape
    shape: Shape
    begin: int  # byte offsets in the file
    end: int
    transposed: bool = False  # a matrix that is stored with rows and columns exchanged


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadPlan:
    """The parameters of one component, in the order of their bytes on disk. Holds its files open."""

    component: str
    entries: dict[str, Entry]
    files: tuple[OpenFile, ...]

    def only(self, predicate: Callable[[str], bool]) -> LoadPlan:
        """The plan for the parameters whose name satisfies `predicate`; closing either plan closes both."""
        return replace(self, entries={name: e for name, e in self.entries.items() if predicate(name)})

    @property
    def parameters(self) -> int:
        """Number of values that the forward uses."""
        return sum(prod(e.shape) for e in self.entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes of those values, each in the dtype in which it is stored."""
        return sum(prod(e.shape) * BITS[e.dtype] // 8 for e in self.entries.values())

    @property
    def dtypes(self) -> Counter[str]:
        """How many parameters are stored in each dtype."""
        return Counter(e.dtype for e in self.entries.values())

    def close(self) -> None:
        """Close the files; nothing can be read after that."""
        for file in self.files:
            file.close()


def plan(
    folder: Path,
    component: str,
    manifest: Mapping[str, Shape],
    *,
    wanted: Mapping[str, Shape] | None = None,
    rename: Callable[[str], str | None] | None = None,
) -> LoadPlan:
    """Check the headers of `folder` (or of one file) against `manifest` {parameter: stored shape}.

    `wanted` {parameter: shape in the forward} says what is loaded; the rest of the manifest is checked only.
    `rename` maps a name in the file to the manifest's, or to None when it is known and of no use.
    Raises ModelError on the first kind of disagreement, naming file and tensor.
    """
    wanted = manifest if wanted is None else wanted
    _check_wanted(manifest, wanted)
    found = find_files(folder)
    with ExitStack() as stack:
        headers = []
        for path in found.files:
            headers.append(read_header(path))
            stack.callback(headers[-1].file.close)
        _check_index(found, headers)
        named = _named(found, headers, rename)
        _check_dtypes(named)
        _check_names(found, component, named, manifest)
        _check_shapes(named, manifest)
        stack.pop_all()
    entries = {name: _entry(name, *place, wanted[name]) for name, place in named.items() if name in wanted}
    return LoadPlan(component=component, entries=entries, files=tuple(h.file for h in headers))


@contextmanager
def closed_on_failure() -> Iterator[Callable[[LoadPlan], LoadPlan]]:
    """Gives a function that returns its plan, which is closed where the body fails later."""
    with ExitStack() as stack:

        def keep(plan: LoadPlan) -> LoadPlan:
            stack.callback(plan.close)
            return plan

        yield keep
        stack.pop_all()


def plan_sources(
    header: Header,
    component: str,
    sources: Mapping[str, Source],
    manifest: Mapping[str, Shape],
    *,
    wanted: Mapping[str, Shape] | None = None,
) -> LoadPlan:
    """The plan for one component of an open file: `sources` {parameter: place} against `manifest` and `wanted`, which
    are those of `plan`. The file stays the caller's to close. Raises ModelError as `plan` does."""
    wanted = manifest if wanted is None else wanted
    assert sources.keys() == manifest.keys()
    _check_wanted(manifest, wanted)
    path = header.file.path
    missing = [source.key for source in sources.values() if source.key not in header.tensors]
    if missing:
        raise bad(path, f"lacks tensor {_first(dict.fromkeys(missing))} of its {component}")
    named: Named = {n: (s.key, header.file, _piece(header.tensors[s.key], s)) for n, s in sources.items()}
    _check_dtypes(named)
    turned = {name for name, source in sources.items() if source.transposed}
    _check_shapes(named, {name: shape[::-1] if name in turned else shape for name, shape in manifest.items()})
    entries = [_entry(name, *named[name], shape) for name, shape in wanted.items()]
    entries = [replace(entry, transposed=True) if entry.name in turned else entry for entry in entries]
    return LoadPlan(
        component=component,
        entries={entry.name: entry for entry in sorted(entries, key=lambda entry: entry.begin)},
        files=(header.file,),
    )


def read(entry: Entry) -> np.ndarray:
    """The values of `entry`, shape `entry.shape`: float32, float16, or uint16 holding the bits of bfloat16.

    A causal convolution over time that the forward uses on one frame is stored [O I T kh kw] and used as
    [O I kh kw], which is its last tap in time: the frames before the first are zero. A matrix that is
    stored transposed is turned. Other differences between stored and used shape are dimensions of 1. Raises
    ModelError if the file changed or ended early.
    """
    import numpy as np

    array = np.empty(entry.stored, {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[entry.dtype])
    if array.size:
        entry.file.fill(array.data.cast("B"), entry.begin)
    entry.file.check_unchanged()
    if _takes_last_tap(entry.stored, entry.shape):
        array = np.ascontiguousarray(array[:, :, -1])
    if entry.transposed:
        array = np.ascontiguousarray(array.T)
    return array.reshape(entry.shape)


def _takes_last_tap(stored: Shape, shape: Shape) -> bool:
    return len(stored) == 5 and len(shape) == 4


def _check_wanted(manifest: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Manifest and forward are ours, so a disagreement between them is our mistake, not the file's."""
    for name, shape in wanted.items():
        stored = manifest[name]
        if _takes_last_tap(stored, shape):
            stored = stored[:2] + stored[3:]
            assert stored == shape, f"{name}: the last tap is {stored}, the forward uses {shape}"
        assert prod(stored) == prod(shape), f"{name}: stored {stored}, the forward uses {shape}"


def _check_index(found: Found, headers: list[Header]) -> None:
    """Every key of the index is in exactly the shard it names, and no shard holds another."""
    if found.index is None:
        return
    weight_map = found.weight_map
    held = {header.file.path.name: header.tensors for header in headers}
    stale = [key for key, shard in weight_map.items() if key not in held[shard]]
    if stale:
        where = short(weight_map[stale[0]], 60)
        raise bad(
            found.index,
            f"places tensor {_first(stale)} in {where}, which does not hold it: download both again",
        )
    for shard, tensors in held.items():
        stray = [key for key in tensors if weight_map.get(key) != shard]
        if stray:
            other = weight_map.get(stray[0])
            says = "is not in the index" if other is None else f"is also in {short(other, 60)}"
            raise bad(found.index.with_name(shard), f"tensor {_first(stray)} {says}: download shards and index")


def _named(found: Found, headers: list[Header], rename: Callable[[str], str | None] | None) -> Named:
    """Every tensor under its manifest name, in the order of files and bytes."""
    named: Named = {}
    for header in headers:
        for key, tensor in header.tensors.items():
            name = rename(key) if rename else key
            if name is None:
                continue
            if name in named:
                raise bad(
                    header.file.path,
                    f"tensors {_first([key])} and '{short(named[name][0], 80)}' are the same",
                )
            named[name] = (key, header.file, tensor)
    if not named:
        raise bad(found.source, "holds no tensors")
    return named


def _check_dtypes(named: Named) -> None:
    for key, file, tensor in named.values():
        if tensor.dtype in DTYPES:
            continue
        if tensor.dtype.startswith("F8_"):
            raise bad(
                file.path,
                f"tensor {_first([key])} is {tensor.dtype}: fp8 is not supported yet; use bf16 files",
            )
        raise bad(file.path, f"tensor {_first([key])} is {tensor.dtype}; only F32, F16 and BF16 are read")


def _check_names(found: Found, component: str, named: Named, manifest: Mapping[str, Shape]) -> None:
    missing = [name for name in manifest if name not in named]
    extra = [key for name, (key, _, _) in named.items() if name not in manifest]
    faults = [f"lacks tensor {_first(missing)}"] if missing else []
    faults += [f"holds unknown tensor {_first(extra)}"] if extra else []
    if faults:
        raise bad(found.source, f"{' and '.join(faults)}: not a {component} that this configuration describes")


def _check_shapes(named: Named, manifest: Mapping[str, Shape]) -> None:
    wrong = [name for name, (_, _, tensor) in named.items() if tensor.shape != manifest[name]]
    if wrong:
        key, file, tensor = named[wrong[0]]
        shapes = f"{list(tensor.shape)}, expected {list(manifest[wrong[0]])}"
        raise bad(
            file.path,
            f"tensor {_first([key, *wrong[1:]])} has shape {shapes}: the configuration is of another model",
        )


def _first(names: Iterable[str]) -> str:
    first, *others = names
    return f"'{short(first, 80)}'" + (f" (and {len(others)} more)" if others else "")


def _piece(tensor: Stored, source: Source) -> Stored:
    """The rows that `source` names. Rows that do not divide stay whole, and fail the check of shapes."""
    if source.parts == 1 or not tensor.shape or tensor.shape[0] % source.parts:
        return tensor
    size = (tensor.end - tensor.begin) // source.parts
    begin = tensor.begin + source.part * size
    shape = (tensor.shape[0] // source.parts, *tensor.shape[1:])
    return Stored(tensor.dtype, shape, begin, begin + size)


def _entry(name: str, key: str, file: OpenFile, tensor: Stored, shape: Shape) -> Entry:
    return Entry(
        name=name,
        key=key,
        file=file,
        dtype=tensor.dtype,
        stored=tensor.shape,
        shape=shape,
        begin=tensor.begin,
        end=tensor.end,
    )
