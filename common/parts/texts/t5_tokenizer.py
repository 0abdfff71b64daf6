"""Search for the T5 tokenizer of a model in one file on this machine: all models with T5 have the same one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from qwenimg.common.base import hf_cache
from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import absolute, bad, is_file
from qwenimg.common.base.text import clean
from qwenimg.common.parts.downloads import T5_TOKENIZER
from qwenimg.common.parts.texts.clip_tokenizer import MAX_TRIED, program_folders
from qwenimg.common.prompts import t5

FILES = ("tokenizer.json", "spiece.model")  # either is a tokenizer
INSIDE = ("tokenizer_3", "tokenizer_2", "")  # of a model's folder, where T5's may be
OF_COMFYUI = "comfy/text_encoders/t5_tokenizer"


def find_t5_tokenizer(file: Path, size: int, given: Path | None = None) -> Path:
    """Find the folder of the T5 tokenizer for the model in `file`, whose encoder has `size` embeddings: in the folder
    that is `given`, else beside the file, in the hub's cache, or in a ComfyUI. Raises ModelError that says what to
    do."""
    places = (given / name for name in INSIDE) if given is not None else _places(file)
    for folder in islice(filter(is_t5_tokenizer, places), MAX_TRIED):
        if _fits(folder, size):
            return folder
    if given is not None:
        raise bad(given, f"holds no T5 tokenizer: give a folder with {' or '.join(FILES)}, or with tokenizer_3")
    raise ModelError(
        f"{clean(file.name, 60)}: needs T5's vocabulary, which single files do not hold, and none that fits is beside "
        f"it, in the hub's cache or in a ComfyUI: qwenimg pull {T5_TOKENIZER.name} ({size_text(T5_TOKENIZER.bytes)}), "
        "or --tokenizer FOLDER"
    )


def _places(file: Path) -> Iterator[Path]:
    """Yield the folders that may hold the tokenizer, the nearest first."""
    here = absolute(file).parent
    yield from (here / name for name in INSIDE)
    yield from hf_cache.snapshots(hf_cache.storage_folder(T5_TOKENIZER.repo))
    yield from (root / OF_COMFYUI for root in program_folders(here))


def is_t5_tokenizer(folder: Path) -> bool:
    """Return whether `folder` has a file of T5's tokenizer."""
    return any(is_file(folder / name) for name in FILES)


def _fits(folder: Path, size: int) -> bool:
    """Return whether the tokenizer in `folder` is T5's and has at most `size` tokens."""
    try:
        t5.load(folder).check_vocabulary(size)
    except ModelError:
        return False
    return True
