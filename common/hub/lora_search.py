"""The LoRAs of a recipe among another program's: a recipe has their names and fingerprints, and no paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import open_regular
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.hub.model_folders import KINDS, ModelFolders, _below
from qwenimg.common.request import lora_text
from qwenimg.common.request.loras import in_cache

MAX_FILES = 2_000  # of which the fingerprint is made: 200 kB of each are read


def located(folders: ModelFolders, recorded: str, prints: Sequence[str]) -> tuple[str, list[str]]:
    """Return a request's `lora` for the LoRAs that a recipe has `recorded` with their fingerprints, and where each is;
    a hub id that is in the cache stays. Raises UsageError for one that is nowhere."""
    asked = lora_text.parse(recorded)
    if len(asked) != len(prints):
        raise UsageError(f"--from: that picture's recipe has {len(asked)} LoRAs and {len(prints)} hashes; give --lora")
    cached = {one.name for one in asked if in_cache(one.name)}
    wanted = {mark: one.name for one, mark in zip(asked, prints, strict=True) if one.name not in cached}
    found, looked_at = find(folders, wanted)
    if missing := [name for mark, name in wanted.items() if mark not in found]:
        shown = ", ".join(clean(name, 60) for name in missing)
        among = f"it is none of the {looked_at:,} files in {KINDS['lora'][0]} of --models-dir, by their content"
        raise UsageError(f"--from: that picture was made with --lora ({shown}); {among}: give the same")
    pairs = zip(asked, prints, strict=True)
    text = "; ".join(f"{found.get(mark, one.name)}:{one.strength!r}" for one, mark in pairs)
    at = [f"--from: LoRA {clean(name, 60)} is {shown_path(found[mark], 100)}" for mark, name in wanted.items()]
    return text, [f"{line}, by its content ({looked_at:,} files looked at)" for line in at]


def find(folders: ModelFolders, wanted: Mapping[str, str]) -> tuple[dict[str, Path], int]:
    """Return the file of each fingerprint in `wanted`, {fingerprint: recorded name}, that is in the folders of LoRAs,
    and how many files were looked at: those of a recorded name first."""
    names, found, looked_at = set(wanted.values()), dict[str, Path](), 0
    files = list(dict.fromkeys(_files(folders)))
    for path in sorted(files, key=lambda path: path.name not in names)[:MAX_FILES]:
        if len(found) == len(wanted):
            break
        looked_at += 1
        mark = _fingerprint(path)
        if mark is not None and mark in wanted and mark not in found:
            found[mark] = path
    return found, looked_at


def _files(folders: ModelFolders) -> Iterator[Path]:
    """Every file that may be a LoRA: in the folders of LoRAs and below, and in a folder that was given itself."""
    for root in folders.folders["lora"]:
        yield from filter(_may_be_lora, _below(root))
    for root in folders.given:
        yield from filter(_may_be_lora, sorted(root.glob("*.safetensors")))


def _may_be_lora(path: Path) -> bool:
    return path.suffix.lower() == ".safetensors" and ";" not in str(path)  # which would part two LoRAs


def _fingerprint(path: Path) -> str | None:
    try:
        with closing(open_regular(path)) as file:
            return fingerprint([file])
    except (ModelError, OSError):
        return None
