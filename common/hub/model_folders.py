"""The folders where other programs keep models: files are found there by name, and nothing is copied.

Under a folder that was given, or under its `models`, each kind has the names that ComfyUI, AUTOMATIC1111's web UI (and
Forge) and InvokeAI give it; an `extra_model_paths.yaml` beside them adds more, as in ComfyUI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from qwenimg.common.base.arguments import home
from qwenimg.common.base.config import has_index
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.hf_cache import find_cached
from qwenimg.common.base.safe_files import absolute, is_file, is_folder, kind
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.families import catalog, registry
from qwenimg.common.formats.files import PICKLES
from qwenimg.common.hub import comfy_paths
from qwenimg.common.parts import tiny_vae
from qwenimg.common.parts.downloads import TINY_VAES
from qwenimg.common.parts.texts.embedding_file import SUFFIXES as EMBEDDINGS
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.parts import PARTS

KINDS: Mapping[str, tuple[str, ...]] = {
    "model": ("checkpoints", "diffusers"),
    "transformer": ("diffusion_models", "unet"),
    "text_encoder": ("text_encoders", "clip"),
    "vae": ("vae", "vae_approx"),
    "lora": ("loras",),
    "control": ("controlnet", "t2i_adapter", "model_patches", "ipadapter", "style_models"),
    "ip_encoder": ("clip_vision",),
    "embedding": ("embeddings",),
    "upscaler": ("upscale_models",),
}
"""ComfyUI's names of folders, by the option whose files are in them."""
NOUNS: Mapping[str, str] = {
    "model": "model",
    "transformer": "transformer",
    "text_encoder": "text encoder",
    "vae": "VAE",
    "lora": "LoRA",
    "control": "control network",
    "ip_encoder": "image encoder",
    "embedding": "embedding",
    "upscaler": "upscaler",
}
"""The names of these kinds, for messages."""
WEBUI: Mapping[str, tuple[str, ...]] = {
    "model": ("Stable-diffusion",),
    "transformer": ("Stable-diffusion",),
    "text_encoder": ("text_encoder",),
    "vae": ("VAE", "VAE-taesd", "VAE-approx"),
    "lora": ("Lora", "LyCORIS"),
    "control": ("ControlNet",),
    "embedding": ("embeddings",),
    "ip_encoder": (),
    "upscaler": ("ESRGAN", "RealESRGAN"),
}
"""The same in AUTOMATIC1111's web UI and in Forge."""
INVOKE_TYPES: Mapping[str, tuple[str, ...]] = {
    "model": ("main",),
    "transformer": ("main",),
    "text_encoder": ("clip_embed",),
    "vae": ("vae",),
    "lora": ("lora",),
    "control": ("controlnet", "control_lora", "t2i_adapter", "ip_adapter", "flux_redux"),
    "ip_encoder": ("clip_vision", "siglip"),
    "embedding": ("embedding",),
    "upscaler": ("spandrel_image_to_image",),
}
INVOKE_BASES = ("sd-1", "sd-2", "sdxl", "sdxl-refiner", "flux", "qwen-image", "any")
"""InvokeAI has `models/BASE/TYPE/NAME`, in newer versions `models/KEY/NAME`, where the key does not tell the kind."""
WILDCARDS = ("wildcards", "custom_wildcards")
"""Folders of wildcards, in a program's own folder, beside its scripts, and in those of its extensions."""
_EXTENSIONS = ("custom_nodes", "extensions")  # of ComfyUI and of the web UI
_KEY = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SUFFIXES = (".safetensors", ".gguf")
UPSCALERS = (".safetensors", ".pth", ".pt")
"""The ends of names of files of upscalers and of tiny VAEs."""
CONTROLS = (*SUFFIXES, ".pth", ".pt", ".bin")
"""The ends of names of control networks' files, and of IP-Adapters'."""
ENDS: Mapping[str, tuple[str, ...]] = {"upscaler": UPSCALERS, "embedding": EMBEDDINGS, "control": CONTROLS}
"""The ends of names of files, where they are others than SUFFIXES."""
MAX_ENTRIES = 200_000  # files and folders that are searched for one name: half a second
MAX_DEPTH = 4


