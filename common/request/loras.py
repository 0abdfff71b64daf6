"""The LoRAs of requests: found, opened once, matched with the model, and kept for later images."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.hf_cache import REPO, cache_folder, snapshots, storage_folder
from qwenimg.common.base.latest import drop_oldest
from qwenimg.common.base.safe_files import bad, closed_on_error, is_folder, kind
from qwenimg.common.base.text import clean
from qwenimg.common.formats.file_hash import data_sha256
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.request import lora_text
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.weights.loras import lora as files
from qwenimg.common.weights.loras.lora import Deltas, LoraFile
from qwenimg.common.weights.loras.lora_names import Names
from qwenimg.common.weights.loras.peft_config import ADAPTER
from qwenimg.common.weights.plan import Mode

KEPT = 2 * lora_text.MOST  # files
_HUB = re.compile(rf"(?P<repo>{REPO})(?P<file>(?:/[\w.-]+)*)", re.ASCII)


def find_file(name: str) -> Path:
    """Find the file of `name`: a path, else `owner/name` or `owner/name/file` in the cache. Raises ModelError."""
    path = Path(home(name))
    if os.path.lexists(path) or kind(path) is not None:
        return _inside(path) if is_folder(path) else path
    match = _HUB.fullmatch(name)
    if match is None:
        raise bad(path, "no such LoRA file; give a safetensors file, or owner/name[/file] of the Hugging Face cache")
    inside = match["file"].removeprefix("/")
    folders = snapshots(storage_folder(match["repo"]))
    if not folders:
        shown, where = clean(name, 100), clean(cache_folder(), 80)
        raise ModelError(f"{shown}: no such file, and not in the cache {where}; get it by: qwenimg pull {shown}")
    if not inside:
        return _inside(folders[0])
    paths = [folder / inside for folder in folders if os.path.lexists(folder / inside)]
    if not paths:
        raise ModelError(f"{clean(name, 120)}: is not in the cache; get it by: qwenimg pull {clean(name, 120)}")
    return paths[0]


def _inside(folder: Path) -> Path:
    """Return the LoRA in a folder: PEFT's file, or the only safetensors file."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".safetensors"))
    if ADAPTER in names or len(names) == 1:
        return folder / (ADAPTER if ADAPTER in names else names[0])
    shown = ", ".join(clean(one, 60) for one in names[:4])
    raise bad(folder, f"holds {f'several LoRA files ({shown}); name one' if names else 'no safetensors file'}")


@dataclass(kw_only=True, eq=False)
class _Opened:
    """An open LoRA file that matches the model, with its deltas at every strength requested so far."""

    file: LoraFile
    deltas: Deltas
    sees_picture: bool  # with it the model has the inputs of a control picture
    print: str
    at: dict[tuple[float, str], Deltas] = field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """The hash of the file without its header."""
        return data_sha256(self.file.file)

    def with_strength(self, strength: float, mode: Mode) -> Deltas:
        if (strength, mode) not in self.at:
            self.at[strength, mode] = files.strengthened(self.deltas, strength, mode)
        return self.at[strength, mode]


Key: TypeAlias = "tuple[tuple[_Opened, float, str], ...]"


class Loras:
    """The LoRAs of one model. `names` returns the names of its layers; it is called only when a LoRA is used, since
    there are many."""

    def __init__(self, names: Callable[[], Names]):
        self._names = names
        self._opened: dict[str, _Opened] = {}  # by their names in requests, the last used last

    @property
    def names(self) -> Names:
        """The names of the layers that LoRAs may change."""
        return self._names()

    def deltas(self, loras: Sequence[Lora], mode: str = "auto") -> Deltas:
        """Return the changes to the model by LoRAs. Only headers and alphas are read. Raises ModelError and
        UsageError."""
        chosen = lora_text.mode(mode)
        return files.joined([self._open(one).with_strength(one.scale, chosen) for one in loras])

    def check(self, loras: Sequence[Lora]) -> None:
        """Raise UsageError for a LoRA of --lora that needs a control picture. Raises ModelError too."""
        for one in loras:
            if self._open(one).sees_picture:
                shown = clean(Path(one.source).name, 60)
                raise UsageError(f"--lora {shown} sees a control picture: give it as --control {shown}=PICTURE")

    def key(self, loras: Sequence[Lora], mode: str = "auto") -> Key:
        """Return an identity of LoRAs: the files in their present state, strengths, and mode."""
        return tuple((self._open(one), one.scale, mode) for one in loras if one.scale)

    def lines(self, loras: Sequence[Lora]) -> list[str]:
        """Return a line for each LoRA with its number of modules, and how many change nothing."""
        opened = ((one, self._open(one).file) for one in loras if one.scale)
        return [
            f"LoRA {label(one.source)}: {files.counts(file, self.names)} at strength {one.scale:g}"
            for one, file in opened
        ]

    def recorded(self, loras: Sequence[Lora]) -> dict[str, object]:
        """Return the entries of a recipe: names without folders, and the fingerprints of the files."""
        if not loras:
            return {}
        named = (f"{label(one.source)}:{one.scale:g}" for one in loras)
        return {"lora": "; ".join(named), "lora_fingerprints": [self._open(one).print for one in loras]}

    def hashes(self, loras: Sequence[Lora]) -> dict[str, object]:
        """Return the entry of a recipe by which other programs find the files. Each file is read once."""
        hashes = [self._open(one).sha256 for one in loras]
        return {"lora_sha256": hashes} if hashes else {}

    def close(self) -> None:
        for one in self._opened.values():
            one.file.close()
        self._opened.clear()

    def _open(self, lora: Lora) -> _Opened:
        path = find_file(lora.source)
        opened = self._opened.pop(lora.source, None)
        if opened is None or opened.file.file.path != path or opened.file.file.is_replaced():
            opened = self._read(path)
        self._opened[lora.source] = opened
        drop_oldest(self._opened, KEPT)  # not closed here: weights that are loaded may be read from it again
        return opened

    def _read(self, path: Path) -> _Opened:
        opened = files.read_lora(path)
        with closed_on_error(opened):
            deltas = files.fit(opened, self.names)
            sees = files.widened(deltas, self.names)
            return _Opened(file=opened, deltas=deltas, sees_picture=sees, print=fingerprint([opened.file]))


def in_cache(source: str) -> bool:
    """Return whether `source` is a hub id with its file in the cache. Opens no path."""
    if not _HUB.fullmatch(source) or os.path.lexists(source):
        return False
    try:
        return kind(find_file(source)) == "file"
    except ModelError:
        return False


def label(name: str) -> str:
    """Return a recipe's name for the LoRA `name`: a hub id unchanged, or the last name of a path."""
    return name if _HUB.fullmatch(name) and not os.path.lexists(name) else clean(Path(name).name, 100)
