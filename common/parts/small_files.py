"""Small files of a model whose weights are in other files: its tokenizer, from its folder or the hub's cache."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.hf_cache import find_cached
from qwenimg.common.base.safe_files import is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.parts.texts.piece import Piece


def find_tokenizer(folder: Path, given: Path | None, piece: Piece) -> Path:
    """Return the folder of the tokenizer: `given`, else the one in `folder`, or the one of `piece` in the hub's
    cache. Raises ModelError, and UsageError if one is `given` for a model in diffusers layout that has its own."""
    inside = _inside(folder, piece)
    if given is not None:
        if inside is not None and is_file(folder / "model_index.json"):
            raise UsageError(f"--tokenizer is for a model that has none; {clean(folder, 80)} has its own")
        return _inside(given, piece) or given
    path = inside or find_cached(f"{piece.repo}/{piece.tokenizer}")
    if path is None:
        raise ModelError(
            f"{clean(folder, 120)}: holds no {piece.tokenizer}/, nor does the hub's cache: get it by qwenimg pull "
            f"{piece.name} ({size_text(piece.bytes)}), or give --tokenizer FOLDER"
        )
    return path


def _inside(folder: Path, piece: Piece) -> Path | None:
    """Return the folder of the tokenizer in the folder of a model, or beside its file, or None."""
    names = dict.fromkeys(("tokenizer", piece.tokenizer))
    folder = folder.parent if is_file(folder) else folder
    return next((folder / name for name in names if is_folder(folder / name)), None)
