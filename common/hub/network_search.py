"""Search for a control network or an upscaler on this machine by the user's name for it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path, PurePath

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import ModelError, NumericsError, UsageError
from qwenimg.common.base.hf_cache import cache_folder, find_cached, is_offline
from qwenimg.common.base.safe_files import is_file, is_folder, kind, open_regular
from qwenimg.common.base.text import by_name, clean
from qwenimg.common.families import catalog, registry
from qwenimg.common.formats.file_hash import hashed
from qwenimg.common.formats.stored import Header
from qwenimg.common.hub.model_folders import UPSCALERS, ModelFolders, entries_below
from qwenimg.common.jobs.foreign import NO_NAMES, Foreign, known_model
from qwenimg.common.measure import exactness
from qwenimg.common.parts.control_net import Encoders
from qwenimg.common.parts.downloads import Download
from qwenimg.common.parts.texts.embedding_file import MAX_BYTES, SUFFIXES
from qwenimg.common.request.control_text import options_text
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.runtime import Notify, Runtime
from qwenimg.common.upscaling.network_file import Upscaler, open_upscaler
from qwenimg.common.upscaling.upscaling import Upscaling, policy

WHERE = "such as RealESRGAN_x4plus.pth (67 MB, from github.com/xinntao/Real-ESRGAN/releases)"
MAX_HASHED = 500  # files of embeddings, which have some kB each
MAX_FP32_ERROR = 1e-5  # relative error of a product
KNOWN_CONTROLS: tuple[Download, ...] = (*catalog.CONTROLS, *catalog.ADAPTERS)
# By a word in the purpose of a known network: the words by which people call the kind of its pictures.
_KINDS = by_name({
    "pose": "openpose pose dwpose skeleton",
    "depth": "depth midas zoe depthmap zoedepth",
    "canny": "canny edge edges",
    "soft": "softedge soft hed pidi pidinet",
    "line": "lineart line lines mlsd",
    "drawing": "scribble sketch drawing",
    "normal": "normal normals normalmap normalbae",
    "segments": "seg segment segments segmentation",
    "tile": "tile",
    "mask": "inpaint inpainting mask fill",
    "face": "face faceid portrait",
    "prompt": "ipadapter adapter reference style",
})  # fmt: skip
# What stands before a picture: for every network the preprocessor, and the kind for a network of several kinds.
_MAKERS = {"canny": "canny", "drawing": "scribble"}
_UNION_KINDS = {"pose": "openpose", "soft": "softedge", "line": "lineart", "segments": "segment", "mask": "inpaint"}
_MOST_NAMED = 4  # networks in a message


def named_control(name: str) -> Path | None:
    """Return the folder or file of the control network that a recipe calls `name`, if the cache has it: a path in a
    recipe is never opened."""
    known = next((one for one in (*catalog.CONTROLS, *catalog.ADAPTERS) if name == one.name), None)
    return None if os.path.lexists(name) else find_cached(known.place if known else name)


def control_name(name: str, folders: ModelFolders | None) -> str:
    """Return by which name --control finds the network that another program's recipe calls `name`: that of a file in
    `folders`, or a known name; `name` itself if it is not here."""
    if not {"/", "\\"} & {*name} and folders is not None and folders.find(name, "control") is not None:
        return name
    plain = name.lower().removesuffix("_fp16")
    return next((one.name for one in KNOWN_CONTROLS if plain in (one.name, *_names_there(one))), name)


def needed_options(recipe: Foreign) -> list[str]:
    """Return the options to give with --from besides, to draw another program's recipe."""
    model = [] if recipe.model is not None and known_model(recipe.model) else ["-m MODEL"]
    pictures = ["-i PICTURE"] * recipe.picture + ["--mask MASK"] * recipe.mask
    controls = [replace(one, network=control_name(one.network, None)) for one in recipe.controls]
    return [*model, *pictures, *filter(None, [options_text(controls)])]


def _names_there(known: Download) -> tuple[str, ...]:
    """Return how the file of a known network is called elsewhere: like its repository, or by its own name."""
    stem = PurePath(known.files[0] if known.is_ip_adapter else known.files[-1]).stem.lower()
    return (known.repo.rpartition("/")[2].lower(), *(() if stem in NO_NAMES else (stem,)))


