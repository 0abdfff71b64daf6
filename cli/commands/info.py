"""The command `info`: print the recipe of an image, or the contents of a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qwenimg.cli import places
from qwenimg.cli.options import FILE
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import shell_path
from qwenimg.common.families.load_options import LoadOptions

if TYPE_CHECKING:
    from qwenimg.common.families.load_options import Prediction
    from qwenimg.common.jobs.foreign import Foreign

MAX_TEXT = 2_000  # characters of one text that are printed
XMP = "XML:com.adobe.xmp"  # Pillow's name for it in a PNG


@click.command("info")
@click.argument("file", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@places.declared("prediction", metavar=None, help="What a Stable Diffusion file's UNet predicts.")
@places.with_opening
def info(file: Path, as_json: bool, opening: LoadOptions) -> None:
    """Print the recipe in an image, or what any other file is: a model, a part of one, a LoRA, an upscaler, a workflow.
    The last line names the command that uses it, or says why none does. FILE may be a folder or a name (shapes)."""
    file = _found(file)
    if _is_picture(file):
        _show_picture(file, as_json)
        return
    _show_model(file, as_json, opening.prediction)


def _found(file: Path) -> Path:
    """Return `file`, or the folder or file of this name: of a known model, or another download."""
    from qwenimg.common.families import catalog
    from qwenimg.common.hub import part_files, resolve

    name = str(file)
    if os.path.lexists(file):
        return file
    if catalog.find(name) is not None:
        return resolve.resolve(name).folder
    return file if catalog.find_download(name) is None else part_files.find_part(name)


def _show_model(path: Path, as_json: bool, prediction: Prediction | None) -> None:
    """Print the contents of a model. For a broken model raise its first error at the end."""
    from qwenimg.common.hub.describe import describe

    model = describe(path, prediction)
    if as_json:
        click.echo(json.dumps({"kind": "model", "lines": model.lines, "faults": model.faults}))
    else:
        click.echo("\n".join([*model.lines, *(f"fault: {fault}" for fault in model.faults)]))
    if model.faults:
        raise click.exceptions.Exit(ModelError.exit_code)


def _is_picture(path: Path) -> bool:
    from qwenimg.common.base.safe_files import is_folder
    from qwenimg.common.pictures.texts import picture_format

    return not is_folder(path) and picture_format(path) is not None


def _show_picture(path: Path, as_json: bool) -> None:
    from qwenimg.common.hub.network_search import needed_options
    from qwenimg.common.jobs.foreign_read import read_foreign
    from qwenimg.common.pictures.texts import read_texts
    from qwenimg.common.request.recipe import recipe_from_texts

    texts = read_texts(path)
    recipe = dict(recipe_from_texts(texts, path)) if "qwenimg" in texts else None
    texts.pop("qwenimg", None)
    foreign = read_foreign(texts, path) if recipe is None else None
    again = None if foreign is None or foreign.refused is not None else needed_options(foreign)
    again = [] if recipe is not None else again
    if as_json:
        about = {"recipe": recipe, "foreign": _described(foreign), "text": texts, "use": _use(path, again)}
        click.echo(json.dumps({"kind": "picture", **about}))
        return
    for key, value in (recipe or {}).items():
        click.echo(_shown(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    if recipe is None:
        click.echo("no recipe of qwenimg")
    if foreign is not None:
        _show_foreign(foreign)
    for key, value in texts.items():
        click.echo(_xmp(value) if key == XMP else _shown(f"text {key}", value))
    click.echo(f"use it: {_use(path, again)}")


def _use(path: Path, needs: list[str] | None) -> str:
    """Return the commands that use a picture. needs: options that its recipe needs to be drawn again; None if it cannot
    be."""
    shown = shell_path(path)
    again = "" if needs is None else f"{' '.join(['qwenimg --from', shown, *needs])} (draws it again), "
    return f'{again}qwenimg edit {shown} "TEXT", qwenimg upscale {shown}'


def _xmp(value: str) -> str:
    """Describe the XMP's statement that a model made the image. The raw XML is for programs (--json)."""
    origin = "made by a model" if "trainedAlgorithmicMedia" in value else "does not say that a model made it"
    return f"XMP: {origin} ({len(value):,} characters; --json shows them)"


def _described(foreign: Foreign | None) -> dict[str, object] | None:
    if foreign is None:
        return None
    about = {"program": foreign.program, "fields": foreign.fields, "model": foreign.model, "files": foreign.named()}
    return {**about, "notes": foreign.messages(), "refused": foreign.refused}


def _show_foreign(foreign: Foreign) -> None:
    click.echo(_shown("recipe of", foreign.program))
    for key, value in {**foreign.fields, **foreign.named()}.items():
        click.echo(_shown(key, str(value)))
    for line in foreign.messages():
        click.echo(_shown("note", line))
    if foreign.refused is not None:
        click.echo(_shown("cannot be made again", foreign.refused))


def _shown(key: str, value: str) -> str:
    """Return `key: value` with control characters escaped. Further lines are indented, so that none looks like a
    key."""
    from qwenimg.common.base.text import printable

    more = f" ... ({len(value):,} characters)" if len(value) > MAX_TEXT else ""
    lines = printable(value[:MAX_TEXT] + more).split("\n")
    return f"{printable(key)}: " + "\n    ".join(lines)
