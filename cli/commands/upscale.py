"""The command `upscale`: make pictures larger by a network of the ESRGAN family."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qwenimg.cli import failures, places, streams
from qwenimg.cli.options import FILE
from qwenimg.cli.signals import Stop
from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import ModelError, QwenimgError, UsageError
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.families.load_options import LoadOptions

if TYPE_CHECKING:
    from qwenimg.common.upscaling.network_file import Upscaler
    from qwenimg.common.upscaling.upscaling import Upscaling

MOST_BY = 16


@click.command("upscale")
@click.argument("pictures", nargs=-1, required=True, type=FILE, metavar="PICTURE...")
@click.option(
    "--by",
    "--scale",
    type=click.IntRange(1, MOST_BY),
    metavar="N",
    help="How many times as wide and high, usually 2 or 4; default the file's.",
)
@click.option(
    "--with", "upscaler", metavar="FILE", help="The upscaler: a file (.safetensors .pth), or its name in --models-dir."
)
@click.option(
    "-o", "--output", metavar="PATH", help="A file for one picture, or a folder/; default NAME-4x.png beside."
)
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
@places.declared("backend")
@places.declared(
    "precision",
    type=click.Choice(("fp32", "bf16", "fp16")),
    metavar="fp32|bf16|fp16",
    default="fp32",
    help="The number format; default fp32.",
)
@places.declared("max_memory", help="Use at most this much memory, such as 4GB; a picture that needs more is refused.")
@click.option("--no-metadata", is_flag=True, help="Leave the recipe and the record of the upscaling out of the file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per event instead of paths.")
@click.option("--quiet", is_flag=True, help="Print paths, warnings and errors only.")
@places.with_opening
@click.pass_context
def upscale(
    ctx: click.Context,
    opening: LoadOptions,
    pictures: tuple[Path, ...],
    by: int | None,
    upscaler: str | None,
    output: str | None,
    overwrite: bool,
    no_metadata: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Make PICTUREs larger with a network that adds detail, and print the paths of the new files.

    Reads RealESRGAN_x4plus, x2plus, anime_6B, general-x4v3, animevideov3, and any other file of the ESRGAN family. A
    recipe in the picture stays in the new file, and an alpha channel is enlarged too."""
    from qwenimg import backends
    from qwenimg.common.hub.model_folders import read_folders
    from qwenimg.common.hub.network_search import find_upscaler, read_upscaler, upscaling

    stop = ctx.obj if isinstance(ctx.obj, Stop) else Stop()
    report = _Report(as_json=as_json, quiet=quiet)
    with ExitStack() as stack:
        network = read_upscaler(find_upscaler(upscaler, read_folders(opening.models_dir)))
        stack.callback(network.close)
        times = network.scale if by is None else by
        outputs = _outputs(pictures, output, times, overwrite=overwrite)
        report.begin(network, pictures, outputs)
        engine = backends.load(opening.backend)
        ready = upscaling(network, engine, opening.precision, opening.limit, report.notify)
        ready.passes(times)
        report.notify(
            "stage", f"{network.path.name}: {network.title}, on {engine.device}, {ready.runtime.precision.name}"
        )
        return _run(ready, pictures, outputs, times, overwrite, not no_metadata, report, stop)


def _run(
    ready: Upscaling,
    pictures: Sequence[Path],
    outputs: Sequence[Path | None],
    by: int,
    overwrite: bool,
    metadata: bool,
    report: _Report,
    stop: Stop,
) -> int:
    """Upscale and write each picture, also after one has failed; return the exit code."""
    codes: list[int] = []
    for index, (picture, path) in enumerate(zip(pictures, outputs, strict=True), 1):
        stop.check()
        try:
            data, size = enlarged(ready, picture, by, "" if path is None else path.suffix, metadata, report.notify)
            stop.check()
            if path is None:
                streams.put(data)
            else:
                atomic_files.make_folder(path.parent)
                atomic_files.write_atomic(path, data, overwrite=overwrite)
        except (QwenimgError, MemoryError) as error:
            if len(pictures) == 1:
                raise
            codes.append(report.failure(index, picture, error))
            continue
        report.written(index, path, size)
    code = 0 if not codes else failures.PARTIAL if len(codes) < len(pictures) else codes[0]
    report.done(len(pictures) - len(codes), len(codes), code)
    return code


