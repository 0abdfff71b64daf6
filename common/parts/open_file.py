"""Networks in files of any layout, alone or with a whole model: their configuration, and the plan of their weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.safe_files import bad, closed_on_error, is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.formats import pth_file
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.layout import Layouts, Naming, stored_manifest
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import component, open_component
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights import left_out
from qwenimg.common.weights import plan as plans
from qwenimg.common.weights.keys import Place, check_architecture, plan_places
from qwenimg.common.weights.part_names import plain

# Tensors that the file of a whole model may have beside its parts: ends of names, and starts
_BESIDE = (".logit_scale", ".embeddings.position_ids", "scaled_fp8", "spiece_model", ".encoder.embed_tokens.weight")
_OF_TRAINING = ("first_stage_model.loss.", "first_stage_model.model_ema.", "model_ema.")


def open_part(
    layouts: Layouts,
    path: Path,
    like: Any,
    part: str,
    *,
    inside: str = "",
    for_rewrite: bool = False,
    beside: Path | None = None,
) -> Component:
    """Open a network in a folder, or in a file alone or with other parts, in one of its `layouts`; shards only in names
    that its `rename` maps. `like`: the configuration of a folder, and for what no tensor of a file shows; part: its
    name in messages; inside: the start of its names in the file of a model with several such networks; beside: the file
    of its vision tower. Raises ModelError."""

    def reopen(network: Network | None, config: Any) -> Component:
        rows = layouts if network is None else replace(layouts, network=network)
        return open_part(rows, path, config, part, inside=inside, beside=beside)

    opened = _opened(layouts, path, like, part, inside, for_rewrite, beside)
    return replace(opened, reopen=reopen)


def _opened(
    layouts: Layouts, path: Path, like: Any, part: str, inside: str, for_rewrite: bool, beside: Path | None
) -> Component:
    network, (only, *others) = layouts.network, find_files(path).files
    if is_folder(path):
        if others or layouts.find_placed(layouts.peek(only).tensors) is None:
            return open_component(network, path, like, part, for_rewrite=for_rewrite, beside=beside)
        path = only
    header = layouts.opened(path)
    with closed_on_error(header.file):
        naming = find(header, layouts, part, inside)
        if naming.layout.place is not None or inside or header.format == pth_file.FORMAT:
            return open_named(header, layouts, naming, like, part, for_rewrite=for_rewrite)
        config = layouts.config(layouts.shapes(header, naming, like), like)
    header.file.close()
    start = _own_prefix(network.role, naming)
    names = network.rename_for(config)

    manifest = network.manifest(config)

    def rename(key: str) -> str | None:
        if (name := names(key)) is None or name in manifest:
            return name
        rest = key.removeprefix(start)
        name = names(rest)
        return None if name not in manifest and rest.startswith(layouts.ignored) else name

    return open_component(network, path, config, part, rename, for_rewrite=for_rewrite, beside=beside)


def _own_prefix(role: str, naming: Naming) -> str:
    """Return the prefix of a network's names behind that of its part in the file of a whole model."""
    sign = naming.layout.signs[0]
    return (plain(role, naming.prefix + sign) or "").removesuffix(sign)


def is_in(layouts: Layouts, path: Path) -> bool:
    """Return whether a folder or file has the network of `layouts` and no other of its role. Raises ModelError for a
    file that cannot be read."""
    if is_folder(path):
        config = path / "config.json"
        return is_file(config) and read_json(config).get(layouts.network.key) in layouts.network.kinds
    return layouts.find_alone(layouts.peek(path).tensors) is not None


def find(header: Header, layouts: Layouts, part: str, inside: str = "") -> Naming:
    """Return the layout of a network in a file with this header; `inside` as for `open_part`. Raises ModelError for
    another file."""
    if not inside:
        check_architecture(header, layouts.network.architectures, part)
    path = header.file.path
    if (other := layouts.similar_model(header.tensors)) is not None:
        raise bad(path, f"is {other}")
    if (naming := layouts.find(header.tensors, inside)) is None:
        names = " or ".join(dict.fromkeys(row.names.partition(",")[0] for row in layouts.rows)).removesuffix(" names")
        raise bad(path, f"holds no {layouts.expected or f'{part} of {layouts.title}, by {names}'}")
    return naming


def open_named(
    header: Header, layouts: Layouts, naming: Naming, like: Any, part: str, *, for_rewrite: bool = False
) -> Component:
    """Open a network in the open file, whose names are as `naming` says. `like`, `part`: as for `open_part`. The caller
    closes the file. Raises ModelError."""
    network, path = layouts.network, header.file.path
    config = layouts.config(layouts.shapes(header, naming, like), like)
    manifest = network.manifest(config)
    joins = network.joins(manifest) if naming.layout.place is not None else {}
    names = (part for name in manifest for part in (joins[name].parts if name in joins else (name,)))
    places = layouts.places(naming, names, config)
    if naming.layout.place is None:
        own = [key for key in sorted(header.tensors) if key.startswith(naming.prefix)]
        stored = {network.rename(key.removeprefix(naming.prefix)): key for key in own}
        places = {name: Place(stored.get(name, place.key)) for name, place in places.items()}
    absent = [name for name in network.optional if name in places and places[name].key not in header.tensors]
    for name in absent:
        del manifest[name], places[name]
    used = network.used(config, manifest)
    shapes = stored_manifest(header, naming.layout, places, manifest)
    used = plans.uses_for_export(manifest, used) if for_rewrite else used
    plan = plan_places(header, part, places, shapes, used, joins)
    ignored = tuple(naming.prefix + start for start in layouts.ignored)
    unknown = [
        key
        for key in sorted(header.tensors.keys() - plan.known)
        if key.startswith(naming.prefix) and plain(network.role, key) is not None and not key.startswith(ignored)
    ]
    if naming.layout.place is None:
        rests = ((key, key.removeprefix(naming.prefix)) for key in unknown)
        unknown = [key for key, rest in rests if rest not in network.copies and network.rename(rest) is not None]
    check_known(path, unknown, layouts.title)
    return component(network, config, plan, for_rewrite=for_rewrite)


def stored_shape(layouts: Layouts, path: Path, name: str) -> tuple[int, ...] | None:
    """Return the shape of a parameter in a folder or file; None if it is not there. Raises ModelError."""
    for file in find_files(path).files:
        tensors = layouts.peek(file).tensors
        naming = layouts.find(tensors)
        key = name if naming is None else layouts.places(naming, [name], layouts.network.config())[name].key
        if key in tensors:
            return tensors[key].shape
    return None


def check_whole(header: Header, parts: Iterable[Component], title: str, others: Iterable[str] = ()) -> None:
    """Raise ModelError if the file of a model holds a tensor that belongs to none of its `parts`, unless its name
    starts with one of `others`."""
    known, starts = {key for part in parts for key in part.plan.known}, (*_OF_TRAINING, *others)
    unknown = [
        key for key in header.tensors if key not in known and not key.endswith(_BESIDE) and not key.startswith(starts)
    ]
    check_known(header.file.path, unknown, title)


def check_known(path: Path, unknown: Sequence[str], title: str) -> None:
    """Raise ModelError if a file has `unknown` tensors, which the published model of this `title` has not, but for
    those that are left out of every model."""
    unknown = [key for key in unknown if left_out.kind(key) is None]
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if unknown[1:] else ""
        raise bad(path, f"holds unknown tensor '{clean(unknown[0], 100)}'{more}: not {title} as it is published")
