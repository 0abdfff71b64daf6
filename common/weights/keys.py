"""The planner: which tensor of which file is which parameter, found and checked before anything is read.

`plan` is for a folder or file in the manifest's own names, `plan_places` for one component of a file in another
layout. Both hold every name, shape and dtype of the headers against the manifest; neither reads a weight or imports
a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import NamedTuple

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.base.text import clean
from qwenimg.common.codes.gguf_blocks import READERS
from qwenimg.common.formats import gguf, gguf_types
from qwenimg.common.formats.files import check_index, find_files, first
from qwenimg.common.formats.headers import read_header
from qwenimg.common.formats.stored import DTYPES, Header, Piece
from qwenimg.common.weights.coded import Pieces, grouped
from qwenimg.common.weights.plan import Decode, Entry, LoadPlan, Source, Use, Uses, as_stored
from qwenimg.common.weights.storage import Dense

Named = dict[str, Source]  # by the parameter's name, in the order of files and bytes
Rename = Callable[[str], str | None]


class Place(NamedTuple):
    """Where a file in another layout has a parameter: in a tensor, or in the `part`-th of its `parts` equal ranges of
    rows."""

    key: str
    part: int = 0
    parts: int = 1
    decode: Decode | None = None


def plan(
    folder: Path,
    component: str,
    manifest: Manifest,
    *,
    uses: Callable[[Manifest], Uses] = as_stored,
    rename: Rename | None = None,
    architectures: frozenset[str] = frozenset(),
    channels_last: str = "",
    optional: frozenset[str] = frozenset(),
) -> LoadPlan:
    """Check the headers of `folder` (or of one file) against `manifest` {parameter: stored shape}.

    `uses(manifest)` is what is loaded, and as what; the rest of the manifest is checked only. `rename` maps a name in
    the file to the manifest's, or to None when it is known and of no use. `architectures` are what a GGUF file may say
    that it is; it may also say nothing. `channels_last` stands in names of files only whose convolutions have the
    channels of their input last. A parameter that is `optional` may be missing.
    Raises ModelError on the first kind of disagreement, naming file and tensor.
    """
    found = find_files(folder)
    with ExitStack() as stack:
        headers: list[Header] = []
        for path in found.files:
            headers.append(read_header(path))
            stack.callback(headers[-1].file.close)
            check_architecture(headers[-1], architectures, component)
        check_index(found, headers)
        named, unused = named_weights(headers, rename, manifest, channels_last)
        if not named:
            raise bad(found.source, "holds no tensors")
        _check_dtypes(named)
        _check_names(found.source, component, named, manifest, optional)
        made = _planned(component, named, manifest, uses(manifest), headers, unused)
        stack.pop_all()
        return made


def plan_places(
    header: Header, component: str, places: Mapping[str, Place], manifest: Manifest, uses: Uses
) -> LoadPlan:
    """The plan for one component of an open file: `places` {parameter: place} against `manifest`, of which `uses`
    is loaded. The file stays the caller's to close. Raises ModelError as `plan` does."""
    assert places.keys() == manifest.keys()
    expected = _expected_at(places, manifest).get
    stored, unused = grouped(_pieces([header], expected), expected, header.metadata)
    missing = [place.key for place in places.values() if place.key not in stored]
    if missing:
        raise bad(header.file.path, f"lacks tensor {first(dict.fromkeys(missing))} of its {component}")
    found = {name: _part(stored[place.key], place) for name, place in places.items()}
    named = dict(sorted(found.items(), key=lambda item: item[1].first.begin))
    _check_dtypes(named)
    return _planned(component, named, manifest, uses, [header], unused)


def _planned(
    component: str, named: Named, manifest: Manifest, uses: Uses, headers: list[Header], unused: frozenset[str]
) -> LoadPlan:
    assert uses.keys() <= manifest.keys(), f"in no file: {uses.keys() - manifest.keys()}"
    _check_shapes(named, manifest)
    entries = {name: _entry(name, source, manifest[name], uses[name]) for name, source in named.items() if name in uses}
    known = unused | {piece.key for source in named.values() for piece in source.pieces}
    return LoadPlan(component=component, entries=entries, files=tuple(h.file for h in headers), known=known)


def _entry(name: str, source: Source, stored: Shape, use: Use) -> Entry:
    """Manifest and forward are ours, so a disagreement between them is our mistake, not the file's."""
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


