"""Files of parts that are given in place of a model: their kind, and the other files that they need."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, is_file, is_folder
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.families import catalog, file_kind, registry
from qwenimg.common.families.file_kind import FileKind
from qwenimg.common.families.opening import Opening
from qwenimg.common.hub.model_folders import ModelFolders, read_folders
from qwenimg.common.request.parts import PARTS


def check_whole(path: Path, name: str = "", *, completed: bool = False) -> None:
    """Raise ModelError if the file at `path` is a part or a LoRA, with the option that takes it. An unreadable file
    passes: whoever opens it reports why. name: the user's name for it. completed: other parts are given too, so that a
    Stable Diffusion file need not be whole."""
    try:
        kind = registry.identify_file(path) if os.path.isfile(path) else None  # noqa: PTH113
    except ModelError:
        return
    if kind is None or kind.option == "model":
        return
    others = kind.is_part and not kind.parts_alone
    if not (others and (completed or kind.option == "transformer")):  # the message about its missing parts says more
        raise bad(path, f"is {kind.title} and no whole model: give it with {kind.flag}{_beside(kind, name)}")


def _beside(kind: FileKind, name: str) -> str:
    """Return the files that go with a file of this kind, for a message."""
    file = f" {clean(name, 80)}" if name else ""
    piece = next(filter(None, (catalog.small_files(family.name) for family in kind.families)), None)
    if not kind.is_part or not kind.parts_alone or piece is None:
        return f"{file}, beside the model that it belongs to (-m)"
    others = [part for part in PARTS if part in file_kind.FLAGS and part != kind.option]
    tokenizer = f"its tokenizer is {size_text(piece.bytes)}, qwenimg pull {piece.name}"
    return f"{file}, beside {file_kind.listed_flags(others)}; {tokenizer}"


def check_alone(opening: Opening) -> None:
    """Raise ModelError for a part without a model whose family needs one."""
    for path in opening.parts.values() if opening.model is None else ():
        try:
            kind = registry.identify_file(path) if os.path.isfile(path) else None  # noqa: PTH113
        except ModelError:
            continue
        if kind is not None and kind.families and not kind.parts_alone:
            families = [family.name for family in kind.families if catalog.small_files(family.name)]
            names = [known.name for known in catalog.KNOWN.values() if known.family in families]
            such = f", such as {' or '.join(names)}" if names else ""
            raise bad(path, f"is {kind.title}: say with -m which model it belongs to{such}")


# Folders of other programs


def located(opening: Opening) -> tuple[ModelFolders, Opening]:
    """Return the folders of --models-dir, and `opening` with the paths of the files that are found there by name.
    Raises UsageError, and ModelError with the right option for a part or a LoRA whose name is given as a model's."""
    folders, name = read_folders(opening.models_dir), opening.model
    if name and (path := folders.of_any_kind(name)) != name:
        check_whole(Path(path), name, completed=bool(opening.parts))
    model, refiner = (one and folders.locate(one, "model") for one in (name, opening.refiner))
    parts = {part: Path(folders.locate(str(path), PARTS[part].again or part)) for part, path in opening.parts.items()}
    return folders, replace(opening, model=model, refiner=refiner, parts=parts)


def check_no_collection(path: Path) -> None:
    """Raise ModelError for a folder where another program keeps its models, which is no model itself."""
    if not is_folder(path) or is_file(path / "model_index.json"):
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
