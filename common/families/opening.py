"""One way to open a model of any family, from the family's rows: a folder in diffusers layout, or as mflux saves it, or
one file, with parts in other folders and files. All is checked before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

from qwenimg.common.base.config import INDEX, data_folder, read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, is_file, is_folder
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.layout import Layouts
from qwenimg.common.networks.network import Network
from qwenimg.common.parts import known_configs, merged_file, tiny_vae
from qwenimg.common.parts.components import find_config, is_bare, open_component
from qwenimg.common.parts.open_file import check_whole, open_part
from qwenimg.common.parts.texts import towers
from qwenimg.common.parts.vae_files import open_tiny
from qwenimg.common.runtime.checkpoint import MISSING, Checkpoint, Component, Reports, TokenizerFiles
from qwenimg.common.sampling import flow_match
from qwenimg.common.weights.part_names import VAES
from qwenimg.common.weights.plan import closed_on_failure

SCHEDULER, CONFIG = "scheduler/scheduler_config.json", "config.json"
Given: TypeAlias = Mapping[str, Path]
"""Folders and files by the names of the parts that they are."""
_OPTIONS = {
    "transformer": "--transformer",
    "unet": "--unet",
    "vae": "--vae",
    "effnet": "--effnet",
}  # all other parts are text encoders


@dataclass(frozen=True, kw_only=True)
class Source:
    """The places of a model's parts and small files: its folder or file, and what the user gives in their place."""

    path: Path
    options: LoadOptions
    rows: Opening

    @property
    def in_one_file(self) -> bool:
        return is_file(self.path)

    @cached_property
    def given(self) -> Given:
        """The folders and files that the user gives in place of the model's own parts. Raises ModelError and
        UsageError."""
        return self.rows.given(self)

    @cached_property
    def has_index(self) -> bool:
        """True for a folder in diffusers layout, but that of a modular pipeline, which may have parts alone."""
        return is_file(self.path / INDEX)

    @cached_property
    def model(self) -> str:
        """The name of the published model whose configurations stand for those that are missing. Raises ModelError and
        UsageError."""
        return self.rows.model(self)

    @cached_property
    def variant(self) -> Any:
        """The family's variant. Raises ModelError and UsageError."""
        return self.rows.variant(self)

    @cached_property
    def has_tiny_vae(self) -> bool:
        """True if the VAE that the user gives is a tiny one, whose files have no configuration of the model's."""
        return (place := self.given.get("vae")) is not None and tiny_vae.is_tiny_at(place)

    def own(self, part: str) -> Path:
        """Return the folder of a part in that of the model, by the first of its names that is there."""
        folders = [self.path / name for name in self.rows.names(part)]
        return next(filter(is_folder, folders), folders[0])

    def place(self, part: str) -> Path:
        """Return the folder or file of a part."""
        return self.given.get(part) or (self.path if self.in_one_file else self.own(part))

    def is_inside(self, part: str) -> bool:
        """Return whether a part is in the file of the whole model."""
        return self.in_one_file and part not in self.given

    def small_file(self, name: str) -> Path:
        """Return the path of a small file, the published model's in a folder of another layout that has none. Raises
        ModelError and UsageError."""
        own = self.path / name
        return own if self.has_index or is_file(own) else data_folder(self.model) / name

    def config(self, part: str, network: Network) -> Any:
        """Return the configuration of a part: that of its place or of the model's own part, or the published one.
        Raises ModelError and UsageError."""
        own, published = self.own(part), partial(self.published, part, network)
        if part == "vae" and self.has_tiny_vae:
            return find_config(network, [own], published)
        if part in self.given:
            return find_config(network, [self.given[part], own], published)
        return find_config(network, [own], None if self.has_index else published)

    def published(self, part: str, network: Network) -> Any:
        """Return the configuration of a part as it is published. Raises ModelError and UsageError."""
        names = self.rows.names(part)
        place = next((name for name in names if (data_folder(self.model) / name).is_dir()), part)
        return known_configs.read(self.model, place, network)


def _given(source: Source) -> Given:
    return source.options.parts


def _levels(source: Source) -> Any:
    path = source.small_file(SCHEDULER)
    return flow_match.read_config(read_json(path), path)


