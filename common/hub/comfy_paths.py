"""ComfyUI's `extra_model_paths.yaml`: the folders where it finds models, beside its own.

The file has groups of `name: path`, or `name: |` with a path on each line below. PyYAML only parses it into nodes, so a
path stays text. Lists, deeper tables and tags are refused: none of them is a path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import yaml

from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, open_regular
from qwenimg.common.base.text import clean

NAME = "extra_model_paths.yaml"
MAX_BYTES = 64 << 10
MAX_PATHS = 500
_SCALARS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "null", "bool", "int", "float", "timestamp")}
_COMMENT = re.compile(r"(^|\s)#.*")  # in a block of lines YAML has no comments, but ComfyUI's own example does


def read_paths(file: Path) -> dict[str, list[Path]]:
    """Return {ComfyUI's name of a kind: folders}, of all groups together. Raises ModelError that names the line."""
    folders: dict[str, list[Path]] = {}
    count = 0
    for _, group in _pairs(file, _root(file)):
        paths = {key: _lines(file, value) for key, value in _pairs(file, group)}
        base = Path(_expanded("".join(paths.pop("base_path", [])[:1])))
        paths.pop("is_default", None)
        count += max(1, sum(len(values) for values in paths.values()))
        if count > MAX_PATHS:
            raise bad(file, f"names more than {MAX_PATHS} folders")
        for key, values in paths.items():
            joined = [os.path.normpath(file.parent / base / _expanded(value)) for value in values]
            folders.setdefault(key, []).extend(map(Path, joined))
    return folders


def _root(file: Path) -> yaml.Node | None:
    """Parse the file. Return the tree of its YAML, None if it is empty. Raises ModelError."""
    with closing(open_regular(file)) as opened:
        if opened.size > MAX_BYTES:
            raise bad(file, f"has {opened.size:,} bytes; at most {MAX_BYTES:,} are read")
        raw = opened.read(0, opened.size)
    try:
        return yaml.compose(raw.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise bad(file, f"is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise bad(file, "is nested too deep; expected groups of `name: path`") from None
    except yaml.reader.ReaderError as error:
        raise bad(file, f"holds a character that no YAML has (at {error.position})") from None
    except yaml.MarkedYAMLError as error:
        place = error.problem_mark or error.context_mark
        raise bad(file, f"line {place.line + 1} is not YAML: {clean(error.problem, 120)}") from None


def _pairs(file: Path, table: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    """Yield the keys and values of a table, none for an empty one. Raises ModelError for a key that occurs twice."""
    if table is None or (isinstance(table, yaml.ScalarNode) and table.tag.endswith(":null")):
        return
    if not isinstance(table, yaml.MappingNode) or table.tag != "tag:yaml.org,2002:map":
        raise _fault(file, table, "is in no group; expected `name:` at the margin and its paths below")
    keys = set()
    for key, value in table.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag not in _SCALARS:
            raise _fault(file, key, "is not the name of a group or of a kind of model")
        if key.value in keys:
            raise _fault(file, key, f"names '{clean(key.value, 40)}' twice; keep one of the two")
        keys.add(key.value)
        yield key.value, value


def _lines(file: Path, node: yaml.Node) -> list[str]:
    """Return the paths of a value, one for each of its lines. Raises ModelError."""
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS or "\0" in node.value:
        raise _fault(file, node, "is not a path; write `name: path`, or `name: |` with a path on each line below")
    text = "" if node.tag.endswith(":null") else node.value
    lines = [_COMMENT.sub("", line) if node.style == "|" else line for line in text.splitlines()]
    return [line.strip() for line in lines if line.strip()]


def _expanded(path: str) -> str:
    return os.path.expandvars(home(path))


def _fault(file: Path, node: yaml.Node, reason: str) -> ModelError:
    return bad(file, f"line {node.start_mark.line + 1} {reason}")
