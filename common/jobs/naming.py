"""Names of the images' files."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from qwenimg.common.base.arguments import home
from qwenimg.common.base.atomic_files import PICTURES
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.pictures.layer_files import FIELD as LAYER

FIELDS = ("seed", "index", "prompt", "date", "layer")
# Fields of other programs: ComfyUI's %date:...%, strftime's %Y-%m-%d, C's and Python's widths, A1111's [seed].
_OTHERS = re.compile(
    r"%(?P<percent>[A-Za-z]\w+)(?:[:.][^%/]*)?%|(?P<time>%[YmdHMS](?:[-_.:]?%[YmdHMS])+)|%\d*[di](?![A-Za-z])"
    r"|\{(?P<braced>seed|index|prompt|date)?[:!][^{}]*\}"
    r"|\[(?P<bracketed>seed|prompt|date|batch_number|generation_number)(?:[<_][^\]/]*)?\]"
)
_WINDOWS_DEVICE = re.compile(r"con|prn|aux|nul|(com|lpt)[0-9]")


def output_path(
    pattern: str | None, *, seed: int, index: int, prompt: str, now: datetime, several: bool, same_seeds: bool
) -> Path:
    """Return the path of one image by `pattern`, the value of `-o`. `index` counts from 1.

    None gives `qwenimg-<date>-<time>-s<seed>.png` in the working folder; a folder, or a name with a slash at its end,
    the same in there. Any other value is a file name in which {seed} {index} {prompt} {date} are filled in, with .png
    if it has no suffix; {layer} stays until the number of layers is known. With `several` images, `-<index>` goes
    before the suffix of a name with neither {seed} nor {index}; the default name gets it only if the run has the
    `same_seeds` more than once.

    Raises UsageError for an unknown field, one of another program, a stray brace, a control character, a suffix that is
    none of PICTURES, and a device or pipe."""
    assert index >= 1, index
    date = now.strftime("%Y%m%d-%H%M%S")
    fields = {"seed": str(seed), "index": str(index), "prompt": slug(prompt), "date": date, "layer": LAYER}
    name = "./" if pattern is None else _filled(home(pattern), fields)
    if name.endswith("/") or os.path.isdir(name):  # noqa: PTH112 (Path.is_dir raises for a name that is too long)
        name = os.path.join(name, f"qwenimg-{date}-s{seed}")  # noqa: PTH118
        numbered = same_seeds
    elif os.path.exists(name) and not os.path.isfile(name):  # noqa: PTH110, PTH113 (as above)
        raise UsageError(f"-o {clean(name, 120)}: is neither a file nor a folder to write into; choose another, or -")
    else:
        numbered = several and "{seed}" not in (pattern or "") and "{index}" not in (pattern or "")
    path = Path(name)
    if path.suffix.lower() not in ("", *PICTURES):
        raise UsageError(f"-o {clean(name, 120)}: let the name end in one of {' '.join(PICTURES)}")
    stem, suffix = (path.stem, path.suffix) if path.suffix else (path.name, ".png")
    return path.with_name(f"{stem}-{index}{suffix}" if numbered else f"{stem}{suffix}")


def _filled(pattern: str, fields: dict[str, str]) -> str:
    if not pattern:
        raise UsageError("-o: the name is empty")
    if any(unicodedata.category(c) == "Cc" for c in pattern):
        raise UsageError(f"-o {clean(pattern, 120)}: a name has no line break or other control character")
    known = " ".join(f"{{{field}}}" for field in FIELDS)
    ours = _OTHERS.sub(_ours, pattern)
    if ours != pattern:
        raise UsageError(f"-o {clean(pattern, 120)}: what is filled in is {known}, as -o '{clean(ours, 120)}'")
    parts = re.split(r"\{([^{}]*)\}", pattern)  # text, field, text, field, ..., text
    if any(c in text for text in parts[::2] for c in "{}") or any(field not in fields for field in parts[1::2]):
        raise UsageError(f"-o {clean(pattern, 120)}: braces hold one of {known} and nothing else")
    return "".join(fields[part] if i % 2 else part for i, part in enumerate(parts))


def _ours(other: re.Match[str]) -> str:
    """Return our field for one of another program."""
    name = other["braced"] or other["percent"] or other["bracketed"] or ("date" if other["time"] else "")
    return next((f"{{{field}}}" for field in FIELDS if name.lower().startswith(field)), "{index}")


def check_distinct(paths: Sequence[Path]) -> None:
    """Raise UsageError if two images would have the same name."""
    seen: set[Path] = set()
    for path in paths:
        if path in seen:
            raise UsageError(f"{shown_path(path)}: more than one picture would have this name; put {{index}} in -o")
        seen.add(path)


# From prompts


def slug(text: str, limit: int = 80) -> str:
    """Return a prompt as a part of a file name: letters and digits of every script, in lower case and NFC, words joined
    by hyphens, at most `limit` bytes of UTF-8; `image` if nothing remains. Windows does not reserve the name.

    If the file system's encoding lacks such letters, only letters with an ASCII form are kept."""
    name = _cut(_words(text[: 20 * limit]), limit)
    try:
        name.encode(sys.getfilesystemencoding())
    except UnicodeEncodeError:
        ascii_only = unicodedata.normalize("NFKD", text[: 20 * limit]).encode("ascii", "ignore").decode()
        name = _cut(_words(ascii_only), limit)
    if _WINDOWS_DEVICE.fullmatch(name):
        name = f"image-{name}"
    return name or "image"


def _words(text: str) -> str:
    lower = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower())
    kinds = [unicodedata.category(c) for c in lower]
    # Format characters (joiners, direction) are dropped; any character but a letter, mark or digit separates words.
    pairs = zip(lower, kinds, strict=True)
    plain = "".join(c if kind[0] in "LM" or kind == "Nd" else "" if kind == "Cf" else " " for c, kind in pairs)
    words = (word.lstrip("".join(c for c in set(word) if _is_mark(c))) for word in plain.split())
    return unicodedata.normalize("NFC", "-".join(filter(None, words)))


def _cut(name: str, limit: int) -> str:
    """Cut a name to `limit` bytes: after a word if that leaves half of them, never between a letter and its marks."""
    data = name.encode()
    if len(data) <= limit:
        return name
    cut = data[:limit].decode(errors="ignore")
    while cut and _is_mark(name[len(cut)]):
        cut = cut[:-1]
    whole = cut if name[len(cut)] == "-" else cut.rpartition("-")[0]
    return (whole if len(whole.encode()) > limit // 2 else cut).strip("-")


def _is_mark(c: str) -> bool:
    return unicodedata.category(c)[0] == "M"
