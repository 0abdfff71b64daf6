"""The files in other programs' folders: their kind, the option that takes them, and the other files that they need.

Only headers and configurations are read. A file that cannot be read has a row with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from math import prod
from pathlib import Path

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.config import has_index
from qwenimg.common.base.errors import QwenimgError
from qwenimg.common.base.text import clean
from qwenimg.common.families import registry
from qwenimg.common.families.description import without_reason
from qwenimg.common.families.family import Family
from qwenimg.common.families.file_kind import FileKind
from qwenimg.common.formats.files import PICKLES
from qwenimg.common.formats.headers import open_weights, peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.hub.describe import layers_of_known
from qwenimg.common.hub.describe_lora import FITS, NO_USE, Layers, describe_lora
from qwenimg.common.hub.model_folders import SUFFIXES, ModelFolders, entries_below
from qwenimg.common.parts import tiny_vae
from qwenimg.common.parts.texts import embedding_file
from qwenimg.common.upscaling import network_file

MAX_FILES = 1_000  # files whose headers are read


@dataclass(frozen=True, kw_only=True)
class Row:
    """One file or folder. `use` is the option that takes it, or ""; `fault` is the reason why it is not read."""

    name: str  # below its folder; the option finds it by this name
    folder: str
    bytes: int
    family: str = ""
    kind: str = ""
    type: str = ""  # of model within the family, as its header shows it
    stored: str = ""  # the dtype or code of most of its weights
    use: str = ""
    needs: str = ""
    fault: str = ""


def rows(folders: ModelFolders) -> tuple[list[Row], bool]:
    """Return a row for each file in `folders`, and whether there are more than are read."""
    listed: list[Row] = []
    known, upscalers = cache(layers_of_known), folders.folders.get("upscaler", ())
    for root, path in _candidates(folders):
        if len(listed) == MAX_FILES:
            return listed, True
        listed.append(_row(root, path, known, upscalers))
    return listed, False


def _candidates(folders: ModelFolders) -> Iterator[tuple[Path, Path]]:
    """Yield each file of weights and each model's folder once, with the folder that it was found in."""
    seen: set[Path] = set()
    roots = dict.fromkeys(root for kind in folders.folders.values() for root in kind)
    for root, paths in [
        *((root, entries_below(root)) for root in roots),
        *((root, _inside(root)) for root in folders.given),
    ]:
        models: list[Path] = []
        for path in paths:
            if path in seen or any(model in path.parents for model in models):
                continue
            if _is_model(path):
                models.append(path)
            elif not path.name.lower().endswith((*SUFFIXES, *PICKLES)):
                continue
            seen.add(path)
            yield root, path


def _inside(folder: Path) -> Iterator[Path]:
    """Yield the entries of a folder that was given itself, which options find by name too."""
    try:
        yield from sorted(islice(folder.iterdir(), MAX_FILES))
    except OSError:  # it is a file of paths, or without permission
        return


def _is_model(path: Path) -> bool:
    """Return whether `path` is the folder of a whole model."""
    try:
        return has_index(path)
    except QwenimgError:
        return False


def _row(root: Path, path: Path, known: Callable[[], Layers], upscalers: Sequence[Path]) -> Row:
    name, folder = path.relative_to(root).as_posix(), root.name
    try:
        if _is_model(path):
            family = registry.of_folder(path)
            model = Row(name=name, folder=folder, bytes=_size(path), family=family.title, kind="model", use="-m")
            return replace(model, type=_described(family, path))
        if (tiny := _tiny_vae(path, name, folder)) is not None:
            return tiny
        if path.name.lower().endswith(PICKLES):
            if (row := _embedding(path, name, folder) or _adapter(path, name, folder)) is not None:
                return row
            if root in upscalers or _is_upscaler(path):
                return _upscaler(path, name, folder)
        header = peek(path)
        kind = registry.identify(header)
        if kind is None and (embedding := _embedding(path, name, folder)) is not None:
            return embedding
        if kind is None and network_file.described(path) is not None:
            return _upscaler(path, name, folder)
        about = {} if kind is None else _about(kind, path, known)
        return Row(name=name, folder=folder, bytes=header.file.size, stored=_stored(header), **about)
    except QwenimgError as error:
        return Row(name=name, folder=folder, bytes=_size(path), fault=str(error).removeprefix(f"{clean(path)}: "))


