"""The LoRAs that requests ask for: found, opened once, held against the model, and kept for later pictures."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import REPO, cache_folder, snapshots, storage_folder
from qwenimg.common.base.safe_files import bad, is_folder, kind
from qwenimg.common.base.text import clean
from qwenimg.common.formats.file_hash import data_sha256
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.request import lora_text
from qwenimg.common.request.lora_text import Asked
from qwenimg.common.weights import lora as files
from qwenimg.common.weights.lora import Deltas, LoraFile
from qwenimg.common.weights.lora_names import Names
from qwenimg.common.weights.peft_config import ADAPTER
from qwenimg.common.weights.plan import Mode

KEPT = 2 * lora_text.MOST  # files
_HUB = re.compile(rf"(?P<repo>{REPO})(?P<file>(?:/[\w.-]+)*)", re.ASCII)


def find_file(name: str) -> Path:
    """The file that `name` stands for: a path, else `owner/name` or `owner/name/file` in the cache. Raises
    ModelError."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111 (Path.expanduser raises for a user who does not exist)
    if os.path.lexists(path) or kind(path) is not None:
        return _inside(path) if is_folder(path) else path
    match = _HUB.fullmatch(name)
    if match is None:
        raise bad(path, "no such LoRA file; give a safetensors file, or owner/name[/file] of the Hugging Face cache")
    inside = match["file"].removeprefix("/")
    found = snapshots(storage_folder(match["repo"]))
    if not found:
        shown, where = clean(name, 100), clean(cache_folder(), 80)
        raise ModelError(f"{shown}: no such file, and not in the cache {where}; get it by: qwenimg pull {shown}")
    if not inside:
        return _inside(found[0])
    there = [folder / inside for folder in found if os.path.lexists(folder / inside)]
    if not there:
        raise ModelError(f"{clean(name, 120)}: is not in the cache; get it by: qwenimg pull {clean(name, 120)}")
    return there[0]


def _inside(folder: Path) -> Path:
    """The LoRA of a folder: what PEFT saved there, or its only safetensors file. Raises ModelError."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".safetensors"))
    if ADAPTER in names or len(names) == 1:
        return folder / (ADAPTER if ADAPTER in names else names[0])
    shown = ", ".join(clean(one, 60) for one in names[:4])
    raise bad(folder, f"holds {f'several LoRA files ({shown}); name one' if names else 'no safetensors file'}")


@dataclass(kw_only=True, eq=False)
class _Opened:
    """A file that is held against the model, at any strength that was asked for."""

    file: LoraFile
    deltas: Deltas
    print: str
    at: dict[tuple[float, str], Deltas] = field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """The hash of the file behind its header."""
        return data_sha256(self.file.file)

    def with_strength(self, strength: float, mode: Mode) -> Deltas:
        if (strength, mode) not in self.at:
            self.at[strength, mode] = files.strengthened(self.deltas, strength, mode)
        return self.at[strength, mode]


Key: TypeAlias = "tuple[tuple[_Opened, float, str], ...]"


class Loras:
    """Those of one model, whose layers have `names`."""

    def __init__(self, names: Names):
        self.names = names
        self._opened: dict[str, _Opened] = {}  # by what was asked for, the last used last

    def deltas(self, text: str, mode: str = "auto") -> Deltas:
        """What a request's `lora` adds to the model, and its `lora_mode` where. Raises ModelError and UsageError; reads
        headers and alphas."""
        chosen = lora_text.mode(mode)
        return files.joined([self._open(one).with_strength(one.strength, chosen) for one in lora_text.parse(text)])

    def key(self, text: str, mode: str = "auto") -> Key:
        """What tells the LoRAs of one request from those of another: files as they are now, strengths, and where."""
        return tuple((self._open(one), one.strength, mode) for one in lora_text.parse(text) if one.strength)

    def lines(self, text: str) -> list[str]:
        """Return a line for each LoRA: how many of its modules are in use. All are, since `deltas` refuses others."""
        found = [(one, len(self._open(one).file.modules)) for one in lora_text.parse(text) if one.strength]
        return [f"LoRA {label(one.name)}: {n} of {n} modules at strength {one.strength:g}" for one, n in found]

    def recorded(self, text: str) -> dict[str, object]:
        """For a recipe: names without folders, and the fingerprints of the files."""
        asked = lora_text.parse(text)
        if not asked:
            return {}
        named = (f"{label(one.name)}:{one.strength:g}" for one in asked)
        return {"lora": "; ".join(named), "lora_fingerprints": [self._open(one).print for one in asked]}

    def hashes(self, text: str) -> dict[str, object]:
        """Return the entry of a recipe by which other programs find the files; reads them once."""
        found = [self._open(one).sha256 for one in lora_text.parse(text)]
        return {"lora_sha256": found} if found else {}

    def close(self) -> None:
        for one in self._opened.values():
            one.file.close()
        self._opened.clear()

    def _open(self, asked: Asked) -> _Opened:
        path = find_file(asked.name)
        found = self._opened.pop(asked.name, None)
        if found is None or found.file.file.path != path or _changed(found.file):
            found = self._read(path)
        self._opened[asked.name] = found
        while len(self._opened) > KEPT:  # not closed here: weights that are loaded may be read from it again
            del self._opened[next(iter(self._opened))]
        return found

    def _read(self, path: Path) -> _Opened:
        opened = files.read_lora(path)
        try:
            return _Opened(file=opened, deltas=files.fit(opened, self.names), print=fingerprint([opened.file]))
        except BaseException:
            opened.close()
            raise


def in_cache(text: str) -> bool:
    """Whether each LoRA that a picture's recipe names is a hub id, whose file the cache has: no path is opened."""
    names = [asked.name for asked in lora_text.parse(text)]
    if not all(_HUB.fullmatch(name) and not os.path.lexists(name) for name in names):
        return False
    try:
        return all(kind(find_file(name)) == "file" for name in names)
    except ModelError:
        return False


def label(name: str) -> str:
    """What a recipe calls the LoRA `name`: a hub id as it is, of a path the last name."""
    return name if _HUB.fullmatch(name) and not os.path.lexists(name) else clean(Path(name).name, 100)


def _changed(opened: LoraFile) -> bool:
    """Whether another file has its name now."""
    try:
        status = opened.file.path.stat()
    except OSError:
        return True
    return (status.st_ino, status.st_size, status.st_mtime_ns) != opened.file.identity
