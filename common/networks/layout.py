"""The files of a network: how each program names its tensors, and the configuration that their shapes show.

A network that programs write in several ways has a module `X_names.py` next to its own, which ends with `LAYOUTS`. A
program's layout is one row of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from qwenimg.common.base.config import parse
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.base.text import clean
from qwenimg.common.formats import gguf
from qwenimg.common.formats.headers import open_header, open_weights
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.network import Network
from qwenimg.common.weights import comfy
from qwenimg.common.weights.keys import Place
from qwenimg.common.weights.part_names import plain, prefixes

Config = TypeVar("Config")
Shapes: TypeAlias = Mapping[str, Shape]
Layers: TypeAlias = Mapping[str, str | Place]
"""A program's names of layers by those of diffusers, or places of layers that are not one tensor there."""
QKV = ((0, "q"), (1, "k"), (2, "v"))
"""Layers of attention in the order of their rows in one tensor."""


def shape_of(path: Path, shapes: Shapes, key: str, rank: int) -> Shape:
    """Return the shape of the tensor `key`. Raise ModelError if it is missing or has another rank."""
    shape = shapes.get(key)
    if shape is None or len(shape) != rank:
        fault = "lacks tensor" if shape is None else f"has not {rank} dimensions in tensor"
        raise bad(path, f"{fault} '{clean(key, 100)}': not a checkpoint as it is published")
    return shape


def place_of(layers: Layers, name: str) -> Place:
    """Return the place of a layer."""
    place = layers[name]
    return place if isinstance(place, Place) else Place(place)


def flipped(names: Mapping[str, str]) -> dict[str, str]:
    """Return the table of the other direction."""
    return {theirs: ours for ours, theirs in names.items()}


def with_start(name: str, starts: Mapping[str, str]) -> str:
    """Return `name` with the first of `starts` that it has replaced."""
    start = next(filter(name.startswith, starts), "")
    return starts[start] + name.removeprefix(start) if start else name


def with_parts(name: str, parts: Mapping[str, str]) -> str:
    """Return `name` with all of `parts` that it has replaced, one after the other."""
    for part, other in parts.items():
        name = name.replace(part, other)
    return name


