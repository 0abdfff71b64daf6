"""The command `grid`: draw a picture with each value of one or two options, and put all on a labelled sheet."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qwenimg.cli import options, places, streams
from qwenimg.cli.commands.batch import BatchCommand, Making, Reading
from qwenimg.cli.commands.generate import generate
from qwenimg.cli.commands.selftest import sheet_path
from qwenimg.cli.options import FILE
from qwenimg.cli.signals import Stop
from qwenimg.cli.workers.messages import Start
from qwenimg.common.base import atomic_files
from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import shown_path
from qwenimg.common.families.load_options import load_options_of
from qwenimg.common.jobs.axes import FILES, KEY, Axis, Grid, from_text, parse_axis, to_text
from qwenimg.common.jobs.grid_sheet import MAX_PIXELS, grid_png
from qwenimg.common.jobs.image_options import TEXT_OPTIONS, Options, is_several, merged, parse
from qwenimg.common.jobs.job import InputFiles
from qwenimg.common.jobs.legal import check_forms, check_pictures
from qwenimg.common.jobs.naming import slug

if TYPE_CHECKING:
    from qwenimg.cli.batch.tasks import BatchTask
    from qwenimg.cli.drawing import Run


class GridCommand(BatchCommand):
    """A command whose help lists the options of all cells in a section of their own."""

    title = "Options of all cells"


@click.command(
    "grid",
    cls=GridCommand,
    context_settings={"token_normalize_func": options.known_name, "auto_envvar_prefix": "QWENIMG"},
)
@click.argument("words", nargs=-1, metavar="PROMPT")
@click.option(
    "--x",
    metavar="OPTION=A,B",
    allow_from_autoenv=False,
    help="The columns: an option and its values, as steps=4,8,20; values with commas stand between |.",
)
@click.option("--y", metavar="OPTION=A,B", allow_from_autoenv=False, help="The rows, in the same way.")
@click.option(
    "--from",
    "replay",
    type=FILE,
    metavar="SHEET",
    allow_from_autoenv=False,
    help="Draw the grid of SHEET again; other options change it.",
)
@click.option(
    "-o",
    "--output",
    metavar="SHEET.png",
    allow_from_autoenv=False,
    help="The sheet; the pictures go into a folder of its name. Default grid-PROMPT.png.",
)
@click.option("--overwrite", is_flag=True, allow_from_autoenv=False, help="Replace the sheet if it exists.")
@click.option("--quiet", is_flag=True, help="Print paths, warnings and errors only.")
@places.declared("model", "backend", *places.OF_WORKERS, "offline")
@options.of_pictures("num_images", "latents")
@click.pass_context
def grid(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    x: str | None,
    y: str | None,
    output: str | None,
    overwrite: bool,
    quiet: bool,
    **given: Any,
) -> int:
    """Draw PROMPT with each value of one option, or of two, and put the pictures on one sheet with their values.

    All cells have one seed, unless an axis has others. `--x prompt=red,green,blue` replaces the word red. Run the same
    command again to go on; it prints the path of each picture and of the sheet."""
    from qwenimg.cli import config, environment

    given |= {"words": words, "quiet": quiet}
    config.apply_defaults(ctx, given)
    environment.check(ctx, given)
    stop = ctx.obj if isinstance(ctx.obj, Stop) else Stop()
    found, run = _wanted(given, x, y)
    prompt = str(found.base["prompt"])
    cells = found.cells()
    for _, cell in cells:
        check_pictures(run.files, cell, controlled="control" in cell)
    name = _in_folder(output, f"grid-{slug(prompt, 40)}.png")
    sheet = sheet_path(name, prompt, overwrite=overwrite, size=MAX_PIXELS // 4)
    backend = given["backend"] or "auto"
    assert run.folders is not None
    reading = Reading(run.opening, run.folders, backend, run.files, found.base)
    tasks, seed = _tasks(reading, cells)
    start = Start(models={"model": run.opening}, backend=backend)
    making = Making(sheet.with_suffix(""), (0, 1), [start], retry_failed=True, quiet=bool(given["quiet"]))
    code = making.drawn(tasks, [], [*environment.unknown(generate), *reading.notes], stop)
    stop.check()
    if code:
        return code
    from qwenimg.common.pictures.texts import read_texts

    paths = [making.folder / task.name for task in tasks]
    texts = {KEY: to_text(found, seed)}
    if (recipe := read_texts(paths[0]).get("qwenimg")) is not None:
        texts["qwenimg"] = recipe
    data = grid_png(paths, [labels for labels, _ in cells], len(found.x.values), texts)
    stop.check()
    atomic_files.write_atomic(sheet, data, overwrite=overwrite)
    streams.put(bytes(sheet) + b"\n")
    return 0


def _in_folder(output: str | None, name: str) -> str:
    """Return the sheet's file: `output`, or `name` in it if it is a folder. It is the same in the next run."""
    place = home(output or ".")
    return str(Path(place) / name) if place.endswith("/") or os.path.isdir(place) else place  # noqa: PTH112 (long names)


