"""Which models there are, and which are here."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def models(as_json: bool) -> None:
    """Prints the models that are known by name, and those in the Hugging Face cache that have no name here.

    Size: to fetch. Memory: what drawing takes on a GPU or a Mac, about; twice that on a CPU. Any other model in
    diffusers layout is drawn with by its folder, file or hub id."""
    click.echo(_as_json() if as_json else table())


def _as_json() -> str:
    from qwenimg.common.base import hf_cache
    from qwenimg.common.hub import listing

    return json.dumps({"cache": str(hf_cache.cache_folder()), "models": [asdict(entry) for entry in listing.entries()]})


def table() -> str:
    """The lines of the table, and what to do with a name."""
    from qwenimg.common.base.amounts import size_text
    from qwenimg.common.base.text import aligned, clean
    from qwenimg.common.hub import listing

    lines: list[tuple[str, ...]] = [("name", "here", "size", "memory", "license", "for")]
    for entry in listing.entries():
        memory = "" if entry.memory is None else size_text(entry.memory)
        rest = (entry.license or "its own", entry.purpose or "in the cache")
        lines.append((clean(entry.name, 100), entry.here, size_text(entry.bytes), memory, *rest))
    return "\n".join(
        [*aligned(lines), "", 'get one: qwenimg pull NAME     draw with it: qwenimg -m NAME "a red circle"']
    )