def found_tokenizers(
    options: LoadOptions, components: Mapping[str, Component], find: Callable[[], Mapping[str, TokenizerFiles]]
) -> tuple[Mapping[str, TokenizerFiles], Reports]:
    """Return the tokenizers of the text encoders among `components`, which `find` finds. For a plan, which reads none,
    return stand-ins and a report of the kind MISSING where one is not here. Raises ModelError, and UsageError."""
    try:
        return find(), ()
    except ModelError as error:
        if not options.for_plan or options.tokenizer is not None:
            raise
        reason = str(error)

    def read(path: Path) -> Any:
        raise ModelError(reason)

    absent = TokenizerFiles(path=Path(), read=read)
    return {name: absent for name, part in components.items() if part.role == "text"}, ((MISSING, reason),)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The rows from which the models of a family are opened. Functions raise ModelError and UsageError."""

    networks: Mapping[str, Network]  # by the folders of the parts, the denoiser's first
    layouts: Mapping[str, Layouts] = field(default_factory=dict)  # of parts that have them
    model: Callable[[Source], str]  # the published model that a model without configurations is like
    tokenizers: Callable[[Source, Mapping[str, Component]], Mapping[str, TokenizerFiles]]
    levels: Callable[[Source], Any] = _levels  # the configuration of the noise levels
    given: Callable[[Source], Given] = _given  # for a family whose text encoders show by their tensors which they are
    # The names that the folder of a part may have besides its own, the likeliest first
    folders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    inside: Callable[[Header], Collection[str]] = lambda header: ("transformer", *merged_file.parts_of(header))
    variant: Callable[[Source], Any] = lambda source: None  # of a model, for the functions that need it first
    # The networks of one model, for a family whose models have different ones
    networks_of: Callable[[Source], Mapping[str, Network]] | None = None
    # Starts of the names of text encoders in the file of a model with several
    prefixes: Mapping[str, str] = field(default_factory=dict)
    seeing: Collection[Network] = ()  # text encoders whose vision tower may be in a file of its own
    # From a part and its configuration, the one that its files show
    config: Callable[[Source, str, Any], Any] = lambda source, part, config: config
    notes: Mapping[str, str] = field(default_factory=dict)  # by a part, another cure for a model without it
    # Checks the parts of one file, all of whose tensors are known
    check_file: Callable[[Source, Mapping[str, Component]], None] = lambda source, parts: None
    # Completes the checkpoint by what a model's pipeline, name or options tell
    complete: Callable[[Source, Checkpoint], Checkpoint] = lambda source, checkpoint: checkpoint

    def names(self, part: str) -> tuple[str, ...]:
        """Return the names that the folder of a part may have, the likeliest first."""
        return (*self.folders.get(part, ()), part)

    def open(self, path: Path, options: LoadOptions | None = None) -> Checkpoint:
        """Open the model in the folder or file `path`: read every configuration and header, and check them against the
        manifests. Raises ModelError and UsageError."""
        source = self.source(path, options or LoadOptions())
        components = self._parts(source)
        with closed_on_failure() as keep:
            for part in components.values():
                keep(part.plan)
            tokenizers, reports = found_tokenizers(
                source.options, components, lambda: self.tokenizers(source, components)
            )
            checkpoint = Checkpoint(
                source=path,
                components=components,
                tokenizers=tokenizers,
                scheduler=self.levels(source),
                reports=reports,
            )
            return self.complete(source, checkpoint)

    def open_parts(self, path: Path) -> dict[str, Component]:
        """Open the parts of the model in the folder or file `path`. Raises ModelError."""
        return self._parts(self.source(path, LoadOptions()))

    def open_inside(self, path: Path) -> dict[str, Component]:
        """Open the parts in the file `path`, which may lack some. Raises ModelError."""
        source, inside = self.source(path, LoadOptions()), self.inside(peek(path))
        return self._opened(source, {name: row for name, row in self._networks(source).items() if name in inside})

    def source(self, path: Path, options: LoadOptions) -> Source:
        """Return where the parts of the model at `path` are."""
        return Source(path=path, options=options, rows=self)

    def _parts(self, source: Source) -> dict[str, Component]:
        networks = self._networks(source)
        check_there(source, networks)
        return self._opened(source, networks)

    def _networks(self, source: Source) -> Mapping[str, Network]:
        return self.networks if self.networks_of is None else self.networks_of(source)

    def _opened(self, source: Source, networks: Mapping[str, Network]) -> dict[str, Component]:
        components: dict[str, Component] = {}
        with closed_on_failure() as keep:
            for name, network in networks.items():
                components[name] = self._part(source, name, network)
                keep(components[name].plan)
            if source.in_one_file:
                self.check_file(source, components)
        return components

    def _part(self, source: Source, name: str, network: Network) -> Component:
        place, config = source.place(name), self.config(source, name, source.config(name, network))
        if name == "vae" and source.has_tiny_vae:
            return open_tiny(place, config)
        if name not in self.layouts:
            return open_component(network, place, config, name, for_rewrite=source.options.for_rewrite)
        layouts, tower = replace(self.layouts[name], network=network), source.given.get(towers.SECOND)
        return open_part(
            layouts,
            place,
            config,
            name,
            inside=self.prefixes.get(name, "") if source.is_inside(name) else "",
            for_rewrite=source.options.for_rewrite,
            beside=tower if network in self.seeing else None,
        )


def check_there(source: Source, names: Iterable[str]) -> None:
    """Raise ModelError unless all parts `names` of a model are there or given."""
    inside = source.rows.inside(peek(source.path)) if source.in_one_file else None
    if absent := [name for name in names if name not in source.given and _is_absent(source, name, inside)]:
        raise lacks(source.path, absent, "".join(source.rows.notes.get(name, "") for name in absent))


def _is_absent(source: Source, name: str, inside: Collection[str] | None) -> bool:
    return is_bare(source.own(name)) if inside is None else name not in inside


def lacks(path: Path, names: Collection[str], note: str = "") -> ModelError:
    """Return the error for a model without the parts `names`."""
    options = " ".join(f"{_OPTIONS.get(name, '--text-encoder')} FILE" for name in names)
    return bad(path, f"lacks {', '.join(names)}: add {options}{note}, or give a file or folder of the whole model")


def check_tensors(source: Source, parts: Mapping[str, Component], title: str, spare: Collection[str] = ()) -> None:
    """Check that each tensor in the file of a model belongs to one of its parts, used or not, or starts with one of
    `spare`. title: of the models. Raises ModelError."""
    header, rows = peek(source.path), source.rows
    naming = rows.layouts["transformer"].find(header.tensors)
    texts = {name: (prefix,) for name, prefix in rows.prefixes.items()}
    starts = {"transformer": (naming.prefix,) if naming and naming.prefix else (), "vae": VAES, **texts}
    own = {name: part for name, part in parts.items() if name not in source.given}
    others = [start for name in rows.inside(header) if name not in own for start in starts[name]]
    check_whole(header, own.values(), title, [*others, *spare])
