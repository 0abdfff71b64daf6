"""The weight files of one component: a single file, or shards and their index.

A folder in diffusers or transformers layout holds `<stem>.safetensors`, or shards named like
`<stem>-00001-of-00004.safetensors` with `<stem>.safetensors.index.json`. A variant (fp16) adds its name.
mflux calls its shards 0.safetensors, 1.safetensors, ...; its older versions wrote no index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, open_regular
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.formats.stored import Header

STEMS = ("diffusion_pytorch_model", "model")
_STEM = rf"(?:{'|'.join(STEMS)})"
PLAIN = re.compile(rf"{_STEM}\.safetensors(\.index\.json)?")
VARIANT = re.compile(rf"{_STEM}\.\w+\.safetensors(\.index\.json)?|{_STEM}\.safetensors\.index\.\w+\.json", re.ASCII)
SHARD = re.compile(rf"({_STEM}(?:\.\w+)?)-(?P<number>\d{{1,9}})-of-\d{{1,9}}\.safetensors", re.ASCII)
SHARD_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}\.safetensors")
_STORED = re.compile(r"[0-9a-f]{64}")
PICKLES = (".bin", ".ckpt", ".pt", ".pth")

NUMBERED = re.compile(r"(?P<number>\d{1,3})\.safetensors", re.ASCII)  # the shards of mflux

MAX_INDEX = 8 << 20  # bytes
MAX_KEYS = 100_000
MAX_SHARDS = 100  # all are held open, and macOS gives a process 256 descriptors


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The weight files to read; `weight_map` is {tensor: file name} of the index, if there is one."""

    files: tuple[Path, ...]
    index: Path | None = None
    weight_map: dict[str, str] = field(default_factory=dict)

    @property
    def source(self) -> Path:
        """The one file to name for a tensor that no file holds."""
        return self.index or self.files[0]


def find_files(folder: Path) -> WeightFiles:
    """Return the weight files in `folder`, or `folder` itself if it is a file. Raises ModelError.

    Plain names come before variants. Two candidates of the same rank are an error, never a guess.
    """
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except NotADirectoryError:
        return WeightFiles(files=(folder,))
    except FileNotFoundError:
        raise bad(folder, "does not exist: check the path or download the model") from None
    except (OSError, ValueError) as error:
        raise bad(folder, f"cannot be listed: {getattr(error, 'strerror', None) or error}") from None
    for pattern in (PLAIN, VARIANT):
        candidates = [name for name in names if pattern.fullmatch(name) and not _is_stale(folder / name, names)]
        if len(candidates) > 1:
            raise bad(folder, f"holds {_listed(candidates)}: keep the one to use and move the others away")
        if candidates:
            return _files_of(folder / candidates[0])
    if any(_is_stale(folder / name, names) for name in names if PLAIN.fullmatch(name)):
        return WeightFiles(files=tuple(folder / name for name in _all_shards(names)))
    if numbered := _numbered(folder, names):
        return WeightFiles(files=numbered)
    raise bad(folder, _why_nothing(names))


def _numbered(folder: Path, names: list[str]) -> tuple[Path, ...]:
    """Return shards numbered from 0, without an index. Raises ModelError if one between them is missing."""
    numbers = sorted(int(match["number"]) for name in names if (match := NUMBERED.fullmatch(name)))
    files = [f"{number}.safetensors" for number in range(len(numbers))]
    absent = next((file for file in files if file not in names), None)
    if absent is not None or len(files) > MAX_SHARDS:
        what = f"but not {absent}: download that file" if absent else f"of which {MAX_SHARDS} are read"
        raise bad(folder, f"holds {len(files)} numbered shards {what}")
    return tuple(folder / file for file in files)


def _is_stale(path: Path, names: list[str]) -> bool:
    """Return whether `path` is an index whose shards are all missing while other files hold the model: left over from a
    model that was saved again in fewer shards."""
    if path.suffix != ".json":
        return False
    try:
        listed = set(_read_weight_map(path).values())
    except ModelError:
        return False
    shards = all(SHARD.fullmatch(name) for name in listed) and listed.isdisjoint(names)
    one = path.name.removesuffix(".index.json")
    return bool(listed) and shards and (one in names or bool(_all_shards(names)))