@dataclass(frozen=True, kw_only=True)
class ModelFolders:
    """The folders of each kind, in the order in which they are searched."""

    given: tuple[Path, ...]  # here a name counts from the folder itself, and no folder below is searched
    folders: Mapping[str, tuple[Path, ...]]
    wildcards: tuple[Path, ...] = ()  # folders of wildcards

    def locate(self, name: str, kind_: str) -> str:
        """Return `name`, or the path of the file or folder of that name, with its suffix or without. A path, a known
        model and the hub's cache come first. Raises ModelError for a file that is not found. A pickle is found too, if
        nothing else is: who opens it says what it is."""
        is_tiny = kind_ == "vae" and any(one.name == name.lower() for one in TINY_VAES)
        if not self.given or (not is_tiny and _is_elsewhere(name, kind_)):
            return name
        path = self.find(name, kind_) or next(self._candidates(name, kind_, PICKLES), None)
        if path is not None:
            return str(path)
        if _is_local(name):
            near = catalog.nearest(name) if kind_ == "model" else None
            suggestion = f"; did you mean {near}?" if near else ""
            raise ModelError(f"{clean(name, 60)}: no such file, and {self._searched(kind_)}{suggestion}")
        return name

    def find(self, name: str, kind_: str) -> Path | None:
        """Return the file or folder of that name, with its suffix or without, in the folders alone."""
        return next(self._candidates(name, kind_), None)

    def find_tiny_vae(self, name: str) -> Path | None:
        """Return the file or folder of the tiny VAE with this published name, or None."""
        places = self._candidates(name, "vae")
        return next((path for path in places if tiny_vae.is_tiny_at(path)), None) if self.given else None

    def of_any_kind(self, name: str) -> str:
        """Return `name`, or the path of a model, a part or a LoRA of that name, as `locate` does. Raises ModelError."""
        if not self.given or _is_elsewhere(name, "model"):
            return name
        found = (path for ends in ((), PICKLES) for kind_ in KINDS for path in self._candidates(name, kind_, ends))
        first = next(found, None)
        if first is None and _is_local(name):
            raise ModelError(f"{clean(name, 60)}: no such file, and {self._searched()}")
        return str(first or name)

    def _searched(self, kind_: str | None = None) -> str:
        """Return the kind of file that was searched for, and the folders, for an error message."""
        places = shown_path(self.given[0], 40) + (f" and {len(self.given) - 1} more" if self.given[1:] else "")
        folders = dict.fromkeys(folder for each in ([kind_] if kind_ else KINDS) for folder in self.folders[each])
        names = clean(", ".join(map(self._beside, folders)), 110)
        wanted = f"no folder {' or '.join(KINDS[kind_])}" if kind_ else "no folder of models"
        looked = f"looked in {names}" if names else f"it has {wanted}"
        return f"no {NOUNS[kind_] if kind_ else 'file'} of that name is in --models-dir {places}; {looked}"

    def _beside(self, folder: Path) -> str:
        """Return `folder` relative to the folder that was given, if it is inside."""
        root = next((root for root in self.given if folder.is_relative_to(root)), None)
        return clean(folder.relative_to(root), 40) if root else shown_path(folder, 40)

    def loras(self, loras: Sequence[Lora]) -> tuple[Lora, ...]:
        """Return `loras` with the paths of the files that are found. Raises ModelError."""
        return tuple(replace(one, source=self.locate(one.source, "lora")) for one in loras)

    def _candidates(self, name: str, kind_: str, ends: tuple[str, ...] = ()) -> Iterator[Path]:
        """Yield the files with the whole `name` in a folder, then those anywhere below one with its last part. ends: of
        the files' names; () for those that are read."""
        ends = ends or ENDS.get(kind_, SUFFIXES)
        spelled = [name, *(name + suffix for suffix in ends)]
        if kind_ == "vae":  # a tiny one, whose halves are in two files
            spelled += [f"{name}{end}{suffix}" for end in ("_decoder", "") for suffix in UPSCALERS]
        for folder in (*self.folders[kind_], *self.given):
            yield from (path for each in spelled if _is_model(path := folder / each, kind_, ends))
        if os.sep not in name:
            folders = (below for folder in self.folders[kind_] for below in folders_below(folder))
            yield from (path for folder in folders for each in spelled if _is_model(path := folder / each, kind_, ends))


def read_folders(given: Sequence[Path]) -> ModelFolders:
    """Return the model folders in `given`: folders, or files such as extra_model_paths.yaml. Raises UsageError for one
    that does not exist, and ModelError for a file of paths that cannot be read."""
    folders: dict[str, list[Path]] = {kind_: [] for kind_ in KINDS}
    wildcards: list[Path] = []
    paths = [absolute(Path(home(path))) for path in given]
    for path in paths:
        here = kind(path)
        if here not in ("file", "folder"):
            raise UsageError(f"--models-dir {shown_path(path)}: {'no such folder' if here is None else 'is no folder'}")
        roots = [path, path / "models"] if here == "folder" else []
        for kind_ in KINDS:
            names = [*KINDS[kind_], *WEBUI[kind_]]
            names += [f"{base}/{type}" for base in INVOKE_BASES for type in INVOKE_TYPES[kind_]]
            folders[kind_] += [root / name for root in roots for name in names]
        for keyed in (keyed for root in roots for keyed in _keyed(root)):
            for kind_ in KINDS.keys() - {"embedding"}:  # whose names are read as words of prompts
                folders[kind_].append(keyed)
        for program in [*roots, path.parent] if path.name == "models" else roots:
            wildcards += _of_wildcards(program)
            folders["embedding"].append(program / WEBUI["embedding"][0])
        for file in [path] if here == "file" else _lists(path):
            for name, more in comfy_paths.read_paths(file).items():
                wildcards += more if name == WILDCARDS[0] else []
                for kind_ in (kind_ for kind_, names in KINDS.items() if name in names):
                    folders[kind_] += more
    existing = {kind_: tuple(dict.fromkeys(filter(_is_there, places))) for kind_, places in folders.items()}
    return ModelFolders(
        given=tuple(paths), folders=existing, wildcards=tuple(dict.fromkeys(filter(_is_there, wildcards)))
    )


