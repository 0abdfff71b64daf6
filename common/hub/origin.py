"""The entries of a recipe for the files of a model: names, never paths, and fingerprints of weights; and the opening of
the model to repeat an image, by these entries and what the user gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path, PureWindowsPath
from typing import Any, cast

from qwenimg.common.base.errors import ModelError, NotHere
from qwenimg.common.base.hf_cache import cached_name
from qwenimg.common.base.safe_files import absolute
from qwenimg.common.base.text import clean
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.registry import OpenModel
from qwenimg.common.formats.file_hash import sha256
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.hub import resolve
from qwenimg.common.hub.model_folders import ModelFolders
from qwenimg.common.hub.resolve import from_path
from qwenimg.common.jobs.replay import Replay
from qwenimg.common.request.parts import LEFT_OUT, PARTS, kind_of
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.plan import LoadPlan

MAX_HASHED = 8 << 30  # bytes of the largest file that is hashed: some ten seconds, once


def origin(model: OpenModel) -> dict[str, Any]:
    """Return the entries for a model, its refiner, and the options with which they were opened."""
    checkpoint, options, denoiser = model.checkpoint, model.options, model.family.denoiser
    declared = {"prediction": options.prediction, "variant": options.variant, "quantize": options.quantize}
    entries: dict[str, Any] = {name: value for name, value in declared.items() if value is not None}
    prints: dict[str, str] = {}
    if model.path.known is not None and model.path.known.terms:
        entries["license"] = model.path.known.terms
    if model.path.from_path and "transformer" not in options.parts:
        prints["model"] = _print(checkpoint, denoiser)
    if options.tokenizer is not None:
        entries["tokenizer"] = label(options.tokenizer)
    for part, path in options.parts.items():
        if path == LEFT_OUT:
            entries[part] = str(LEFT_OUT)
            continue
        entries[part] = cached_name(absolute(path)) or from_path(str(path), path).name
        prints[part] = _print_at(checkpoint, path)
    if model.refiner is not None and checkpoint.refiner is not None:
        entries["refiner"] = model.refiner.name
        if model.refiner.from_path:
            prints["refiner"] = _print(checkpoint.refiner, denoiser)
    return entries | {"fingerprints": prints} if prints else entries


def model_hash(opened: OpenModel) -> Callable[[], dict[str, str]]:
    """Return a function for the entry with the SHA-256 of the denoiser's file, by which other programs know a model.
    The first call hashes the file. The entry is empty for several files, and for one that is too large."""
    files = {file.path: file for file in opened.checkpoint[opened.family.denoiser].plan.files}

    @cache
    def entry() -> dict[str, str]:
        only = next(iter(files.values())) if len(files) == 1 else None
        return {} if only is None or only.size > MAX_HASHED else {"model_sha256": sha256(only)}

    return entry


def _print_at(checkpoint: Checkpoint, path: Path) -> str:
    """Return the fingerprint of the component that was read from the folder or file `path`, or from a folder in it."""
    plans = [part.plan for part in checkpoint.components.values()]
    found = [plan for plan in plans if path in _places(plan)]
    found += [plan for plan in plans if path in {place.parent for place in _places(plan)}]
    return fingerprint(found[0].files)


def _print(checkpoint: Checkpoint, component: str) -> str:
    return fingerprint(checkpoint[component].plan.files)


def label(folder: Path) -> str:
    """Return the name of `folder` for a recipe, never a path."""
    path = absolute(folder)
    return clean((path.parent if path.name.startswith("tokenizer") else path).name or "tokenizer", 100)


def _places(plan: LoadPlan) -> set[Path]:
    """Return the files of a plan, and their folders."""
    return {place for file in plan.files for place in (file.path, file.path.parent)}


# Opening a model to repeat an image


def with_recorded_parts(options: LoadOptions, replay: Replay, folders: ModelFolders | None) -> LoadOptions:
    """Return `options` with the parts that the recipe names by a hub id and that are in the cache, or by a name that is
    in `folders`."""
    given, used = options.parts, replay.used

    def path(part: str) -> Path | None:
        return given.get(part) or resolve.named_part(used[part]) or _in_folders(used[part], kind_of(part), folders)

    paths = {part: path(part) for part in PARTS if part in used}
    return replace(options, parts={**given, **{part: path for part, path in paths.items() if path is not None}})


def _in_folders(name: str, kind: str, folders: ModelFolders | None) -> Path | None:
    """Return the file or folder in `folders` that a recipe calls `name`, which is never taken for a path."""
    plain = folders is not None and name not in ("", ".", "..") and not {"/", "\\", "\0"} & {*name}
    return folders.find(name, kind) if plain and folders is not None else None


def with_recorded_model(options: LoadOptions, replay: Replay, folders: ModelFolders | None) -> LoadOptions:
    """Return `options` with the model of another program's recipe, if a file of its name is in `folders`."""
    if options.model is not None or not replay.foreign_model:
        return options
    path = _in_folders(PureWindowsPath(replay.foreign_model).name, "model", folders)  # that splits at both slashes
    return options if path is None else replace(options, model=str(path))


def replayed(
    options: LoadOptions, replay: Replay, picture: Path, folders: ModelFolders | None, *, keep_policy: bool
) -> LoadOptions:
    """Return `options` completed from the recipe of the file `picture`: model, refiner, parts, prediction, bits, and if
    `keep_policy` the precision. Raises ModelError for a model that is neither in the cache nor in `folders`."""
    options = with_recorded_parts(options, replay, folders)
    model, refiner, used = options.model, options.refiner, replay.used
    if model is None and replay.model is not None:
        model = _named(replay.model, "-m", picture, options, folders)
    if refiner is None and "refiner" in used:
        refiner = _named(used["refiner"], "--refiner", picture, LoadOptions(offline=options.offline), folders)
    return replace(
        options,
        model=model,
        refiner=refiner,
        precision=replay.precision if keep_policy else options.precision,
        prediction=options.prediction or cast(Any, used.get("prediction")),
        variant=options.variant or used.get("variant"),
        quantize=options.quantize or used.get("quantize"),
    )


def _named(name: str, option: str, picture: Path, options: LoadOptions, folders: ModelFolders | None) -> str:
    """Return the model to open for the recipe's `name`. Raises ModelError that asks for `option`."""
    try:
        return resolve.named(name, offline=options.offline, without=options.replaced)
    except ModelError as error:
        if (path := _in_folders(name, "model", folders)) is not None:
            return str(path)
        text = f"{error} (the model that {clean(picture, 60)} was made with; give it with {option})"
        raise (NotHere(text, error.name) if isinstance(error, NotHere) else ModelError(text)) from None