def _wanted(given: dict[str, Any], x: str | None, y: str | None) -> tuple[Grid, Run]:
    """Check all that needs no model, and complete it from the sheet of --from: the grid, and the files and the model
    that draw it. Raises UsageError and ModelError."""
    from qwenimg.cli.drawing import Run, prompt_of
    from qwenimg.common.hub.part_files import located
    from qwenimg.common.jobs.run import Output

    base = parse({name: given[name] for name in TEXT_OPTIONS if name in given and name != "prompt"})
    prompt = prompt_of({"prompt_file": None, **given})
    if prompt is not None:
        base["prompt"] = prompt
    check_forms(base, "-", None, None)
    if is_several(base.get("seed", "")):
        raise UsageError(f"-s {base['seed']}: all cells have one seed; to compare seeds: --x seed={base['seed']}")
    keep_policy = given["preset"] is None and given["precision"] is None
    files = InputFiles(images=given["image"], mask=given["mask"])
    folders, opening = located(load_options_of(places.pop_opening(dict(given))))
    wanted = Run(
        options=base,
        opening=opening,
        folders=folders,
        files=files,
        latents=None,
        prompt_file=None,
        keep_going=False,
        pattern=None,
        output=Output(),
        preview=False,
    )
    if given["replay"] is not None:
        return _repeated(wanted, given["replay"], {"x": x, "y": y}, keep_policy=keep_policy)
    if x is None:
        raise UsageError("no axis; give one, as in: qwenimg grid PROMPT --x steps=4,8,20 --y guidance=1,4")
    if "prompt" not in base:
        raise UsageError('no prompt; give one, as in: qwenimg grid "a red circle" --x steps=4,8,20')
    return Grid(base=base, x=parse_axis("--x", x), y=None if y is None else parse_axis("--y", y)), wanted


def _repeated(wanted: Run, sheet: Path, axes: dict[str, str | None], *, keep_policy: bool) -> tuple[Grid, Run]:
    """Return the grid of `sheet`, with what is given in place of what it has, and the run with its model. Raises
    UsageError and ModelError."""
    from qwenimg.cli.replaying import with_recipe
    from qwenimg.common.pictures.texts import read_texts

    written, recorded = from_text(read_texts(sheet), sheet)
    found: dict[str, Axis] = {}
    for name in ("x", "y"):
        if (text := axes[name]) is not None:
            found[name] = parse_axis(f"--{name}", text)
        elif name in written:
            try:
                found[name] = parse_axis(f"--{name}", written[name], files=False)
            except UsageError as error:
                raise UsageError(f"{shown_path(sheet)}: give its axis again: {error}") from None
    base = merged(recorded, wanted.options)
    if "prompt" not in base:
        raise UsageError(f"{shown_path(sheet)}: has no prompt; give one")
    changed = Grid(base=base, x=found["x"], y=found.get("y"))
    run = replace(wanted, options=changed.cells()[0][1])
    run = with_recipe(run, sheet, lambda kind, text: streams.say(f"qwenimg: {kind}: {text}"), keep_policy=keep_policy)
    kept = {name: run.options[name] for name in FILES if name in run.options}
    kept = {name: value for name, value in kept.items() if name not in [axis.name for axis in changed.axes]}
    return replace(changed, base=kept | base), run


def _tasks(reading: Reading, cells: list[tuple[tuple[str, ...], Options]]) -> tuple[list[BatchTask], int]:
    """Return the picture of each cell, and the seed of the first. Raises QwenimgError for a cell that cannot be
    drawn, or is the same picture as another."""
    named = [(", ".join(labels), cell) for labels, cell in cells]
    first, faults = reading.tasks(named[:1], {})
    if faults:
        raise faults[0]
    seed = first[0].job.seed
    tasks, faults = reading.tasks([(where, {"seed": str(seed)} | cell) for where, cell in named], {})
    if faults:
        raise faults[0]
    if len(tasks) < len(cells):
        drawn = [task.job.where for task in tasks]
        same = next(where for where, _ in named if where not in drawn)
        raise UsageError(f"the cell of {same} is the same picture as another one; leave that value out")
    return tasks, seed