def find_control(
    name: str, folders: ModelFolders, fitting: Callable[[], Sequence[Download]] = lambda: KNOWN_CONTROLS
) -> Path:
    """Return the folder or file of the control network `name`: a path, a known name, a hub id or a file of one in the
    cache, or a name in the folders of --models-dir. fitting: returns the known networks for the model, which the
    message about another name lists. Raises ModelError."""
    path = Path(home(name))
    if os.path.lexists(path) or kind(path) is not None:
        return path
    lower = name.lower()
    known = next(
        (one for one in KNOWN_CONTROLS if lower == one.name or (one.is_alone and lower == one.repo.lower())), None
    )
    if (cached := find_cached(known.place if known else name)) is not None:
        return cached
    if (known is None or known.is_ip_adapter) and (place := folders.locate(name, "control")) != name:
        return Path(place)
    shown = clean(name, 80)
    if known is None and name.startswith((".", "~", os.sep)):
        raise ModelError(f"--control {shown}: no such file or folder")
    if known is None and "/" not in name:
        raise ModelError(f"--control {shown}: no such file or folder; {_meant(lower, fitting())}")
    size = f" ({size_text(known.bytes)}, {known.license})" if known else ""
    when = " with the network on" if is_offline() else ""
    where = clean(cache_folder(), 80)
    absent = "is not" if known else "no such file or folder, and not"
    raise ModelError(f"--control {shown}: {absent} in the cache {where}; get it{size}{when} by: qwenimg pull {shown}")


def _meant(name: str, fitting: Sequence[Download]) -> str:
    """Return the known networks that `name` may mean, a kind of picture or a misspelled name, and how to give them."""
    kinds = [_KINDS[word] for word in re.split(r"[^a-z]+", name) if word in _KINDS]
    if not kinds:
        if near := get_close_matches(name, [one.name for one in fitting], n=1, cutoff=0.75):
            return f"did you mean {near[0]}? All names: qwenimg models"
        names = ", ".join(one.name for one in fitting[:_MOST_NAMED])
        return f"known by name are {names}{' and others' * (len(fitting) > _MOST_NAMED)}: qwenimg models"
    found = [one for one in fitting if re.search(rf"\b{kinds[-1]}", f"{one.name} {one.purpose}")]
    if not found:
        return "no network for such pictures is known for this model; all that are: qwenimg models"
    here = next((one for one in found if find_cached(one.place)), None)
    first = here or found[0]
    pull = "" if here else f", after: qwenimg pull {first.name} ({size_text(first.bytes)})"
    return f"give {_use(first, kinds[-1])}{pull}"


def _use(one: Download, kind: str) -> str:
    """Return how a known network is given for a `kind` of picture."""
    if one.is_ip_adapter:
        return f"--ip-adapter {one.name} --ip-image PICTURE"
    several = _UNION_KINDS.get(kind, kind) if "KIND@" in one.purpose else ""
    before = _MAKERS.get(kind, several)
    return f"--control {one.name}={before}{'@' * bool(before)}PICTURE"


def find_encoders(adapter: Path, model: Path, folders: ModelFolders, given: Path | None) -> Encoders:
    """Return the image encoders that the IP-Adapter in the file `adapter` may take: the one that is `given`, or those
    beside the adapter, in the folder of the model, and in the folders of --models-dir. Raises ModelError."""
    if given is not None:
        return Encoders(paths=[Path(folders.locate(str(given), "ip_encoder"))], given=True)
    here = adapter.absolute().parent
    near = [here / "image_encoder", *(here.parent / name / "image_encoder" for name in ("", "models", "sdxl_models"))]
    found = [path for path in (*near, model / "image_encoder") if is_folder(path)]
    below = (path for folder in folders.folders["ip_encoder"] for path in entries_below(folder))
    return Encoders(paths=chain(dict.fromkeys(found), filter(_is_encoder, below)), given=False)


def _is_encoder(path: Path) -> bool:
    try:
        return path.suffix.lower() == ".safetensors" and is_file(path)
    except ModelError:  # no permission, or a link to itself
        return False


# Embeddings


def find_embedding(name: str, folders: ModelFolders) -> Path:
    """Return the file of the embedding `name`: a path, a folder with one, a hub id or a file of one in the cache, or a
    name in the folders of --models-dir. Raises ModelError."""
    path = Path(home(name))
    found = path if os.path.lexists(path) or kind(path) is not None else find_cached(name)
    if found is None:
        if (place := folders.locate(name, "embedding")) == name:
            raise ModelError(f"--embedding {clean(name, 80)}: no such file; give that of an embedding")
        return Path(place)
    if kind(found) != "folder":
        return found
    files = sorted(one for one in found.iterdir() if one.name.lower().endswith(SUFFIXES))
    if len(files) != 1:
        raise ModelError(f"--embedding {clean(name, 80)}: holds {len(files)} files of weights; name the one to use")
    return files[0]