def _embedding(path: Path, name: str, folder: str) -> Row | None:
    """Return the row of a file that --embedding takes; None for another one. Raises ModelError."""
    if not embedding_file.named_embedding(path):
        return None
    file = embedding_file.read_embedding(path)
    kind = f"embedding, {counted(file.count, 'vector')}"
    return Row(name=name, folder=folder, bytes=_size(path), family=file.base, kind=kind, use="--embedding")


def _adapter(path: Path, name: str, folder: str) -> Row | None:
    """Return the row of an IP-Adapter that `torch.save` wrote; None for another file."""
    try:
        header = open_weights(path)
    except QwenimgError:  # a pickle that is not read
        return None
    header.file.close()
    kind = registry.identify(header)
    if kind is None or kind.option != "ip_adapter":
        return None
    about = {"family": kind.models, "kind": "ip adapter", "use": kind.flag, "needs": kind.needs}
    return Row(name=name, folder=folder, bytes=header.file.size, stored=_stored(header), **about)


def _is_upscaler(path: Path) -> bool:
    try:
        return network_file.described(path) is not None
    except QwenimgError:  # a pickle that is not read
        return False


def _upscaler(path: Path, name: str, folder: str) -> Row:
    """Return the row of a file that --upscale-with takes. Raises ModelError for another one."""
    with closing(network_file.open_upscaler(path)) as upscaler:
        return Row(name=name, folder=folder, bytes=_size(path), kind=upscaler.title, use="--upscale-with")


def _tiny_vae(path: Path, name: str, folder: str) -> Row | None:
    """Return the row of a file of a tiny VAE; None for another one. Raises ModelError."""
    if not tiny_vae.is_tiny_at(path):
        return None
    described = tiny_vae.described(path)
    row = Row(name=name, folder=folder, bytes=_size(path), kind="tiny VAE", family=described.models)
    return replace(row, fault=described.fault) if described.fault else replace(row, use="--vae", needs="a model (-m)")


def _about(kind: FileKind, path: Path, known: Callable[[], Layers]) -> dict[str, str]:
    if not kind.families:
        lora = describe_lora(path, known())
        fits = next((line for line in lora.lines if line.startswith(FITS)), "").removeprefix(FITS)
        if lora.faults:
            return {"family": fits, "kind": "LoRA", "fault": lora.faults[0]}
        use = "" if any(line.startswith(NO_USE) for line in lora.lines) else kind.flag
        return {"family": fits, "kind": "LoRA", "use": use, "needs": kind.needs if use else ""}
    about = {"family": kind.models, "kind": kind.option.replace("_", " "), "use": kind.flag, "needs": kind.needs}
    return about | _typed(kind, path)


def _described(family: Family, folder: Path) -> str:
    """Return the type of the model in a folder, "" where its configurations do not show it."""
    try:
        return without_reason(family.described(folder))
    except QwenimgError:
        return ""


def _typed(kind: FileKind, path: Path) -> dict[str, str]:
    """Return the type of model that a file of one family is of, and the reason why it is not read; nothing of a text
    encoder that several families share."""
    if len(kind.families) > 1:
        return {}
    header = open_weights(path)
    with closing(header.file):
        described = kind.families[0].describe(header, None)
    if described is None:
        return {}
    faulty = {"fault": described.faults[0], "use": "", "needs": ""} if described.faults else {}
    return {"type": described.type, **faulty}


def _stored(header: Header) -> str:
    """Return the dtype of most of the values of a file."""
    sizes: dict[str, int] = {}
    for stored in header.tensors.values():
        sizes[stored.dtype] = sizes.get(stored.dtype, 0) + prod(stored.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default="")


def _size(path: Path) -> int:
    """Return the bytes of a file, or of the files in a model's folder."""
    try:
        files = [path] if path.is_file() else [each for each in path.glob("*/*") if each.is_file()]
        return sum(each.stat().st_size for each in files)
    except OSError:
        return 0
