"""Small files of a model whose weights are in other files: its tokenizer, from its folder or the hub's cache, and the
padding of CLIP's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.config import has_index, read_json
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.hf_cache import find_cached
from qwenimg.common.base.safe_files import is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.parts.downloads import Download
from qwenimg.common.runtime.checkpoint import Checkpoint

_CONFIG = "tokenizer_config.json"


def find_tokenizer(folder: Path, given: Path | None, download: Download) -> Path:
    """Return the folder of the tokenizer: `given`, else the one in `folder`, or the one of `download` in the hub's
    cache. Raises ModelError, and UsageError if one is `given` for a model in diffusers layout that has its own."""
    inside = _inside(folder, download)
    if given is not None:
        if inside is not None and has_index(folder):
            raise UsageError(f"--tokenizer is for a model that has none; {clean(folder, 80)} has its own")
        return _inside(given, download) or given
    path = inside or find_cached(f"{download.repo}/{download.tokenizer}")
    if path is None:
        raise ModelError(
            f"{clean(folder, 120)}: holds no {download.tokenizer}/, nor does the hub's cache: get it by qwenimg pull "
            f"{download.name} ({size_text(download.bytes)}), or give --tokenizer FOLDER"
        )
    return path


def padded_tokenizers(checkpoint: Checkpoint, pads: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """Return tokenizer_config.json by its path for each CLIP in `pads`, its padding token, which a vocabulary that is
    found elsewhere does not show. Raises ModelError."""
    files: dict[str, dict[str, object]] = {}
    for name, pad in pads.items():
        path = checkpoint.tokenizers[name].path / _CONFIG
        config: dict[str, object] = read_json(path) if is_file(path) else {"tokenizer_class": "CLIPTokenizer"}
        files[f"{name.replace('text_encoder', 'tokenizer')}/{_CONFIG}"] = config | {"pad_token": pad}
    return files


def _inside(folder: Path, download: Download) -> Path | None:
    """Return the folder of the tokenizer in the folder of a model, or beside its file, or None."""
    names = dict.fromkeys(("tokenizer", download.tokenizer))
    folder = folder.parent if is_file(folder) else folder
    return next((folder / name for name in names if is_folder(folder / name)), None)
