"""The command `models`: list the known models, and the models and files on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qwenimg.cli import places

if TYPE_CHECKING:
    from qwenimg.common.hub.folder_listing import Row
    from qwenimg.common.hub.forecast import FitForecast
    from qwenimg.common.hub.listing import ListedModel


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@places.declared("models_dir")
def models(as_json: bool, models_dir: tuple[Path, ...]) -> None:
    """Print the models that are known by name, and those in the Hugging Face cache that have no name here. With
    --models-dir: the files in DIR, the kind of each, and the option that takes it.

    The best for this machine come first, as `qwenimg plan` forecasts them. Size: on the disk if the model is here, else
    of the download. Memory: at the peak of an image, with the options beside it, which make it fit. Any other model in
    diffusers layout can be used by its folder, file or hub id."""
    if models_dir:
        click.echo(_folders(models_dir, as_json))
        return
    click.echo(_as_json() if as_json else table())


def _as_json() -> str:
    from qwenimg.common.base import hf_cache

    models = [
        {**asdict(entry), "peak": row and row.peak, "fits": row and row.fits, "options": row and row.options}
        for entry, row in _ranked()
    ]
    return json.dumps({"cache": str(hf_cache.cache_folder()), "models": models})


def _ranked() -> list[tuple[ListedModel, FitForecast | None]]:
    """Return the listed models, best first for this machine, each with the first row of its forecast; models without a
    forecast come last."""
    from qwenimg.backends.paper import for_hints
    from qwenimg.common.hub import forecast, listing

    entries = {entry.name: entry for entry in listing.entries()}
    rows: dict[str, FitForecast] = {}
    for one in forecast.forecast_all(for_hints("auto")):
        rows.setdefault(one.model.name, one)
    ranked = [(entries.pop(name), row) for name, row in rows.items()]
    return [*ranked, *((entry, None) for entry in entries.values())]


def table() -> str:
    """Return the lines of the table, and how to use a name."""
    from qwenimg.common.base.amounts import size_text
    from qwenimg.common.base.text import aligned, clean

    lines: list[tuple[str, ...]] = [("name", "here", "size", "memory", "", "options", "license", "for")]
    for entry, row in _ranked():
        size = size_text(entry.bytes if entry.here == "no" or not entry.on_disk else entry.on_disk)
        fits = ("", "", "") if row is None else (size_text(row.peak), "fits" if row.fits else "too large", row.options)
        rest = (entry.license or "its own", entry.purpose or "in the cache")
        lines.append((clean(entry.name, 100), entry.here, size, *fits, *rest))
    ways = 'get one: qwenimg pull NAME   draw with it: qwenimg -m NAME "a red circle"   delete it: qwenimg rm NAME'
    return "\n".join([*aligned(lines), "", ways])


# Folders of other programs


def _folders(given: tuple[Path, ...], as_json: bool) -> str:
    """List the models and parts in folders, as JSON or as lines."""
    from qwenimg.common.base.text import shown_path
    from qwenimg.common.hub import folder_listing
    from qwenimg.common.hub.model_folders import read_folders

    rows, more = folder_listing.rows(read_folders(given))
    if as_json:
        return json.dumps({"files": [asdict(row) for row in rows], "more": more})
    if not rows:
        shown = ", ".join(shown_path(path, 60) for path in given)
        return f"{shown}: no model, part or LoRA there, nor in a folder below that ComfyUI would look in"
    cut = [f"more than {folder_listing.MAX_FILES:,} files; the others are not listed"] if more else []
    used = 'draw with one: qwenimg --models-dir DIR OPTION NAME "a red circle"     more of a file: qwenimg info FILE'
    return "\n".join([*_table(rows), *cut, "", used])


def _table(rows: list[Row]) -> list[str]:
    from qwenimg.common.base.amounts import size_text
    from qwenimg.common.base.text import aligned, clean

    lines: list[tuple[str, ...]] = [("use it by", "size", "stored", "for", "kind", "needs")]
    for row in rows:
        named = f"{row.use} {row.name}" if row.use else row.name
        kind = "not read" if row.fault else ", ".join(filter(None, (row.kind, row.type))) or "unknown here"
        last = clean(row.fault, 100) or row.needs
        cells = (named, size_text(row.bytes), row.stored, row.family, kind, last)
        lines.append(tuple(clean(cell, 100) for cell in cells))
    return aligned(lines)
