"""ComfyUI's `extra_model_paths.yaml`: where it finds models beside its own folders.

Read is what ComfyUI's example has and no more of YAML: groups at the margin, in them `name: path` or `name: |` with a
path on each line below. Anchors, lists, tables and tags are refused, as they would say nothing that a path cannot.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from qwenimg.common.base.safe_files import bad, open_regular
from qwenimg.common.base.text import clean

NAME = "extra_model_paths.yaml"
MAX_BYTES = 64 << 10
MAX_PATHS = 500
_ENTRY = re.compile(r"""(?P<key>[A-Za-z0-9_.-]+|"[^"\\]*"|'[^']*')\s*:(?:\s+(?P<value>.*))?""")
_COMMENT = re.compile(r"(^|\s)#.*")


class _Line(NamedTuple):
    number: int
    indent: int
    text: str


def read_paths(file: Path) -> dict[str, list[Path]]:
    """{name of a kind, as ComfyUI calls it: folders}, of every group. Raises ModelError that names the line."""
    found: dict[str, list[Path]] = {}
    groups = list(_groups(file, _lines(file)))
    if sum(len(values) for group in groups for values in group.values()) > MAX_PATHS:
        raise bad(file, f"names more than {MAX_PATHS} folders")
    for group in groups:
        base = Path(_expanded(group.pop("base_path", [""])[0]))
        for key, values in group.items():
            if key != "is_default":
                folders = [file.parent / base / _expanded(value) for value in values if value]
                found.setdefault(key, []).extend(Path(os.path.normpath(folder)) for folder in folders)
    return found


def _expanded(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 (Path.expanduser raises for no such user)


def _lines(file: Path) -> list[_Line]:
    with closing(open_regular(file)) as opened:
        if opened.size > MAX_BYTES:
            raise bad(file, f"has {opened.size:,} bytes; at most {MAX_BYTES:,} are read")
        raw = opened.read(0, opened.size)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad(file, f"is not UTF-8 (byte {error.start})") from None
    lines = []
    for number, whole in enumerate(text.splitlines(), 1):
        line = _COMMENT.sub("", whole).rstrip()
        if "\0" in line or line[: len(line) - len(line.lstrip())].count("\t"):
            raise _fault(file, _Line(number, 0, line), "is indented by tabs, or has a zero byte")
        if line and line != "---":
            lines.append(_Line(number, len(line) - len(line.lstrip(" ")), line.strip()))
    return lines


def _groups(file: Path, lines: list[_Line]) -> Iterator[dict[str, list[str]]]:
    at = 0
    while at < len(lines):
        _, value = _entry(file, lines[at])
        if lines[at].indent or value:
            raise _fault(file, lines[at], "is in no group; expected `name:` at the margin and its paths below")
        at += 1
        end = next((i for i in range(at, len(lines)) if not lines[i].indent), len(lines))
        yield _group(file, lines[at:end])
        at = end


def _group(file: Path, lines: list[_Line]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.indent != lines[0].indent:
            raise _fault(file, line, "is indented otherwise than the group's first line")
        key, value = _entry(file, line)
        if key in found:
            raise _fault(file, line, "names a kind twice in its group")
        at += 1
        if value in ("|", "|-", "|+"):
            end = next((i for i in range(at, len(lines)) if lines[i].indent <= line.indent), len(lines))
            found[key] = [below.text for below in lines[at:end]]
            at = end
        else:
            found[key] = [_scalar(file, line, value)]
    return found


def _entry(file: Path, line: _Line) -> tuple[str, str]:
    match = _ENTRY.fullmatch(line.text)
    if match is None:
        raise _fault(file, line, "is not `name: path`")
    return match["key"].strip("\"'"), (match["value"] or "").strip()


def _scalar(file: Path, line: _Line, value: str) -> str:
    if value[:1] == value[-1:] == "'" and len(value) > 1:
        return value[1:-1].replace("''", "'")
    if value[:1] == value[-1:] == '"' and len(value) > 1:
        return value[1:-1].replace("\\\\", "\\")
    if value[:1] in tuple("[{&*!|>%@`\"'"):
        raise _fault(file, line, "is not a path; write `name: path`, or `name: |` with a path on each line below")
    return "" if value in ("~", "null") else value


def _fault(file: Path, line: _Line, what: str) -> Exception:
    return bad(file, f"line {line.number}, '{clean(line.text, 60)}', {what}")