def _of_wildcards(program: Path) -> Iterator[Path]:
    """Yield the places where a program and its extensions may have wildcards."""
    places = [program, program / "scripts"]
    for folder in (program / name for name in _EXTENSIONS):
        try:
            with os.scandir(folder) as entries:
                places += sorted(folder / entry.name for entry in islice(entries, MAX_ENTRIES))
        except OSError:
            continue
    yield from (place / name for place in places for name in WILDCARDS)


def _lists(folder: Path) -> Iterable[Path]:
    places = [folder, folder.parent] if folder.name == "models" else [folder]
    return [place / comfy_paths.NAME for place in places if os.path.lexists(place / comfy_paths.NAME)]


def _is_there(folder: Path) -> bool:
    try:
        return is_folder(folder)
    except ModelError:  # no permission, or a link to itself
        return False


def _keyed(root: Path) -> list[Path]:
    """Return the folders in `root` that InvokeAI names by keys."""
    try:
        with os.scandir(root) as entries:
            return sorted(root / entry.name for entry in islice(entries, MAX_ENTRIES) if _KEY.fullmatch(entry.name))
    except OSError:
        return []


def _is_local(name: str) -> bool:
    """Return whether `name` can only be a file here: no hub id, and no name for `pull`."""
    local = name.lower().endswith((*SUFFIXES, *PICKLES)) or os.sep not in name
    return local and catalog.find_download(name) is None


def _is_elsewhere(name: str, kind_: str) -> bool:
    path = Path(home(name))
    known = kind_ == "model" and (catalog.find(name) is not None or catalog.refusal(name) is not None)
    return known or path.is_absolute() or os.path.lexists(path) or find_cached(name) is not None


def _is_tiny_vae(path: Path) -> bool:
    return path.suffix.lower() in UPSCALERS and tiny_vae.model_named(path) is not None


def _is_model(path: Path, kind_: str, ends: tuple[str, ...]) -> bool:
    """Return whether `path` is a file with one of these ends, or the folder of a whole model or a part."""
    try:
        if is_file(path):
            return path.name.lower().endswith(UPSCALERS if _is_tiny_vae(path) else ends)
        if not is_folder(path):
            return False
        if kind_ in PARTS or kind_ in ("control", "ip_encoder"):
            return is_file(path / "config.json")
        return kind_ == "model" and (has_index(path) or registry.foreign_folder(path) is not None)
    except ModelError:
        return False


def entries_below(root: Path) -> Iterator[Path]:
    """Yield the files and folders in `root` and in the folders below it, the nearest first, MAX_ENTRIES at most."""
    budget = MAX_ENTRIES
    for folder in chain([root], folders_below(root)):
        try:
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in islice(entries, budget))
        except OSError:  # no permission, or a link to itself
            continue
        yield from (folder / name for name in names)
        budget -= len(names)
        if not budget:
            return


def folders_below(root: Path) -> Iterator[Path]:
    """Yield the folders below `root`, each once, the nearest first: up to MAX_DEPTH, and until MAX_ENTRIES are read."""
    budget, level = MAX_ENTRIES, [root]
    seen: set[tuple[int, int]] = set()
    for _ in range(MAX_DEPTH - 1):
        deeper: list[Path] = []
        for folder in level:
            try:
                with os.scandir(folder) as entries:
                    names = []
                    for entry in islice(entries, budget):
                        budget -= 1
                        identity = _folder_identity(entry)
                        if identity is not None and identity not in seen:
                            seen.add(identity)
                            names.append(entry.name)
            except OSError:
                continue
            deeper += [folder / name for name in sorted(names)]
        yield from deeper
        level = deeper


def _folder_identity(entry: os.DirEntry[str]) -> tuple[int, int] | None:
    """Return device and inode of a folder that is searched, so that links back to it end; None for anything else."""
    try:
        if entry.name.startswith(".") or not entry.is_dir():
            return None
        status = entry.stat()
    except OSError:  # no permission, or a link to itself
        return None
    return status.st_dev, status.st_ino
