"""Recognition of the program that wrote the recipe among an image's texts, and reading of that recipe."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path

from qwenimg.common.base.safe_files import OpenFile, bad
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.jobs import foreign_a1111, foreign_comfyui, foreign_graph, foreign_json
from qwenimg.common.jobs.foreign import Foreign
from qwenimg.common.pictures.texts import XMP_KEY

MAX_TEXT = 5_000_000  # characters of a recipe, and bytes of a file with one
DEPTH = 16
VALUES = 50_000
# Of a file of ComfyUI's page, which has each node's place and colours too.
FILE_DEPTH, FILE_VALUES = 64, 500_000
_MFLUX_TAG = re.compile(r"<mflux:(seed|steps|guidance|model|loras)>([^<]{0,2000})</mflux:")
_DESCRIPTION = re.compile(r'<rdf:li xml:lang="x-default">([^<]{0,400000})</rdf:li></rdf:Alt></dc:description>')


def read_foreign(texts: Mapping[str, str], path: Path) -> Foreign | None:
    """Return the recipe of another program in `texts`, the texts of `read_texts`, or None if there is none that is
    known. Raises ModelError for one that its program would not write."""
    if "invokeai_metadata" in texts:
        return foreign_json.read_invokeai(_table(texts["invokeai_metadata"], path, "invokeai_metadata"), path)
    for key in ("parameters", "UserComment"):
        recipe = _read_text(texts.get(key, ""), path)
        if recipe is not None:
            return recipe
    if texts.get("prompt", "").lstrip().startswith("{"):
        return foreign_comfyui.read(_json(texts["prompt"], path, "ComfyUI's prompt"), path)
    if "<mflux:seed>" in texts.get(XMP_KEY, ""):
        return foreign_json.read_mflux(_mflux_xmp(texts[XMP_KEY]), path)
    return None


def is_workflow(file: OpenFile) -> bool:
    """Return whether `file` begins like an object in JSON."""
    return file.read(0, min(file.size, 64)).lstrip().startswith(b"{")


def read_workflow(file: OpenFile) -> Foreign:
    """Return the recipe of a graph of ComfyUI in a JSON file, as its page or its API has it. Raises ModelError."""
    if file.size > MAX_TEXT:
        raise bad(file.path, f"is JSON of {file.size:,} bytes; of a workflow at most {MAX_TEXT:,} are read")
    data = strict_json(file.read(0, file.size), file.path, depth=FILE_DEPTH, values=FILE_VALUES)
    if not (foreign_graph.is_page_form(data) or foreign_graph.is_api_form(data)):
        raise bad(
            file.path, "is JSON, but no workflow of ComfyUI: give one that its page or its API wrote, or a picture"
        )
    return foreign_comfyui.read(data, file.path)


def _read_text(text: str, path: Path) -> Foreign | None:
    if text.lstrip().startswith("{") and '"mflux_version"' in text:
        return foreign_json.read_mflux(_table(text, path, "mflux's recipe"), path)
    _check_length(text, path, "its recipe")
    return foreign_a1111.read(text, path)


def _table(text: str, path: Path, what: str) -> dict[str, object]:
    data = _json(text, path, what)
    if not isinstance(data, dict):
        raise bad(path, f"{what} is not a JSON object")
    return data


def _json(text: str, path: Path, what: str) -> object:
    _check_length(text, path, what)
    return strict_json(text.encode("utf-8"), f"{path} ({what})", depth=DEPTH, values=VALUES)


def _check_length(text: str, path: Path, what: str) -> None:
    if len(text) > MAX_TEXT:
        raise bad(path, f"{what} has {len(text):,} characters; at most {MAX_TEXT:,} are read")


def _mflux_xmp(xmp: str) -> dict[str, object]:
    """Return the part of the recipe that mflux repeats in XMP, for images that have lost their EXIF; it has no size."""
    values: dict[str, object] = {}
    for key, value in _MFLUX_TAG.findall(xmp):
        values.setdefault(key, _number(html.unescape(value)) if key in ("seed", "steps", "guidance") else value)
    prompt = _DESCRIPTION.search(xmp)
    return values | ({"prompt": html.unescape(prompt[1])} if prompt else {})


def _number(text: str) -> object:
    if text == "None":
        return None
    return foreign_a1111.number(text)
