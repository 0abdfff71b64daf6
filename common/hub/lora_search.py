"""Search for the LoRAs of a recipe, which has their names and fingerprints, among other programs' files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import open_regular
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.formats.file_hash import data_sha256, sha256
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.hub.model_folders import KINDS, ModelFolders, entries_below
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.loras import in_cache

MAX_FILES = 2_000  # files whose fingerprint is computed: 200 kB of each are read


def located(folders: ModelFolders, loras: Sequence[Lora], prints: Sequence[str]) -> tuple[tuple[Lora, ...], list[str]]:
    """Return the LoRAs of a recipe with the path of each, found by its fingerprint, and a line for each. A hub id that
    is in the cache stays. Raises UsageError for a LoRA that is not found."""
    if len(loras) != len(prints):
        raise UsageError(f"--from: that picture's recipe has {len(loras)} LoRAs and {len(prints)} hashes; give --lora")
    pairs = list(zip(loras, prints, strict=True))
    wanted = {mark: one.source for one, mark in pairs if not in_cache(one.source)}
    paths, read = find(folders, wanted)
    if missing := [name for mark, name in wanted.items() if mark not in paths]:
        shown = ", ".join(clean(name, 60) for name in missing)
        among = f"it is none of the {read:,} files in {KINDS['lora'][0]} of --models-dir, by their content"
        raise UsageError(f"--from: that picture was made with --lora ({shown}); {among}: give the same")
    loras = tuple(replace(one, source=str(paths.get(mark, one.source))) for one, mark in pairs)
    lines = [f"--from: LoRA {clean(name, 60)} is {shown_path(paths[mark], 100)}" for mark, name in wanted.items()]
    return loras, [f"{line}, by its content ({read:,} files looked at)" for line in lines]


@dataclass(frozen=True, kw_only=True)
class Named:
    """The LoRAs of another program's recipe that are here, and a line for each that is not, or is another file."""

    loras: tuple[Lora, ...]
    lines: tuple[str, ...]


def by_name(folders: ModelFolders | None, loras: Sequence[Lora], starts: Sequence[str]) -> Named:
    """Search for LoRAs by the names of their files. starts: of the hash of the data of each, or ""."""
    found, lines, missing = list[Lora](), list[str](), list[str]()
    for one, start in zip(loras, starts, strict=True):
        if in_cache(one.source):
            found.append(one)
            continue
        plain = folders is not None and not {"/", "\\", "\0"} & {*one.source}
        path = folders.find(one.source, "lora") if plain and folders is not None else None
        if path is None or ";" in str(path):
            missing.append(clean(one, 60))
            continue
        found.append(replace(one, source=str(path)))
        if start and not _has_hash(path, start):
            lines.append(f"LoRA {shown_path(path, 100)} has that name, and other data than the picture's ({start})")
    if missing:
        lines.append(f"not here, and left out unless given by --lora: {', '.join(missing)}")
    return Named(loras=tuple(found), lines=tuple(lines))


def _has_hash(path: Path, start: str) -> bool:
    """Return whether the data of a file, or the whole file, has a hash that begins with `start`."""
    try:
        with closing(open_regular(path)) as file:
            return data_sha256(file).startswith(start) or sha256(file).startswith(start)
    except (ModelError, OSError):
        return False


def find(folders: ModelFolders, wanted: Mapping[str, str]) -> tuple[dict[str, Path], int]:
    """Return the files in the folders of LoRAs with the fingerprints in `wanted`, {fingerprint: recorded name}, by
    fingerprint, and how many files were read. Files with a recorded name are read first."""
    names, paths, read = set(wanted.values()), dict[str, Path](), 0
    files = list(dict.fromkeys(_files(folders)))
    for path in sorted(files, key=lambda path: path.name not in names)[:MAX_FILES]:
        if len(paths) == len(wanted):
            break
        read += 1
        mark = _fingerprint(path)
        if mark is not None and mark in wanted and mark not in paths:
            paths[mark] = path
    return paths, read


def _files(folders: ModelFolders) -> Iterator[Path]:
    """Yield every file that may be a LoRA: in the folders of LoRAs and below, and in a folder that was given itself."""
    for root in folders.folders["lora"]:
        yield from filter(_may_be_lora, entries_below(root))
    for root in folders.given:
        yield from filter(_may_be_lora, sorted(root.glob("*.safetensors")))


def _may_be_lora(path: Path) -> bool:
    return path.suffix.lower() == ".safetensors" and ";" not in str(path)  # a `;` separates two LoRAs


def _fingerprint(path: Path) -> str | None:
    try:
        with closing(open_regular(path)) as file:
            return fingerprint([file])
    except (ModelError, OSError):
        return None
