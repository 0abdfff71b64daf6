"""The planner: which tensor of which file is which parameter, found and checked before anything is read.

`plan` is for a folder or file in the manifest's own names, `plan_places` for one component of a file in another
layout. Both hold every name, shape and dtype of the headers against the manifest; neither reads a weight or imports
a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import NamedTuple

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.base.text import clean
from qwenimg.common.weights.files import check_index, find_files, first
from qwenimg.common.weights.plan import DTYPES, Decode, Entry, LoadPlan, Piece, Source, Use, Uses, as_stored
from qwenimg.common.weights.safetensors import Header, read_header
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
) -> LoadPlan:
    """Check the headers of `folder` (or of one file) against `manifest` {parameter: stored shape}.

    `uses(manifest)` is what is loaded, and as what; the rest of the manifest is checked only. `rename` maps a name in
    the file to the manifest's, or to None when it is known and of no use.
    Raises ModelError on the first kind of disagreement, naming file and tensor.
    """
    found = find_files(folder)
    with ExitStack() as stack:
        headers: list[Header] = []
        for path in found.files:
            headers.append(read_header(path))
            stack.callback(headers[-1].file.close)
        check_index(found, headers)
        named = _named(headers, rename)
        if not named:
            raise bad(found.source, "holds no tensors")
        _check_dtypes(named)
        _check_names(found.source, component, named, manifest)
        made = _planned(component, named, manifest, uses(manifest), headers)
        stack.pop_all()
        return made


def plan_places(
    header: Header, component: str, places: Mapping[str, Place], manifest: Manifest, uses: Uses
) -> LoadPlan:
    """The plan for one component of an open file: `places` {parameter: place} against `manifest`, of which `uses`
    is loaded. The file stays the caller's to close. Raises ModelError as `plan` does."""
    assert places.keys() == manifest.keys()
    missing = [place.key for place in places.values() if place.key not in header.tensors]
    if missing:
        raise bad(header.file.path, f"lacks tensor {first(dict.fromkeys(missing))} of its {component}")
    found = {name: _source(header, place) for name, place in places.items()}
    named = dict(sorted(found.items(), key=lambda item: item[1].first.begin))
    _check_dtypes(named)
    return _planned(component, named, manifest, uses, [header])


def _planned(component: str, named: Named, manifest: Manifest, uses: Uses, headers: list[Header]) -> LoadPlan:
    assert uses.keys() <= manifest.keys(), f"in no file: {uses.keys() - manifest.keys()}"
    _check_shapes(named, manifest)
    entries = {name: _entry(name, source, manifest[name], uses[name]) for name, source in named.items() if name in uses}
    return LoadPlan(component=component, entries=entries, files=tuple(h.file for h in headers))


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


def _named(headers: Iterable[Header], rename: Rename | None) -> Named:
    """Every tensor under its manifest name."""
    named: Named = {}
    for header in headers:
        for key, tensor in header.tensors.items():
            name = rename(key) if rename else key
            if name is None:
                continue
            if name in named:
                same = f"tensors {first([key])} and '{clean(named[name].first.key, 80)}' are the same"
                raise bad(header.file.path, same)
            named[name] = Source((Piece(key, header.file, *tensor),))
    return named


def _source(header: Header, place: Place) -> Source:
    """The rows that `place` names. Rows that do not divide stay whole, and fail the check of shapes."""
    dtype, shape, begin, end = header.tensors[place.key]
    if place.parts > 1 and shape and shape[0] % place.parts == 0:
        size = (end - begin) // place.parts
        begin, end = begin + place.part * size, begin + (place.part + 1) * size
        shape = (shape[0] // place.parts, *shape[1:])
    return Source((Piece(place.key, header.file, dtype, shape, begin, end),), place.decode)


def _check_dtypes(named: Named) -> None:
    for piece in (piece for source in named.values() for piece in source.pieces):
        if piece.dtype not in DTYPES:
            fp8 = piece.dtype.startswith("F8_")
            why = ": fp8 is not supported yet; use bf16 files" if fp8 else "; only F32, F16 and BF16 are read"
            raise bad(piece.file.path, f"tensor {first([piece.key])} is {piece.dtype}{why}")


def _check_names(where: Path, component: str, named: Named, manifest: Manifest) -> None:
    missing = [name for name in manifest if name not in named]
    extra = [source.first.key for name, source in named.items() if name not in manifest]
    faults = [f"lacks tensor {first(missing)}"] if missing else []
    faults += [f"holds unknown tensor {first(extra)}"] if extra else []
    if faults:
        raise bad(where, f"{' and '.join(faults)}: not a {component} that this configuration describes")


def _check_shapes(named: Named, manifest: Manifest) -> None:
    def expected(name: str) -> Shape:
        return manifest[name][::-1] if named[name].decode == "transposed" else manifest[name]

    wrong = [name for name, source in named.items() if source.first.shape != expected(name)]
    if wrong:
        piece = named[wrong[0]].first
        shapes = f"{list(piece.shape)}, expected {list(expected(wrong[0]))}"
        names = first([piece.key, *wrong[1:]])
        raise bad(piece.file.path, f"tensor {names} has shape {shapes}: the configuration is of another model")
