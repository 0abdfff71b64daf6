"""What a picture or a model is made of."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Literal

import click

from qwenimg.common.errors import ModelError

MAX_TEXT = 2_000  # characters of one text that are printed
_PNG = b"\x89PNG\r\n\x1a\n"


@click.command("info")
@click.argument("file", type=click.Path(path_type=Path, readable=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--prediction", type=click.Choice(("eps", "v")), help="What a Stable Diffusion file's UNet predicts.")
def info(file: Path, as_json: bool, prediction: Literal["eps", "v"] | None) -> None:
    """Prints the recipe in a PNG, or what is in a model: a folder, a .safetensors file, or a name such as shapes."""
    file = _found(file)
    if _is_png(file):
        _show_picture(file, as_json)
        return
    _show_model(file, as_json, prediction)


def _found(file: Path) -> Path:
    """`file`, or the folder of the model that is known by this name."""
    from qwenimg.common import hub, recipes

    if os.path.lexists(file) or recipes.find(str(file)) is None:
        return file
    return hub.resolve(str(file)).folder


def _show_model(path: Path, as_json: bool, prediction: Literal["eps", "v"] | None) -> None:
    """What is there and what does not fit; ends with the exit code of a broken model where something does not."""
    from qwenimg.common.describe import describe

    found = describe(path, prediction)
    if as_json:
        click.echo(json.dumps({"kind": "model", "lines": found.lines, "faults": found.faults}))
    else:
        click.echo("\n".join([*found.lines, *(f"fault: {fault}" for fault in found.faults)]))
    if found.faults:
        raise click.exceptions.Exit(ModelError.exit_code)


def _is_png(path: Path) -> bool:
    from qwenimg.common.untrusted import is_folder, open_regular

    if is_folder(path):
        return False
    with contextlib.closing(open_regular(path)) as file:
        return file.size >= len(_PNG) and file.read(0, len(_PNG)) == _PNG


def _show_picture(path: Path, as_json: bool) -> None:
    from qwenimg.common.image import read_text
    from qwenimg.common.metadata import recipe_from_png

    texts = read_text(path)
    recipe = dict(recipe_from_png(path)) if texts.pop("qwenimg", None) is not None else None
    if as_json:
        click.echo(json.dumps({"kind": "picture", "recipe": recipe, "text": texts}))
        return
    for key, value in (recipe or {}).items():
        click.echo(_shown(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    if recipe is None:
        click.echo("no recipe of qwenimg")
    for key, value in texts.items():
        click.echo(_shown(f"text {key}", value))


def _shown(key: str, value: str) -> str:
    """`key: value` with control characters escaped; further lines are indented, so none can pass for a key."""
    from qwenimg.common.metadata import printable

    more = f" ... ({len(value):,} characters)" if len(value) > MAX_TEXT else ""
    lines = printable(value[:MAX_TEXT] + more).split("\n")
    return f"{printable(key)}: " + "\n    ".join(lines)
