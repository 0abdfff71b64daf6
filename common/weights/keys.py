"""The planner: finds the tensor of each parameter in the files, and checks it before anything is read.

`plan` is for a folder or file in the manifest's own names, `plan_places` for one component of a file in another layout.
Both compare every name, shape and dtype of the headers with the manifest. Neither reads a weight or imports a
framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeAlias

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.base.text import clean
from qwenimg.common.formats import gguf, gguf_types
from qwenimg.common.formats.files import check_index, find_files, first
from qwenimg.common.formats.headers import open_header
from qwenimg.common.formats.stored import DTYPES, Header, TensorSlice
from qwenimg.common.quant.gguf_blocks import READERS
from qwenimg.common.weights import comfy, left_out
from qwenimg.common.weights.joined import Joins, join
from qwenimg.common.weights.plan import Decode, Entry, LoadPlan, ParamUse, ParamUses, Source, stored_uses
from qwenimg.common.weights.sources import Pieces, grouped
from qwenimg.common.weights.storage import Dense

Named = dict[str, Source]  # by parameter, in the order of files and bytes
Rename = Callable[[str], str | None]


class Rows(NamedTuple):
    """A range of a tensor's rows, from `begin` to `end` in units of the `of`-th part of them. It reaches beyond them
    where the tensor is a part of a parameter."""

    begin: int = 0
    end: int = 1
    of: int = 1

    @property
    def reaches_beyond(self) -> bool:
        return self.end - self.begin > self.of


ALL = Rows()
Splits: TypeAlias = Mapping[str, Mapping[str, Rows]]
"""By the name of a tensor that has the rows of several parameters, the rows of each."""


class Place(NamedTuple):
    """The place of a parameter in a file of another layout: a tensor, or a range of its rows."""

    key: str
    rows: Rows = ALL
    decode: Decode | None = None


def plan(
    folder: Path,
    component: str,
    manifest: Manifest,
    *,
    uses: Callable[[Manifest], ParamUses] = stored_uses,
    rename: Rename | None = None,
    architectures: frozenset[str] = frozenset(),
    channels_last: str = "",
    optional: frozenset[str] = frozenset(),
    copies: frozenset[str] = frozenset(),
    joins: Joins | None = None,
    splits: Splits | None = None,
    beside: Path | None = None,
) -> LoadPlan:
    """Check the headers of `folder`, or of a file and a second one (`beside`), against `manifest` {parameter: stored
    shape}, and return the plan.

    `uses(manifest)` says which parameters are loaded, and in which shape; the others are only checked. `rename` maps a
    name in the file to the manifest's, or to None for a known tensor that is not used. `architectures` are the values
    that a GGUF file may have as its architecture; it may also have none. `channels_last` occurs in the tensor names of
    those files only whose convolutions have their input channels last. A parameter that is `optional` may be missing. A
    tensor that is named in `copies` is not used where another one has its parameter. `joins` are the parameters that a
    file may have in several tensors, `splits` the tensors that may have several parameters. Raises ModelError on the
    first kind of disagreement, naming file and tensor.
    """
    files = find_files(folder)
    with ExitStack() as stack:
        headers: list[Header] = []
        for path in (*files.files, *([] if beside is None else [beside])):
            headers.append(open_header(path))
            stack.callback(headers[-1].file.close)
            check_architecture(headers[-1], architectures, component)
        check_index(files, headers[: len(files.files)])
        whole = _whole_shapes(manifest, splits or {})
        named, unused = named_weights(headers, rename, manifest | whole, channels_last, copies)
        if not named:
            of = f" of the {component}" if any(header.tensors for header in headers) else ""
            raise bad(files.source, f"holds no tensors{of}")
        _check_dtypes(named)
        named = join(_split(named, splits or {}), joins or {})
        _check_names(files.source, component, named, manifest, optional)
        load_plan = _planned(component, named, manifest, uses(manifest), headers, unused)
        stack.pop_all()
        return load_plan


def plan_places(
    header: Header,
    component: str,
    places: Mapping[str, Place],
    manifest: Manifest,
    uses: ParamUses,
    joins: Joins | None = None,
) -> LoadPlan:
    """Return the plan for one component of an open file: `places` {parameter: place} against `manifest`; the `uses` are
    loaded. `joins`: parameters whose parts have places, of equally many rows. The caller closes the file. Raises
    ModelError as `plan` does."""
    parts = {
        part: (manifest[name][0] // len(one.parts), *manifest[name][1:])
        for name, one in (joins or {}).items()
        for part in one.parts
    }
    expected = _expected_at(places, {**manifest, **parts}).get
    stored, unused = grouped(_pieces([header], expected), expected, header.metadata)
    missing = [place.key for place in places.values() if place.key not in stored]
    if missing:
        raise bad(header.file.path, f"lacks tensor {first(dict.fromkeys(missing))} of its {component}")
    sources = {name: _part(stored[place.key], place) for name, place in places.items()}
    named = join(dict(sorted(sources.items(), key=lambda item: item[1].first.begin)), joins or {})
    _check_dtypes(named)
    return _planned(component, named, manifest, uses, [header], unused)


def _whole_shapes(manifest: Manifest, splits: Splits) -> Manifest:
    """Return the shapes of tensors that have several parameters of `manifest`."""
    return {
        name: (sum(manifest[part][0] for part in parts), *manifest[next(iter(parts))][1:])
        for name, parts in splits.items()
    }


def _split(named: Named, splits: Splits) -> Named:
    """Return the weights with the rows of each parameter in place of tensors that have several."""
    result: Named = {}
    for name, source in named.items():
        for part, rows in splits.get(name, {name: ALL}).items():
            if part in result or (name in splits and part in named):
                raise bad(source.first.file.path, f"has tensor {first([source.first.key])} also in parts")
            result[part] = source if rows is ALL else _part(source, Place(source.first.key, rows))
    return result


def _planned(
    component: str, named: Named, manifest: Manifest, uses: ParamUses, headers: list[Header], unused: frozenset[str]
) -> LoadPlan:
    assert uses.keys() <= manifest.keys(), f"in no file: {uses.keys() - manifest.keys()}"
    _check_shapes(named, manifest)
    entries = {name: _entry(name, source, manifest[name], uses[name]) for name, source in named.items() if name in uses}
    known = unused | {piece.key for source in named.values() for piece in source.pieces}
    return LoadPlan(component=component, entries=entries, files=tuple(h.file for h in headers), known=known)


def _entry(name: str, source: Source, stored: Shape, use: ParamUse) -> Entry:
    """Return the entry of one parameter. Manifest and forward are ours, so a disagreement between them is our
    mistake, not the file's."""
    if use.decode == "last_tap":
        stored = stored[:2] + stored[3:]
        assert stored == use.shape, f"{name}: the last tap is {stored}, the forward uses {use.shape}"
    assert prod(stored) == prod(use.shape), f"{name}: stored {stored}, the forward uses {use.shape}"
    return Entry(
        name=name,
        shape=use.shape,
        source=source._replace(decode=source.decode or use.decode),
        storage=Dense(source.dtype),
        residency=use.residency,
    )


