"""Small files of a model whose weights are in other files: its tokenizer, from its folder or the hub's cache."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import find_cached
from qwenimg.common.base.safe_files import is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.parts.texts.piece import Piece


def find_tokenizer(folder: Path, given: Path | None, piece: Piece) -> Path:
    """Return the folder of the tokenizer: `given`, else the one in `folder`, or the one of `piece` in the hub's
    cache. Raises ModelError."""
    names = dict.fromkeys(("tokenizer", piece.tokenizer))
    if given is not None:
        return next((given / name for name in names if is_folder(given / name)), given)
    inside = (folder / name for name in names if is_folder(folder / name))
    path = next(inside, None) or find_cached(f"{piece.repo}/{piece.tokenizer}")
    if path is None:
        raise ModelError(
            f"{clean(folder, 120)}: holds no {piece.tokenizer}/, nor does the hub's cache: get it by qwenimg pull "
            f"{piece.name} ({size_text(piece.bytes)}), or give --tokenizer FOLDER"
        )
    return path