def embeddings(folders: ModelFolders) -> dict[str, Path]:
    """Return the files in the folders of embeddings by their names without suffixes, the first of each name; what each
    is has not been looked at."""
    files: dict[str, Path] = {}
    for folder in folders.folders["embedding"]:
        for path in entries_below(folder):
            if path.name.lower().endswith(SUFFIXES) and not {*";="} & {*path.stem}:
                files.setdefault(path.stem, path)
    return files


def embeddings_by_content(folders: ModelFolders, wanted: Mapping[str, str]) -> dict[str, Path]:
    """Return the files of the embeddings in `wanted`, {name: the hash of its file, or the start of it}, by name. Files
    with the name are read first, MAX_HASHED in all."""
    every, found = embeddings(folders), dict[str, Path]()
    for name, digits in wanted.items():
        files = sorted(every, key=lambda stem: stem.lower() != name.lower())[:MAX_HASHED]
        path = next((every[stem] for stem in files if (_hash_of(every[stem]) or "").startswith(digits)), None)
        if path is not None and not {*"=;"} & {*name}:
            found[name] = path
    return found


def _hash_of(path: Path) -> str | None:
    try:
        with closing(open_regular(path)) as file:
            return hashed(file) if file.size <= MAX_BYTES else None
    except (ModelError, OSError):
        return None


# Upscalers


def find_upscaler(name: str | None, folders: ModelFolders, option: str = "--with") -> Path:
    """Return the file of the upscaler `name`: a path, or a name in the folders of --models-dir; without a name the only
    one that is there. option: the one that names it, for messages. Raises UsageError and ModelError."""
    if name is not None:
        path = Path(home(name))
        if os.path.lexists(path) or kind(path) is not None:
            return path
        if (place := folders.locate(name, "upscaler")) != name:
            return Path(place)
        raise ModelError(f"{clean(name, 80)}: no such file; give that of an upscaler, {WHERE}")
    here = upscalers(folders)
    if len(here) == 1:
        return here[0]
    if not here:
        looked = "; none is in the folders of --models-dir" if folders.given else ""
        raise UsageError(f"no upscaler: give one as {option} FILE, {WHERE}{looked}")
    names = ", ".join(clean(path.stem, 40) for path in here[:4]) + (", ..." if len(here) > 4 else "")
    raise UsageError(f"{len(here)} upscalers are in the folders of --models-dir: choose one as {option} NAME: {names}")


def upscalers(folders: ModelFolders) -> list[Path]:
    """Return the files of upscalers in their folders, by name; what each is has not been looked at."""
    paths = (path for folder in folders.folders["upscaler"] for path in entries_below(folder))
    files = {path for path in paths if path.name.lower().endswith(UPSCALERS) and kind(path) == "file"}
    return sorted(files, key=lambda path: (path.stem.lower(), path))


def upscaler_named(name: str, folders: ModelFolders) -> Path | None:
    """Return the file of the upscaler that a recipe calls `name`, with its suffix or without, or None."""
    return next((path for path in upscalers(folders) if path.stem in (name, PurePath(name).stem)), None)


def read_upscaler(path: Path) -> Upscaler:
    """Open the upscaler in the file `path`; no weight is read. Raises ModelError that says what another file is."""
    return open_upscaler(path, _kind)


def _kind(header: Header) -> str | None:
    told = None if header.format == "PyTorch" else registry.identify(header)
    return None if told is None else f"{told.title} ({told.flag})"


def upscaling(upscaler: Upscaler, engine: Engine, precision: str, limit: int | None, notify: Notify) -> Upscaling:
    """Return `upscaler` on an engine, in `precision` (fp32, bf16 or fp16), with at most `limit` bytes of memory. Raises
    NumericsError where the device does not compute in float32."""
    if precision == "fp32" and (error := exactness.float32_error(engine)) > MAX_FP32_ERROR:
        raise NumericsError(
            f"float32 products on {engine.device} are off by {error:.1e}: a mode such as TF32 is on; use --precision "
            "fp16, or unset MLX_ENABLE_TF32"
        )
    return Upscaling(Runtime(engine, policy(precision), notify, max_memory=limit), upscaler)
