"""A Qwen-Image folder that mflux saved: parts in its names, in codes or not; a tokenizer, perhaps; no configurations.

mflux draws with the published configurations and scheduler alone, so that these are meant where a folder has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import find_cached
from qwenimg.common.base.safe_files import is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import read_header
from qwenimg.common.parts.piece import QWEN_IMAGE_FILES

_BLOCK = "transformer_blocks.0."
_SIGNS = (f"{_BLOCK}img_mod_linear.", f"{_BLOCK}attn.attn_to_out.", f"{_BLOCK}img_ff.")
_NOTES = {"mflux_version": "mflux", "quantization_level": "level"}


def are_names(keys: Iterable[str]) -> bool:
    """Whether tensors of the transformer are called so by mflux."""
    return any(key.startswith(_SIGNS) for key in keys)


def layout(folder: Path) -> str | None:
    """What the folder is called and why, where its transformer has mflux's names. Raises ModelError."""
    if not is_folder(folder / "transformer"):
        return None
    for path in find_files(folder / "transformer").files:
        header = read_header(path)
        header.file.close()
        found = next((key for key in header.tensors if key.startswith(_SIGNS)), None)
        if found is not None:
            said = [
                f"{word} {clean(header.metadata[key], 20)}" for key, word in _NOTES.items() if key in header.metadata
            ]
            return ", ".join([f"folder of mflux (its names, as {clean(found, 80)})", *said])
    return None


def tokenizer(folder: Path, given: Path | None) -> Path:
    """That which was `given`, that of the folder, or that of the hub's cache. Raises ModelError."""
    own, piece = folder / "tokenizer", QWEN_IMAGE_FILES
    if given is not None:
        return given / "tokenizer" if is_folder(given / "tokenizer") else given
    found = own if is_folder(own) else find_cached(f"{piece.repo}/tokenizer")
    if found is None:
        raise ModelError(
            f"{clean(folder, 120)}: holds no tokenizer/, nor does the hub's cache: get it by qwenimg pull {piece.name} "
            f"({size_text(piece.bytes)}), or give --tokenizer FOLDER"
        )
    return found