def weights_of(header: Header) -> Named:
    """Return the weights of an open file, whatever model it is of. Raises ModelError for the first in a format that is
    not read."""
    pieces = {name: TensorSlice(name, header.file, *stored) for name, stored in header.tensors.items()}
    words = {name for name, piece in pieces.items() if piece.dtype == "U32"}  # only a model's widths tell their bits
    shapes = {
        name: shape
        for name, shape in comfy.value_shapes(header).items()
        if name.endswith(".weight") and not (name in words and f"{name.removesuffix('.weight')}.scales" in pieces)
    }
    sources = grouped(pieces, shapes.get, header.metadata).sources
    weights = {name: source for name, source in sources.items() if name in shapes}
    _check_dtypes(weights)
    return weights


def check_architecture(header: Header, architectures: frozenset[str], component: str, hint: str = "") -> None:
    """Raise ModelError, with `hint`, if a GGUF file names an architecture outside `architectures`."""
    if not gguf.may_be(header, architectures):
        name = gguf.architecture(header)
        hint = hint or (f"expected {' or '.join(sorted(architectures))}" if architectures else "give another file")
        raise bad(header.file.path, f"is a GGUF file of '{clean(name, 40)}', not of a {component}: {hint}")


def _pieces(headers: Iterable[Header], expected: Callable[[str], Shape | None], flat: bool = False) -> Pieces:
    """Return every tensor by its name in the files, which must not repeat.

    In GGUF, and for tensors of one dimension in files that are `flat`, a dimension of 1 may be missing or too many: a
    tensor that differs from the `expected` shape in those only takes that shape. One row [1 D] may be [D] in any file.
    """
    pieces: Pieces = {}
    for header in headers:
        for key, tensor in header.tensors.items():
            if key in pieces:
                raise bad(header.file.path, _same(key, key))
            pieces[key] = TensorSlice(key, header.file, *tensor)
            loose = header.format == "GGUF" or (flat and len(tensor.shape) == 1)
            shape = expected(key) if loose or len(tensor.shape) == 1 else None
            row = shape == (1, *tensor.shape)
            if shape is not None and (row or (loose and _without_ones(shape) == _without_ones(tensor.shape))):
                pieces[key] = pieces[key]._replace(shape=shape)
    return pieces


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def named_weights(
    headers: Sequence[Header],
    rename: Rename | None,
    manifest: Manifest,
    channels_last: str = "",
    copies: frozenset[str] = frozenset(),
) -> tuple[Named, frozenset[str]]:
    """Return every weight under its manifest name, and the known tensors that are not used. `channels_last`, `copies`:
    see `plan`."""

    def name_of(key: str) -> str | None:
        name = rename(key) if rename else key
        return None if name not in manifest and left_out.kind(key) is not None else name

    named: Named = {}

    def expected(key: str) -> Shape | None:
        return manifest.get(name_of(key) or "")

    notes = {key: text for header in headers for key, text in header.metadata.items()}
    moved = bool(channels_last) and any(channels_last in key for header in headers for key in header.tensors)
    weights = grouped(_pieces(headers, expected, moved), expected, notes)
    ends = tuple(f".{copy}" for copy in copies)  # behind any prefix
    copied = {key for key in weights.sources if key in copies or key.endswith(ends)}
    originals = {name_of(key) for key in weights.sources.keys() - copied}
    spare = {key for key in copied if name_of(key) in originals}
    for key, source in weights.sources.items():
        name = name_of(key)
        if name is None or key in spare:
            continue
        if name in named:
            raise bad(source.first.file.path, _same(key, named[name].first.key))
        named[name] = source._replace(channels_last=moved and source.code is None and len(source.shape) > 2)
    return named, weights.unused | {piece.key for key in spare for piece in weights.sources[key].pieces}