def _all_shards(names: list[str]) -> list[str]:
    """Return every shard of the one model in the folder; nothing if a shard is missing."""
    matches = [match for name in names if (match := SHARD.fullmatch(name))]
    ends = {match[0].rpartition("-of-")[2] for match in matches}
    count = int(ends.pop().removesuffix(".safetensors")) if len(ends) == 1 else 0
    numbers = {int(match["number"]) for match in matches}
    whole = count == len(matches) <= MAX_SHARDS and numbers == set(range(1, count + 1))
    return [match[0] for match in matches] if whole and len({match[1] for match in matches}) == 1 else []


def _files_of(path: Path) -> WeightFiles:
    if path.suffix != ".json":
        return WeightFiles(files=(path,))
    weight_map = _read_weight_map(path)
    shards = sorted(set(weight_map.values()))
    if not 1 <= len(shards) <= MAX_SHARDS:
        raise bad(path, f"names {len(shards)} shards; 1 to {MAX_SHARDS} are allowed")
    for shard in shards:
        if not SHARD_NAME.fullmatch(shard):
            raise bad(path, f"names shard '{clean(shard, 80)}', which is not a plain file name *.safetensors")
        _check_inside(path.with_name(shard))
    return WeightFiles(files=tuple(path.with_name(shard) for shard in shards), index=path, weight_map=weight_map)


def _read_weight_map(path: Path) -> dict[str, str]:
    file = open_regular(path)
    try:
        if file.size > MAX_INDEX:
            raise bad(path, f"has {file.size} bytes; an index has at most {MAX_INDEX}")
        data = strict_json(file.read(0, file.size), path, depth=8, values=5 * MAX_KEYS)
    finally:
        file.close()
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict):
        raise bad(path, "is not an index of shards: it has no table weight_map; download it again")
    for key, shard in weight_map.items():
        if not isinstance(shard, str):
            raise bad(path, f"gives tensor '{clean(key, 80)}' the shard {clean(shard, 40)}, which is not a name")
    return weight_map


def check_index(files: WeightFiles, headers: list[Header]) -> None:
    """Check that every key of the index is in exactly the shard it names, and that no shard holds another. Raises
    ModelError."""
    if files.index is None:
        return
    weight_map = files.weight_map
    held = {header.file.path.name: header.tensors for header in headers}
    stale = [key for key, shard in weight_map.items() if key not in held[shard]]
    if stale:
        where = clean(weight_map[stale[0]], 60)
        raise bad(files.index, f"places tensor {first(stale)} in {where}, which does not hold it: download both again")
    for shard, tensors in held.items():
        stray = [key for key in tensors if weight_map.get(key) != shard]
        if stray:
            other = weight_map.get(stray[0])
            says = "is not in the index" if other is None else f"is also in {clean(other, 60)}"
            raise bad(files.index.with_name(shard), f"tensor {first(stray)} {says}: download shards and index")


def first(names: Iterable[str]) -> str:
    """Return the first of `names` in quotes, and the number of the others."""
    one, *others = names
    return f"'{clean(one, 80)}'" + (f" (and {len(others)} more)" if others else "")


def _check_inside(shard: Path) -> None:
    """Check that a shard is no link out of the model, since an index comes with the model.

    In the Hugging Face cache, models--org--name/snapshots/<commit>/ holds links to models--org--name/blobs/, whose
    files may be links to a store that all models of the cache share.
    """
    try:
        folder, target = shard.parent.resolve(strict=True), shard.resolve(strict=True)
    except (OSError, RuntimeError):
        return  # missing or circular: opening it says which
    allowed = [folder]
    for parent in folder.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            allowed.append(parent.with_name("blobs"))
            store = parent.parent.parent / "blobs"
            allowed += [store] if _STORED.fullmatch(target.name) and target.parent.parent == store else []
    if not any(target.is_relative_to(place) for place in allowed):
        raise bad(shard, "is a link to a file outside the model: copy the file there, or link the whole folder")


def _listed(names: list[str]) -> str:
    return ", ".join(clean(name, 50) for name in names[:3]) + (", ..." if len(names) > 3 else "")


def _why_nothing(names: list[str]) -> str:
    for name in names:
        if match := SHARD.fullmatch(name):
            return f"holds shards but not {match[1]}.safetensors.index.json: download that file"
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        expected = " or ".join(f"{stem}.safetensors" for stem in STEMS)
        return f"holds {_listed(others)}, but no {expected}: give the file's own path"
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        return (
            f"holds only {clean(pickles[0], 60)}: pickles are not read because they can run code; "
            "use the model's safetensors files or convert it"
        )
    return "holds no safetensors file: download the model again"
