"""Files of parts that are given in place of a model: where they are, their kind, and the other files that they need."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.arguments import home
from qwenimg.common.base.config import has_index
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import cache_folder, find_cached
from qwenimg.common.base.safe_files import bad, is_file, is_folder
from qwenimg.common.base.safe_files import kind as kind_of_path
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.families import catalog, file_kind, registry
from qwenimg.common.families.file_kind import FileKind
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.formats.headers import peek
from qwenimg.common.hub.model_folders import ModelFolders, read_folders
from qwenimg.common.parts.downloads import TINY_VAES
from qwenimg.common.parts.tiny_vae import is_tiny_at
from qwenimg.common.prompts.wildcards import OFF
from qwenimg.common.request.parts import LEFT_OUT, PARTS, kind_of


def check_whole(path: Path, name: str = "", *, completed: bool = False) -> None:
    """Raise ModelError if the file at `path` is a part or a LoRA, with the option that takes it. An unreadable file
    passes: whoever opens it reports why. name: the user's name for it. completed: other parts are given too, so that
    the file of a family that reads whole models from one need not be whole."""
    try:
        if not is_file(path):
            return
        header = peek(path)
        kind = registry.identify(header)
    except ModelError:
        return
    if kind is None or kind.option == "model":
        return
    if kind.parts_alone:
        opens = completed and any(family.opens(header) for family in kind.families)
    else:  # the message about its missing parts says more
        opens = kind.is_part and (completed or kind.option == "transformer")
    if not opens:
        raise bad(path, f"is {kind.title} and no whole model: give it with {kind.flag}{_beside(kind, name)}")


def _beside(kind: FileKind, name: str) -> str:
    """Return the files that go with a file of this kind, for a message."""
    file = f" {clean(name, 80)}" if name else ""
    if not kind.is_part or not kind.parts_alone:
        return f"{file}, beside the model that it belongs to (-m)"
    own = frozenset[str]().union(*(family.load_options for family in kind.families))
    others = [part for part in PARTS if part in file_kind.FLAGS and part in own and part != kind.option]
    download = catalog.small_files(kind.families[0].name) if len(kind.families) == 1 else None
    tokenizer = f"; its tokenizer is {size_text(download.bytes)}, qwenimg pull {download.name}" if download else ""
    return f"{file}, beside {file_kind.listed_flags(others)}{tokenizer}"


def find_part(given: str | Path) -> Path:
    """Return the folder or file `given`, or the one that the cache has for owner/name or owner/name/file, or else
    `given` itself. Raises ModelError for a known download that is in neither place."""
    name = str(given)
    if name == str(LEFT_OUT):
        return LEFT_OUT
    path = Path(home(name))
    if os.path.lexists(path) or kind_of_path(path) is not None:
        return path
    download = catalog.find_download(name)
    has_place = download is not None and (download.controls or download.option)
    cached = find_tiny_vae(name) or find_cached(download.place if download and has_place else name)
    if cached is None and download is not None:
        shown, where = clean(name, 100), clean(cache_folder(), 60)
        raise ModelError(f"{shown}: no such file, and not in the cache {where}; get it by: qwenimg pull {shown}")
    return cached or path


def find_tiny_vae(name: str) -> Path | None:
    """Return the folder or file in the cache of the tiny VAE with this known `name`; None if it is not there."""
    known = next((one for one in TINY_VAES if one.name == name.lower()), None)
    if known is None:
        return None
    *others, last = known.files
    return find_cached(known.repo if others else f"{known.repo}/{last}")


def with_parts_found(options: LoadOptions) -> LoadOptions:
    """Return `options` with the folder or file of each part, found by `find_part`. Raises ModelError."""
    preview = options.preview_with and find_part(options.preview_with)
    parts = {part: find_part(options.parts[part]) for part in PARTS if part in options.parts}
    return replace(options, parts=parts, preview_with=preview)


def completed(options: LoadOptions) -> LoadOptions:
    """Return `options` with the folder or file of each part; if it names no model, with the one that its transformer is
    of, or that is in the transformer's file as a whole. Raises ModelError for parts that need a model."""
    options = with_parts_found(options)
    for path in options.parts.values():  # before a model that is not here: who downloads it would see this afterwards
        if path != LEFT_OUT and not is_folder(path):
            if not os.path.lexists(path):
                raise bad(path, "does not exist: check the path or download the model")
            if not is_tiny_at(path):
                peek(path)
    transformer = options.parts.get("transformer")
    if options.model is not None or not options.parts:
        return options
    if transformer is not None and _is_whole(transformer):
        others = {part: path for part, path in options.parts.items() if part != "transformer"}
        return replace(options, model=str(transformer), parts=others)
    if transformer is not None and (name := registry.model_of(transformer, options)) is not None:
        return replace(options, model=name)
    for path in options.parts.values():
        try:
            kind = registry.identify_file(path) if is_file(path) else None
        except ModelError:
            continue
        if kind is not None and kind.families and catalog.KNOWN[catalog.DEFAULT].family not in _names(kind):
            raise bad(path, f"is {kind.title}: say with -m which model it belongs to{_such(kind)}")
    return options


def _is_whole(path: Path) -> bool:
    """Return whether a file is a whole model of a family whose parts need no folder. Raises ModelError."""
    kind = registry.identify_file(path) if is_file(path) else None
    return kind is not None and kind.option == "model" and kind.parts_alone


def _names(kind: FileKind) -> list[str]:
    return [family.name for family in kind.families]


def _such(kind: FileKind) -> str:
    """Return how to say to which model a part belongs: a name for example, or the transformer."""
    able = [family.name for family in kind.families if family.model_of is not None]
    such = next((known.name for known in catalog.KNOWN.values() if known.family in able), None)
    return f", such as {such}, or give its --transformer FILE too" if such else ""


# Folders of other programs


def located(options: LoadOptions) -> tuple[ModelFolders, LoadOptions]:
    """Return the folders of --models-dir, and `options` with the paths of the files that are found there by name.
    Raises UsageError, and ModelError with the right option for a part or a LoRA whose name is given as a model's."""
    folders, name = read_folders(options.models_dir), options.model
    if name and (path := folders.of_any_kind(name)) != name:
        check_whole(Path(path), name, completed=bool(options.parts))
    model, refiner = (one and folders.locate(one, "model") for one in (name, options.refiner))
    parts = {part: Path(folders.locate(str(path), kind_of(part))) for part, path in options.parts.items()}
    preview = options.preview_with and Path(folders.locate(str(options.preview_with), "vae"))
    wildcards = tuple(dict.fromkeys((*options.wildcards, *folders.wildcards)))
    if OFF in map(str, options.wildcards):
        wildcards = options.wildcards
    return folders, replace(
        options, model=model, refiner=refiner, parts=parts, preview_with=preview, wildcards=wildcards
    )


def check_no_collection(path: Path) -> None:
    """Raise ModelError for a folder where another program keeps its models, which is no model itself."""
    if not is_folder(path) or has_index(path):
        return
    try:
        folders = read_folders([path]).folders
    except ModelError:
        return
    if folders["model"] or folders["lora"]:
        shown = shown_path(path, 80)
        raise bad(
            path,
            f"is a folder of models: give it with --models-dir, and what is in it by name; "
            f"qwenimg models --models-dir {shown} lists that",
        )
