"""Files that a run names and that are not on this machine: all downloads in one message, and a file that cannot be read
before a model that is not here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import ModelError, NotHere
from qwenimg.common.base.hf_cache import find_cached
from qwenimg.common.base.safe_files import is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families import catalog
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.formats.headers import open_weights
from qwenimg.common.hub.model_folders import ModelFolders
from qwenimg.common.hub.network_search import find_control, find_embedding
from qwenimg.common.hub.part_files import completed, find_part
from qwenimg.common.hub.resolve import is_hub_id, resolve
from qwenimg.common.parts.texts.embedding_file import read_embedding
from qwenimg.common.request.loras import find_file

LONGEST = 160  # characters of the commands in a message, which may name another model behind them


class Missing(NamedTuple):
    """A download that is not here."""

    name: str
    bytes: int  # 0: not known

    @property
    def command(self) -> str:
        size = f" ({size_text(self.bytes)})" if self.bytes else ""
        return f"qwenimg pull {clean(self.name, 80)}{size}"


def check(opening: LoadOptions, options: Mapping[str, Any], folders: ModelFolders, *, planned: bool = False) -> None:
    """Raise ModelError if several downloads that a picture with `options` needs are not here: with the command and the
    size of each. Raise it too for a file of `options` that cannot be read, if the model is not here. A single download
    is left to what opens it, which says more. planned: known models and control networks need not be here."""
    models = [] if planned else _models(opening)
    others = list(_parts(opening))
    for find, read, name in _named(options, folders):
        try:
            path = find(name)
        except ModelError:
            one = missing(name)
            if one is None and models:
                raise
            if one is not None and not (planned and one.bytes):
                others.append(one)
            continue
        if models and not is_folder(path):
            read(path)
    every = list(dict.fromkeys((*models, *others)))
    if len(every) > 1:
        text = f"not on this machine: {listed(every)}"
        raise NotHere(text, models[0].name) if models else ModelError(text)


def missing(name: str) -> Missing | None:
    """Return the download that `name` is, a known name or a hub id, if the cache has it not; None for another name."""
    download = catalog.find_download(name)
    if find_cached(name if download is None else download.place) is not None:
        return None
    if download is not None:
        return Missing(download.name, download.bytes)
    return Missing(name, 0) if is_hub_id(name) else None


def listed(every: Iterable[Missing]) -> str:
    """Return the commands that download `every` one, as many as a line has space for."""
    commands = [one.command for one in every]
    shown = [commands[0]]
    for command in commands[1:]:
        if len("; ".join([*shown, command])) > LONGEST:
            break
        shown.append(command)
    more = f"; and {len(commands) - len(shown)} more" if len(shown) < len(commands) else ""
    return "; ".join(shown) + more


def _models(opening: LoadOptions) -> list[Missing]:
    """Return the model and the refiner that are not here."""
    with suppress(ModelError):  # of a part, which is found below or when it is opened
        opening = completed(opening)
    found = []
    for name, without in ((opening.model, opening.replaced), (opening.refiner, frozenset[str]())):
        if name is None:
            continue
        try:
            resolve(name, offline=opening.offline, without=without)
        except NotHere as error:
            known = catalog.find(error.name)
            found += [Missing(error.name, known.bytes if known else 0)] if error.name else []
        except ModelError:
            continue
    return found


def _parts(opening: LoadOptions) -> Iterator[Missing]:
    """Yield the parts that are downloads and not here."""
    for path in (*opening.parts.values(), opening.preview_with):
        try:
            if path is not None:
                find_part(path)
        except ModelError:
            if (one := missing(str(path))) is not None:
                yield one


def _named(
    options: Mapping[str, Any], folders: ModelFolders
) -> Iterator[tuple[Callable[[str], Path], Callable[[Path], object], str]]:
    """Yield each LoRA, control network, IP-Adapter and embedding of `options`: how it is found and read, and its
    name."""
    for lora in folders.loras(options.get("lora") or ()):
        yield find_file, _read_header, lora.source
    for name in dict.fromkeys(one.network for one in options.get("control") or ()):
        yield lambda name: find_control(name, folders), _read_header, name
    for embedding in options.get("embedding") or ():
        yield lambda name: find_embedding(name, folders), read_embedding, embedding.source


def _read_header(path: Path) -> None:
    open_weights(path).file.close()