def _same(key: str, other: str) -> str:
    return f"tensors {first([key])} and '{clean(other, 80)}' are the same"


def _expected_at(places: Mapping[str, Place], manifest: Manifest) -> dict[str, Shape]:
    """Return the stored shape of every tensor that `places` names."""
    shapes = {}
    for name, place in places.items():
        shape = manifest[name][::-1] if place.decode == "transposed" else manifest[name]
        begin, end, of = place.rows
        shapes[place.key] = (shape[0] * of // (end - begin), *shape[1:]) if of > 1 else shape
    return shapes


def _part(source: Source, place: Place) -> Source:
    """Return the rows that `place` names, of every piece that has rows. Rows that do not divide stay whole, and fail
    the check of shapes."""
    rows = source.shape[0] if source.shape else 0
    begin, end, of = place.rows
    if of == 1 or not rows or rows % of:
        return source._replace(decode=place.decode)

    def cut(piece: TensorSlice) -> TensorSlice:
        if piece.shape[:1] != (rows,):
            return piece  # such as one scale for all
        size = (piece.end - piece.begin) // of
        shape = (rows // of * (end - begin), *piece.shape[1:])
        return piece._replace(shape=shape, begin=piece.begin + begin * size, end=piece.begin + end * size)

    return source._replace(pieces=tuple(cut(piece) for piece in source.pieces), decode=place.decode)


def _check_dtypes(named: Named) -> None:
    for source in named.values():
        piece = source.first
        if source.code is None and piece.dtype not in DTYPES:
            blocks = piece.dtype in {type.name for type in gguf_types.TYPES.values() if type.values > 1}
            hint = f": take a file in {', '.join(READERS)}" if blocks else ""
            raise bad(piece.file.path, f"tensor {first([piece.key])} is {piece.dtype}, which is not read{hint}")


def _check_names(where: Path, component: str, named: Named, manifest: Manifest, optional: frozenset[str]) -> None:
    missing = [name for name in manifest if name not in named and name not in optional]
    extra = [source.first.key for name, source in named.items() if name not in manifest]
    faults = [f"lacks tensor {first(missing)}"] if missing else []
    faults += [f"holds unknown tensor {first(extra)}"] if extra else []
    if faults:
        raise bad(where, f"{' and '.join(faults)}: not a {component} that this configuration describes")


def has_shape(source: Source, shape: Shape) -> bool:
    """Return whether the source has this shape. Codes belong to a matrix, also where the weight is a 1x1 kernel, and
    the rows of a table may be stored as one vector."""
    as_matrix = source.code and prod(shape[2:]) == 1 and source.shape == shape[:2]
    return source.shape == shape or bool(as_matrix) or (len(shape) == 2 and source.shape == (prod(shape),))


def _check_shapes(named: Named, manifest: Manifest) -> None:
    def expected(name: str) -> Shape:
        return manifest[name][::-1] if named[name].decode == "transposed" else manifest[name]

    wrong = [name for name, source in named.items() if not has_shape(source, expected(name))]
    if wrong:
        piece = named[wrong[0]].first
        shapes = f"{list(named[wrong[0]].shape)}, expected {list(expected(wrong[0]))}"
        names = first([piece.key, *wrong[1:]])
        raise bad(piece.file.path, f"tensor {names} has shape {shapes}: the configuration is of another model")