@dataclass(frozen=True)
class StoredShapes:
    """The shapes of a network's tensors in a file, by their stored names without the prefix. `stored_name` maps the
    name of a parameter in the manifest to such a name. A quantized matrix has the shape of its packed values, so a
    configuration is read from vectors where they show it too."""

    path: Path
    shapes: Shapes
    stored_name: Callable[[str], str]

    def __contains__(self, name: str) -> bool:
        return self.stored_name(name) in self.shapes

    def shape(self, name: str, rank: int) -> Shape:
        """Return the shape of the tensor that has the parameter `name`. Raises ModelError if it is missing or has
        another rank."""
        return shape_of(self.path, self.shapes, self.stored_name(name), rank)

    def blocks(self, name: str) -> list[int]:
        """Return the numbers of a file's blocks. `name`: a parameter of the first block, such as
        `layers.0.norm.weight`; only the part up to the number counts."""
        start = self.stored_name(name).partition(".0.")[0] + "."
        pattern = re.compile(re.escape(start) + r"(\d{1,4})\.")
        return sorted({int(match[1]) for key in self.shapes if (match := pattern.match(key))})

    def config(self, like: Config, **found: Any) -> Config:
        """Return the configuration `like` with the values that were `found` in the shapes. Raises ModelError."""
        usual: Any = like
        return parse(type(like), asdict(usual) | found, source=self.path)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One program's names of a network's tensors, in a file. Here a stored name is without its prefix
    (`part_names.prefixes`)."""

    names: str  # the title for `info` and for refusals, which leave out what follows a comma: "its authors' names"
    signs: tuple[str, ...]  # stored names; a file that has all of them has this layout
    lacks: tuple[str, ...] = ()  # stored names of a similar network; a file that has one of them is not of this layout
    is_named: bool = False  # only GGUF files have it that name an architecture of the network
    # From the name of a parameter in the manifest and the config, its stored name, rows and decoding.
    # None: the network's `rename`, which maps stored names to the manifest's, has this layout too
    place: Callable[[str, Any], Place] | None = None
    kernels: re.Pattern[str] | None = None  # parameters that are matrices, and may be stored as 1x1 kernels


class Naming(NamedTuple):
    """The layout of a network's tensors in a file, and the prefix of their names."""

    layout: Layout
    prefix: str


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The layouts of one network's files."""

    network: Network
    title: str  # of the models, for messages
    pth: bool = False  # whether files that `torch.save` wrote are read too, without running their pickle
    expected: str = ""  # of the message on a file without the network; "": the title and the rows' names
    rows: tuple[Layout, ...]  # a file has the first whose signs it has
    # The configuration for stored shapes; fields that no shape shows are those of another configuration
    config: Callable[[StoredShapes, Any], Any] = lambda shapes, like: like
    ignored: tuple[str, ...] = ()  # starts of stored names of tensors that are known and not used
    # From the path of a layer, further places that it has in LoRAs: the places of all rows are known there
    in_loras: Callable[[str], Iterable[Place]] = lambda path: ()
    # Stored names that only a similar model has, each with that model's title: such a file is refused
    foreign: Mapping[str, str] = field(default_factory=dict)

    def find(self, names: Collection[str], inside: str = "") -> Naming | None:
        """Return the layout of a file with these `names`, whose prefix starts with `inside`; None in a file without the
        network."""
        for row in self.rows:
            for prefix in prefixes(self.network.role, names, row.signs[0]):
                there = prefix.startswith(inside) and all(prefix + sign in names for sign in row.signs)
                if there and not any(prefix + name in names for name in row.lacks):
                    return Naming(row, prefix)
        return None

    def find_alone(self, names: Collection[str]) -> Naming | None:
        """Return the layout of a file with these `names` that has no other network of this role, or None."""
        if (naming := self.find(names)) is None:
            return None
        others = (name for name in names if not name.startswith(naming.prefix))
        return naming if all(plain(self.network.role, name) is None for name in others) else None

    def find_placed(self, names: Collection[str]) -> Naming | None:
        """Return the layout of a file with these `names` if it has places of its own, as its authors' has, or None."""
        naming = self.find(names)
        return naming if naming is not None and naming.layout.place is not None else None

    def title_of(self, naming: Naming, names: Collection[str]) -> str:
        """Return the title of the layout of a file with these `names`. mflux's names are a case of the network's
        `rename`, as diffusers' are."""
        own = (name.removeprefix(naming.prefix) for name in names)
        signs = () if naming.layout.place is not None else self.network.mflux_signs
        return "mflux's names" if any(name.startswith(signs) for name in own) else naming.layout.names

    def find_in(self, header: Header) -> Naming | None:
        """Return the layout of a file with this header; None in a file without the network, and in a GGUF file that
        names another architecture."""
        naming = self.find(header.tensors)
        if naming is None or (naming.layout.is_named and not gguf.architecture(header)):
            return None
        return naming if gguf.may_be(header, self.network.architectures) else None

    def opened(self, path: Path) -> Header:
        """Open the file `path`. Raises ModelError. The caller closes `Header.file`."""
        return open_weights(path) if self.pth else open_header(path)

    def peek(self, path: Path) -> Header:
        """Return the header of the file `path`, which is closed again. Raises ModelError."""
        header = self.opened(path)
        header.file.close()
        return header

    def similar_model(self, names: Collection[str]) -> str | None:
        """Return the title of the similar model in a file with these `names`, or None."""
        for sign, title in self.foreign.items():
            if any(prefix + sign in names for prefix in prefixes(self.network.role, names, sign)):
                return title
        return None

    def shapes(self, header: Header, naming: Naming, like: Any) -> StoredShapes:
        """Return the stored shapes of an open file. Raises ModelError."""
        shapes, layout = without_prefix(header, naming.prefix), naming.layout
        if layout.place is None:
            rename = self.network.rename_for(like)
            named = ((rename(key), shape) for key, shape in shapes.items())
            shapes = {name: shape for name, shape in named if name is not None}
        return StoredShapes(header.file.path, shapes, lambda name: self.place(layout, name, like).key)

    def place(self, layout: Layout, name: str, config: Any) -> Place:
        """Return the place of a parameter, without the prefix."""
        return Place(name) if layout.place is None else layout.place(name, config)

    def places(self, naming: Naming, names: Iterable[str], config: Any) -> dict[str, Place]:
        """Map each parameter to its place, with the prefix."""
        places = {name: self.place(naming.layout, name, config) for name in names}
        return {name: place._replace(key=naming.prefix + place.key) for name, place in places.items()}


def without_prefix(header: Header, prefix: str) -> dict[str, Shape]:
    """Return the shapes of the tensors after `prefix` in an open file, by the rest of their names. Raises
    ModelError."""
    shapes = comfy.value_shapes(header)
    return {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}


def stored_manifest(header: Header, layout: Layout, places: Mapping[str, Place], manifest: Manifest) -> Manifest:
    """Return the manifest with the stored shapes of matrices that are 1x1 kernels in the file."""
    stored = dict(manifest)
    for name in filter(layout.kernels.fullmatch, manifest) if layout.kernels else ():
        tensor = header.tensors.get(places[name].key)
        if tensor is not None and len(tensor.shape) == 4:
            stored[name] = (*manifest[name], 1, 1)
    return stored
