"""Search for a model on this machine by the user's name for it: a path, or a snapshot in the Hugging Face cache.

Nothing here uses the network; only `pull` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from qwenimg.common.base.addresses import address_advice
from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import ModelError, NotHere
from qwenimg.common.base.hf_cache import (
    COMMIT,
    REPO,
    cache_folder,
    find_cached,
    is_offline,
    repo_of,
    snapshots,
    storage_folder,
)
from qwenimg.common.base.safe_files import absolute, bad, kind
from qwenimg.common.base.text import clean
from qwenimg.common.families import catalog
from qwenimg.common.families.known_model import KnownModel, ModelPath
from qwenimg.common.families.repository import has_weights, lacks
from qwenimg.common.formats.files import PICKLES
from qwenimg.common.parts.downloads import Download
from qwenimg.common.request.parts import LEFT_OUT
from qwenimg.common.shapes import builtin

_PARTS = ("transformer", "text_encoder", "vae")  # of a model whose configurations ship
_OR_FOLDER = " (or give --tokenizer FOLDER)"
TOKENIZER = "tokenizer"
"""Stands beside names of components: the tokenizer."""
_HUB_ID = re.compile(REPO)
_FILES = (".safetensors", ".gguf", *PICKLES)  # a model in one file, readable or not


def is_hub_id(text: str) -> bool:
    """Return whether `text` has the form owner/name."""
    return _HUB_ID.fullmatch(text) is not None


# Models


def resolve(model: str | None, *, offline: bool = False, without: frozenset[str] = frozenset()) -> ModelPath:
    """Find `model`: an existing path, else a known name, else a hub id in the Hugging Face cache.

    None is the default model, or the one to pull first if the cache has weights of that alone, or the built-in one if
    it has neither and no component is given.
    `without`: components whose weights come from elsewhere and need not be there, TOKENIZER among them.

    Raises ModelError for a model that is not there, is incomplete, or is known and not supported; `offline` changes
    only the wording."""
    given = _default(without) if model is None else model
    if model:
        path = Path(home(model))
        if os.path.lexists(path) or kind(path) is not None:
            resolved = from_path(model, path)
            _check_is_model(resolved.folder, without)
            return resolved
    return _by_name(given, model is None, offline, without)


def _default(without: frozenset[str]) -> str:
    """Return the name of the model to draw with if none is named: the first that the cache has, whole or else in part.
    Parts from elsewhere belong to the default model."""
    names = (catalog.DEFAULT, catalog.FIRST) if without <= {TOKENIZER} else ()
    copies = {name: snapshots(storage_folder(find_repo(name)[0])) for name in names}
    complete = (name for name, folders in copies.items() if any(lacks(folder, without) is None for folder in folders))
    begun = (name for name, folders in copies.items() if any(map(has_weights, folders)))
    return next(complete, next(begun, catalog.DEFAULT))


def _check_is_model(path: Path, without: frozenset[str]) -> None:
    """Raise ModelError for a part, a LoRA, or a folder of models."""
    from qwenimg.common.hub import part_files  # which imports numpy; a name in the cache needs none

    part_files.check_whole(path, completed=bool(without))
    part_files.check_no_collection(path)


def named(name: str, *, offline: bool = False, without: frozenset[str] = frozenset()) -> str:
    """Return the argument of `resolve` for a recipe's `name`: a known name, or the folder of a hub id in the cache.
    Raises ModelError for anything else: a path in a recipe is never opened, nor a folder of that name."""
    known = catalog.find(name)
    if known is None and (not _HUB_ID.fullmatch(name) or name.lower().endswith(_FILES)):
        raise ModelError(f"'{clean(name, 60)}' is neither a known model nor a hub id, and a recipe opens no path")
    if known is catalog.BUILT_IN and not os.path.lexists(name):
        return name
    return str(_by_name(name, False, offline, without).folder)


def named_part(name: str) -> Path | None:
    """Return the folder or file of the part that a recipe calls `name`, if the cache has it by that name: a path in a
    recipe is never opened."""
    if name == str(LEFT_OUT):
        return LEFT_OUT
    return None if os.path.lexists(name) else find_cached(name)


def _by_name(given: str, is_default: bool, offline: bool, without: frozenset[str]) -> ModelPath:
    if catalog.find(given) is catalog.BUILT_IN:
        return _built_in()
    repo, known = find_repo(given)
    name = known.name if known else repo
    folders = snapshots(storage_folder(repo))
    download = None if known is None else catalog.small_files(known.family)
    shipped = None if known is None else configurations(known)
    if without.issuperset({*_PARTS, TOKENIZER}) and shipped is not None:
        return ModelPath(folder=shipped, name=name, known=known)
    for folder in folders:
        if lacks(folder, without) is None:
            return ModelPath(folder=folder, name=name, known=known, revision=folder.name)
    if without.issuperset(_PARTS) and shipped is not None and _has_tokenizer(download):
        return ModelPath(folder=shipped, name=name, known=known)
    if is_default and not without - {TOKENIZER} and builtin.present() and not any(map(has_weights, folders)):
        return _built_in()
    if without and known is not None and shipped is not None and _all_given_or_none_here(without, folders):
        raise _parts_missing(known, download, folders, without, offline)
    if not folders:
        raise _absent(name, repo, known, offline)
    raise NotHere(
        f"{name}: the copy in {clean(cache_folder(), 100)} is incomplete, it lacks {lacks(folders[0], without)}; "
        f"`qwenimg pull {name}` resumes"
        + (f"; until then: -m {builtin.NAME}" if is_default and builtin.present() else ""),
        name,
    )


def is_built_in(model: str | None) -> bool:
    """Return whether `resolve` would return the built-in model for `model`."""
    if model is not None and (catalog.find(model) is not catalog.BUILT_IN or os.path.lexists(model)):
        return False
    try:
        return resolve(model).known is catalog.BUILT_IN
    except ModelError:
        return False


def advice(model: str | None, real: Callable[[], str] = builtin.real_model) -> builtin.Advice | None:
    """Return advice about the prompts of `model`, before it is opened; None for a model that can draw anything. real:
    returns the commands for a real model."""
    return builtin.Advice(named=model is not None, real=real) if is_built_in(model) else None


def _built_in() -> ModelPath:
    if not builtin.present():
        raise builtin.absent()
    return ModelPath(folder=builtin.folder(), name=builtin.NAME, known=catalog.BUILT_IN)


def from_path(given: str, path: Path) -> ModelPath:
    """Return the model at `path`, which errors call `given`. Raises ModelError and UsageError."""
    here = kind(path)
    if here is None:
        raise ModelError(f"{clean(given, 120)}: is a link that leads nowhere")
    if here == "other":
        raise bad(path, "is a pipe, device or socket; a model is a folder or a file")
    full = absolute(path)  # links stay: they show which snapshot it is
    if here == "file":
        return ModelPath(folder=path, name=clean(full.name, 100))
    storage = full.parent.parent.name
    if full.parent.name == "snapshots" and storage.count("--") == 2 and COMMIT.fullmatch(full.name):
        repo = repo_of(storage)
        known = catalog.find(repo)
        return ModelPath(folder=path, name=known.name if known else repo, known=known, revision=full.name)
    return ModelPath(folder=path, name=clean(full.name or "model", 100))


def find_repo(given: str) -> tuple[str, KnownModel | None]:
    """Return the hub id of the name or id `given`, and the model if it is known by name. Raises ModelError."""
    shown = clean(given, 80)
    if (advice := address_advice(given)) is not None:
        raise ModelError(f"{shown}: {advice}")
    if given.lower().endswith(_FILES):
        raise ModelError(f"{shown}: no such file")
    if given.startswith((".", "~", os.sep)) or given.count(os.sep) > 1 or given.endswith(os.sep):
        raise ModelError(f"{shown}: no such folder")
    reason = catalog.refusal(given)
    if reason:
        raise ModelError(f"{shown}: {reason}")
    known = catalog.find(given)
    if known is catalog.BUILT_IN:
        raise ModelError(f"{shown}: is built in and on no hub; use it by -m {shown}")
    if known or _HUB_ID.fullmatch(given):
        return (known.repo if known and known.repo else given), known
    near = catalog.nearest(given)
    suggestion = f"did you mean {near}? " if near else ""
    raise ModelError(
        f"'{shown}': no such folder or model; {suggestion}qwenimg models lists those with a name; "
        "others by folder or by hub id (owner/name)"
    )


def _all_given_or_none_here(without: frozenset[str], folders: list[Path]) -> bool:
    """Return whether the rest of a model should be given too, rather than pulled."""
    return without.issuperset(_PARTS) or not any(map(has_weights, folders))


def _parts_missing(
    known: KnownModel, download: Download | None, folders: list[Path], without: frozenset[str], offline: bool
) -> ModelError:
    """Return the error for a model with only some parts given, `without`: it names what is missing."""
    from qwenimg.common.families import file_kind

    missing = [part for part in _PARTS if part not in without]
    has_tokenizer = TOKENIZER in without or any(lacks(folder, frozenset(_PARTS)) is None for folder in folders)
    has_tokenizer = has_tokenizer or _has_tokenizer(download)
    when = " with the network on" if offline or is_offline() else ""
    ways = [f"give {file_kind.listed_flags(missing)}"] if missing else []
    if download is not None and not has_tokenizer:
        ways.append(f"get its tokenizer ({size_text(download.bytes)}){when} by: qwenimg pull {download.name}")
    given = [file_kind.FLAGS[part] for part in _PARTS if part in without]
    beside = f"beside {' and '.join(given)}, " if missing else ""
    return ModelError(f"{known.name}: {beside}{', and '.join(ways)}{'' if has_tokenizer else _OR_FOLDER}")


def configurations(known: KnownModel) -> Path | None:
    """Return the folder of the configurations of a known model that _PARTS and a tokenizer complete; else None."""
    folder = catalog.configurations(known)
    return folder if folder is not None and (folder / _PARTS[0]).is_dir() else None


def _has_tokenizer(download: Download | None) -> bool:
    """Return whether the cache has the tokenizer among a family's small files; a family without such files looks for
    its tokenizers itself."""
    return download is None or find_cached(f"{download.repo}/{download.tokenizer}") is not None


def _absent(name: str, repo: str, known: KnownModel | None, offline: bool) -> ModelError:
    about = f"{repo}, {size_text(known.bytes)}," if known else "the model"
    near = None if known else catalog.nearest(repo)
    if near:
        return ModelError(
            f"{name}: is not in the cache {clean(cache_folder(), 100)}; did you mean {near}? else: qwenimg pull {name}"
        )
    when = " with the network on" if offline or is_offline() else ""
    text = f"{name}: {about} is not in the cache {clean(cache_folder(), 100)}; get it{when} by: qwenimg pull {name}"
    return NotHere(text, name)
