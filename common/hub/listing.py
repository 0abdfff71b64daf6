"""The list of models: those that are known by name, and the others in the hub's cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from qwenimg.common.base import hf_cache
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import catalog, registry, repository
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.hub import resolve
from qwenimg.common.parts.downloads import CLIP_TOKENIZER, T5_TOKENIZER, Download
from qwenimg.common.parts.texts.clip_tokenizer import is_tokenizer
from qwenimg.common.parts.texts.t5_tokenizer import is_t5_tokenizer
from qwenimg.common.request.parts import PARTS
from qwenimg.common.shapes import builtin

MAX_FOLDERS = 1000  # folders of the cache that are read

Here = Literal["yes", "in part", "no"]


@dataclass(frozen=True, kw_only=True)
class ListedModel:
    """A model, or a part of one. Fields that are unknown for a model without a known name are None."""

    name: str  # for `-m` and `pull`
    here: Here
    bytes: int  # the size of its download, or of its files in the cache
    on_disk: int = 0  # bytes of the files of its repository that are here, whatever of it they are
    repo: str | None = None
    title: str | None = None
    license: str | None = None
    purpose: str | None = None
    memory: int | None = None  # about the bytes at its peak on a GPU or a Mac


def entries() -> list[ListedModel]:
    """List the models with a known name, then the others in the cache. Neither the network nor weights are read."""
    named = [_known_model(known) for known in catalog.KNOWN.values()]
    return [
        *named,
        *map(_download, catalog.NAMED),
        *_others({entry.repo for entry in named}),
    ]


def is_here(name: str) -> bool:
    """Return whether the known model `name` is on this machine, whole."""
    return _known_model(catalog.KNOWN[name]).here == "yes"


def _known_model(known: KnownModel) -> ListedModel:
    if known.repo is None:
        here: Here = "yes" if builtin.present() else "no"
        on_disk = size = _bytes(builtin.folder()) if builtin.present() else 0
    else:
        storage = hf_cache.storage_folder(known.repo)
        here, size, on_disk = _state(storage), known.bytes, hf_cache.stored(storage)
    return ListedModel(
        name=known.name,
        title=known.title,
        repo=known.repo,
        bytes=size,
        license=known.license,
        purpose=known.about,
        memory=known.memory,
        here=here,
        on_disk=on_disk,
    )


def _download(download: Download) -> ListedModel:
    folders = hf_cache.snapshots(hf_cache.storage_folder(download.repo))
    tokenizers = {CLIP_TOKENIZER.name: is_tokenizer, T5_TOKENIZER.name: is_t5_tokenizer}
    has = (
        partial(_has_all, download)
        if download.controls or download.is_tiny_vae or download.option
        else tokenizers.get(download.name, _has_small_files)
    )
    here: Here = "yes" if any(map(has, folders)) else "no"
    return ListedModel(
        name=download.name,
        title=download.title,
        repo=download.repo,
        bytes=download.bytes,
        license=download.license,
        purpose=download.purpose,
        here=here,
    )


def has_all(download: Download) -> bool:
    """Return whether every file of `download` is on this machine."""
    return any(_has_all(download, folder) for folder in hf_cache.snapshots(hf_cache.storage_folder(download.repo)))


def _has_all(download: Download, folder: Path) -> bool:
    return all((folder / name).is_file() for name in download.files)


def _has_small_files(folder: Path) -> bool:
    try:
        return repository.lacks(folder, frozenset(PARTS)) is None
    except ModelError:
        return False


def _others(known: set[str | None]) -> list[ListedModel]:
    """List the models of the cache that are supported and have no known name."""
    models = []
    try:
        folders = sorted(islice(hf_cache.cache_folder().glob("models--*--*"), MAX_FOLDERS))
    except OSError:
        return []
    for storage in folders:
        repo = hf_cache.repo_of(storage.name)
        if repo in known or not resolve.is_hub_id(repo) or not _draws(storage):
            continue
        size = max((_bytes(folder) for folder in hf_cache.snapshots(storage)[:1]), default=0)
        there = hf_cache.stored(storage)
        models.append(ListedModel(name=repo, repo=repo, bytes=size, on_disk=there, here=_state(storage)))
    return models


def _draws(storage: Path) -> bool:
    """Return whether the first snapshot in `storage` is of a supported class."""
    for folder in hf_cache.snapshots(storage)[:1]:
        try:
            registry.of_folder(folder)
            return True
        except ModelError:
            return False
    return False


def _state(storage: Path) -> Here:
    folders = hf_cache.snapshots(storage)
    for folder in folders:
        try:
            if repository.lacks(folder) is None:
                return "yes"
        except ModelError:
            continue
    return "in part" if folders else "no"


def _bytes(folder: Path) -> int:
    """Return the bytes of the files in a model's `folder` that are used."""
    return sum(path.stat().st_size for path in repository.used(folder) if path.is_file())