def check_architecture(header: Header, architectures: frozenset[str], component: str, hint: str = "") -> None:
    """Raise ModelError, with `hint`, where a GGUF file says that it is of another model than these."""
    name = header.metadata.get(gguf.ARCHITECTURE, "") if header.format == "GGUF" else ""
    if name not in architectures and name not in gguf.UNSPECIFIC:
        hint = hint or (f"expected {' or '.join(sorted(architectures))}" if architectures else "give another file")
        raise bad(header.file.path, f"is a GGUF file of '{clean(name, 40)}', not of a {component}: {hint}")


def _pieces(headers: Iterable[Header], expected: Callable[[str], Shape | None], flat: bool = False) -> Pieces:
    """Every tensor by its name in the files, which must not repeat. In GGUF, and of what has one dimension in files
    that are `flat`, a dimension of 1 may be missing or too many, so that the tensor has the `expected` shape where it
    differs in them only."""
    found: Pieces = {}
    for header in headers:
        for key, tensor in header.tensors.items():
            if key in found:
                raise bad(header.file.path, _same(key, key))
            found[key] = Piece(key, header.file, *tensor)
            loose = header.format == "GGUF" or (flat and len(tensor.shape) == 1)
            shape = expected(key) if loose else None
            if shape is not None and _without_ones(shape) == _without_ones(tensor.shape):
                found[key] = found[key]._replace(shape=shape)
    return found


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def named_weights(
    headers: Sequence[Header], rename: Rename | None, manifest: Manifest, channels_last: str = ""
) -> tuple[Named, frozenset[str]]:
    """Every weight under its manifest name, and the tensors that are known and of no use. `channels_last`: see
    `plan`."""

    def name_of(key: str) -> str | None:
        return rename(key) if rename else key

    named: Named = {}

    def expected(key: str) -> Shape | None:
        return manifest.get(name_of(key) or "")

    notes = {key: text for header in headers for key, text in header.metadata.items()}
    moved = bool(channels_last) and any(channels_last in key for header in headers for key in header.tensors)
    found = grouped(_pieces(headers, expected, moved), expected, notes)
    for key, source in found.sources.items():
        name = name_of(key)
        if name is None:
            continue
        if name in named:
            raise bad(source.first.file.path, _same(key, named[name].first.key))
        named[name] = source._replace(channels_last=moved and source.code is None and len(source.shape) > 2)
    return named, found.unused


def _same(key: str, other: str) -> str:
    return f"tensors {first([key])} and '{clean(other, 80)}' are the same"


def _expected_at(places: Mapping[str, Place], manifest: Manifest) -> dict[str, Shape]:
    """The shape of every tensor that `places` names, as it is stored."""
    shapes = {}
    for name, place in places.items():
        shape = manifest[name][::-1] if place.decode == "transposed" else manifest[name]
        shapes[place.key] = (shape[0] * place.parts, *shape[1:]) if place.parts > 1 else shape
    return shapes


def _part(source: Source, place: Place) -> Source:
    """The rows that `place` names, of every piece that has them. Rows that do not divide stay whole, and fail the check
    of shapes."""
    rows = source.shape[0] if source.shape else 0
    if place.parts == 1 or not rows or rows % place.parts:
        return source._replace(decode=place.decode)

    def cut(piece: Piece) -> Piece:
        if piece.shape[:1] != (rows,):
            return piece  # such as one scale for all
        size = (piece.end - piece.begin) // place.parts
        begin = piece.begin + place.part * size
        return piece._replace(shape=(rows // place.parts, *piece.shape[1:]), begin=begin, end=begin + size)

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
    """Codes are of a matrix, also where it is stored as a kernel of one point."""
    return source.shape == shape or bool(source.code and prod(shape[2:]) == 1 and source.shape == shape[:2])


def _check_shapes(named: Named, manifest: Manifest) -> None:
    def expected(name: str) -> Shape:
        return manifest[name][::-1] if named[name].decode == "transposed" else manifest[name]

    wrong = [name for name, source in named.items() if not has_shape(source, expected(name))]
    if wrong:
        piece = named[wrong[0]].first
        shapes = f"{list(named[wrong[0]].shape)}, expected {list(expected(wrong[0]))}"
        names = first([piece.key, *wrong[1:]])
        raise bad(piece.file.path, f"tensor {names} has shape {shapes}: the configuration is of another model")