def enlarged(
    ready: Upscaling, picture: Path, by: int, suffix: str, metadata: bool, notify: Callable[[str, str], None]
) -> tuple[bytes, tuple[int, int]]:
    """Return the file of a picture made larger, and its width and height. Raises QwenimgError."""
    from qwenimg.common.pictures.input import read_image
    from qwenimg.common.pictures.texts import read_texts
    from qwenimg.common.pipeline.encode import check, encode_texts
    from qwenimg.common.request.recipe import XMP
    from qwenimg.common.upscaling import record

    pixels, lines = read_image(picture)
    for line in lines:
        notify("warning", line)
    try:
        before = read_texts(picture)
    except ModelError:  # a format without texts, or texts that cannot be read: they are left out
        before = {}
    suffix = suffix or ".png"
    check(suffix, pixels.shape[1] * by, pixels.shape[0] * by, "")
    larger = ready.enlarged(pixels, by)
    text = record.texts(ready, pixels, by, before) if metadata else {}
    return encode_texts(larger, text, record.mark(XMP, before), suffix), (larger.shape[1], larger.shape[0])


def _outputs(pictures: Sequence[Path], output: str | None, by: int, *, overwrite: bool) -> list[Path | None]:
    """Return the path of each new file; None for standard output."""
    from qwenimg.common.base.arguments import home
    from qwenimg.common.base.safe_files import absolute, is_folder
    from qwenimg.common.jobs.naming import check_distinct

    if output in ("-", *streams.NAMES_OF_STDOUT):
        if len(pictures) > 1:
            raise UsageError(f"-o -: standard output takes one picture, these are {len(pictures)}")
        if sys.stdout is not None and sys.stdout.isatty():
            raise UsageError("-o -: a terminal cannot take a PNG; send the output to a file or a program")
        return [None]
    names = [f"{picture.stem}-{by}x.png" for picture in pictures]
    place = None if output is None else Path(home(output))
    if place is None:
        paths = [absolute(picture).with_name(name) for picture, name in zip(pictures, names, strict=True)]
    elif str(output).endswith("/") or is_folder(place):
        paths = [absolute(place) / name for name in names]
    elif len(pictures) > 1:
        raise UsageError(f"-o {clean(output, 80)}: one file for {len(pictures)} pictures; end it in / for a folder")
    else:
        paths = [absolute(atomic_files.picture_path(place))]
    check_distinct(paths)
    for path in paths:
        atomic_files.check_output(path, overwrite=overwrite, new_folder=str(output).endswith("/"))
    return list(paths)


class _Report:
    """Prints a run on standard error, and the paths or the events of --json on standard output."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json, self.quiet = as_json, quiet

    def notify(self, kind: str, text: str) -> None:
        if kind == "warning":
            streams.say(f"qwenimg: warning: {text}")
        elif not self.quiet:
            streams.say(text)

    def begin(self, network: Upscaler, pictures: Sequence[Path], outputs: Sequence[Path | None]) -> None:
        images = [
            {"index": index, "picture": str(picture), "path": None if path is None else str(path)}
            for index, (picture, path) in enumerate(zip(pictures, outputs, strict=True), 1)
        ]
        self._event("plan", upscaler=str(network.path), network=network.kind, scale=network.scale, images=images)

    def written(self, index: int, path: Path | None, size: tuple[int, int]) -> None:
        if self.as_json:
            shown = None if path is None else str(path)
            self._event("image", index=index, path=shown, width=size[0], height=size[1])
        elif path is not None:
            streams.put(bytes(path) + b"\n")

    def failure(self, index: int, picture: Path, error: Exception) -> int:
        shown = shown_path(picture, 60)
        code, text = failures.report(error, "" if shown in str(error) else f"{shown}: ")
        if self.as_json:
            streams.put(failures.event(code, text, index))
        return code

    def done(self, written: int, failed: int, code: int) -> None:
        self._event("done", made=written, failed=failed, exit=code)

    def _event(self, name: str, **fields: object) -> None:
        if self.as_json:
            streams.put(failures.record(name, **fields))
