"""Search for the CLIP tokenizer of a single file on this machine: other programs have the same one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from qwenimg.common.base import hf_cache
from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import absolute, bad
from qwenimg.common.base.text import clean
from qwenimg.common.parts.downloads import CLIP_TOKENIZER
from qwenimg.common.prompts import clip

FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # either is a tokenizer
MAX_BYTES = 6 << 20  # of a file: CLIP's has 1 to 3.6 MB, and Qwen's of 7 MB is not read
MAX_TRIED = 8  # tokenizers of the right size that are read, at 0.2 s each, before the search ends
MAX_ENTRIES = 500  # of a folder that is searched
MAX_PARENTS = 5  # folders above the file that may be the program that it belongs to
# Models whose tokenizer is CLIP's own, in the order in which they are looked for in the hub's cache.
REPOS = (
    CLIP_TOKENIZER.repo,
    "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "runwayml/stable-diffusion-v1-5",
    "CompVis/stable-diffusion-v1-4",
    "stabilityai/stable-diffusion-xl-base-1.0",
    "stabilityai/sdxl-turbo",
    "stabilityai/stable-diffusion-2-1",
    "stabilityai/stable-diffusion-2-1-base",
)
# In the folders of ComfyUI, Fooocus and the web UI of Forge. AUTOMATIC1111's fetches openai's into the hub's cache.
INSIDE = (
    "comfy/sd1_tokenizer",
    "ldm_patched/modules/sd1_tokenizer",
    "backend/huggingface/stable-diffusion-v1-5/stable-diffusion-v1-5/tokenizer",
    "backend/huggingface/runwayml/stable-diffusion-v1-5/tokenizer",
    "backend/huggingface/stabilityai/stable-diffusion-xl-base-1.0/tokenizer",
)
PROGRAMS = (
    "ComfyUI",
    "Fooocus",
    "stable-diffusion-webui",
    "stable-diffusion-webui-forge",
    "SwarmUI/dlbackend/ComfyUI",
    "StabilityMatrix/Packages/ComfyUI",
)
APPLICATIONS = ("/Applications/ComfyUI.app/Contents/Resources/ComfyUI", "/opt/ComfyUI", "/workspace/ComfyUI")


def find_clip_tokenizer(file: Path, size: int, given: Path | None = None, also: Path | None = None) -> Path:
    """Find the folder of a tokenizer for the single file `file`, whose text encoders have `size` embeddings.

    If one is `given`, it is that one. Else it is the first that fits: next to the file, `also`, in the hub's cache, in
    the folder of another program. Raises ModelError that names these places and says what to do."""
    if given is not None:
        folder = next((f for f in (given, given / "tokenizer") if is_tokenizer(f)), None)
        if folder is None:
            raise bad(given, "holds no tokenizer: give a folder with tokenizer.json, or vocab.json and merges.txt")
        clip.load(folder, clip.EOS_PAD).check_vocabulary(size)
        return folder
    for folder in islice(filter(is_tokenizer, places(file, also)), MAX_TRIED):
        if fits(folder, size):
            return folder
    raise ModelError(
        f"{clean(file.name, 60)}: needs CLIP's vocabulary, which single files do not hold, and none that fits is in "
        f"tokenizer/ or beside it, in the hub's cache or in a ComfyUI: qwenimg pull {CLIP_TOKENIZER.name} "
        f"({size_text(CLIP_TOKENIZER.bytes)}), or --tokenizer FOLDER"
    )


def places(file: Path, also: Path | None = None) -> Iterator[Path]:
    """Yield the folders that may hold a tokenizer for `file`, the nearest first, while the search goes on."""
    here = absolute(file).parent  # a link's own folder
    yield from (here / "tokenizer", here)
    if also is not None:
        yield also
    for repo in REPOS:
        yield from _of_model(hf_cache.storage_folder(repo))
    yield from (root / inside for root in program_folders(here) for inside in INSIDE)
    yield from (folder / "tokenizer" for folder in _entries(here))
    for storage in _entries(hf_cache.cache_folder()):
        if storage.name.startswith("models--"):
            yield from _of_model(storage)


def program_folders(here: Path) -> list[Path]:
    """Return the folders where other programs may be, the nearest to the folder `here` first."""
    home = Path.home() if "HOME" in os.environ else Path("/nonexistent")
    parents = [here, *here.parents][:MAX_PARENTS]
    programs = [home / folder / name for folder in ("", "Documents", "Desktop") for name in PROGRAMS]
    return [*parents, *(above / "ComfyUI" for above in parents), *programs, *map(Path, APPLICATIONS)]


def _of_model(storage: Path) -> Iterator[Path]:
    for folder in hf_cache.snapshots(storage)[:MAX_ENTRIES]:
        yield from (folder / "tokenizer", folder)


def _entries(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in islice(entries, MAX_ENTRIES) if entry.is_dir())
    except OSError:
        return []


def is_tokenizer(folder: Path) -> bool:
    """Return whether `folder` has the files of a tokenizer of CLIP's size; tokenizer.json is preferred."""
    whole, parts = FILES
    names = whole if os.path.lexists(folder / whole[0]) else parts
    return all(_is_small_file(folder / name) for name in names)


def _is_small_file(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= MAX_BYTES
    except (OSError, ValueError):
        return False


def fits(folder: Path, size: int) -> bool:
    """Return whether the tokenizer in `folder` is of CLIP's form and has `size` tokens."""
    try:
        clip.load(folder, clip.EOS_PAD).check_vocabulary(size)
    except ModelError:
        return False
    return True
