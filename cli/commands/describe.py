"""The command `describe`: captions or tags of pictures, by a language model that sees them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qwenimg.cli import failures, places, streams
from qwenimg.cli.options import FILE
from qwenimg.cli.progress import is_told
from qwenimg.cli.signals import Stop
from qwenimg.cli.text_limits import USUAL, text_limits
from qwenimg.common.base.errors import QwenimgError, UsageError
from qwenimg.common.base.text import clean, printable, shown_path
from qwenimg.common.families.load_options import load_options_of
from qwenimg.common.prompts.describing import LANGUAGES, Asking

if TYPE_CHECKING:
    from qwenimg.common.jobs.caption_files import CaptionFile
    from qwenimg.common.parts.texts.describing import Describer
    from qwenimg.common.parts.texts.writing import Written
    from qwenimg.common.pictures.pixels import Uint8

AT_ONCE = 8  # pictures whose texts are written together, where they fit in memory


@click.command("describe")
@click.argument("pictures", nargs=-1, required=True, type=FILE, metavar="PICTURE...")
@click.option("--tags", is_flag=True, help="Write tags, separated by commas, in place of a caption.")
@click.option("--ask", "question", metavar="TEXT", help="Answer this question about each picture.")
@click.option(
    "--write", "writes", is_flag=True, help="Write NAME.txt beside each picture, as trainers of LoRAs read it."
)
@click.option("--overwrite", is_flag=True, help="With --write: replace texts that exist.")
@click.option(
    "--language",
    type=click.Choice(LANGUAGES),
    metavar="|".join(LANGUAGES),
    default="en",
    help="The language of the text; default en.",
)
@text_limits
@click.option(
    "--with",
    "writer",
    metavar="FOLDER|FILE",
    help="Another language model that sees pictures, in place of the model's.",
)
@places.declared(
    "model", "backend", *places.WEIGHTS, "precision", "max_memory", "cache_prompts", "models_dir", "offline"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per event instead of texts.")
@click.option("--quiet", is_flag=True, help="Print texts, warnings and errors only.")
@click.pass_context
def describe(
    ctx: click.Context,
    /,
    pictures: tuple[Path, ...],
    tags: bool,
    question: str | None,
    writes: bool,
    overwrite: bool,
    language: str,
    limit: int | None,
    deadline: float | None,
    writer: str | None,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> int:
    """Describe PICTUREs, files or folders of them, with the text encoder of Qwen-Image or Qwen-Image-2.1.

    A text is printed, with several pictures behind the name of its file, or with --write stands in NAME.txt beside the
    picture. Pictures of a folder that have a text are left out then, so a stopped run goes on where it was."""
    from qwenimg import backends
    from qwenimg.common.hub.describer import open_describer
    from qwenimg.common.jobs import caption_files

    if tags and question is not None:
        raise UsageError("--tags and --ask are two kinds of texts; give one")
    if overwrite and not writes:
        raise UsageError("--overwrite is for --write, which writes a text beside each picture")
    asking = Asking(task="tags" if tags else "caption", language=language, question=(question or "").strip())  # type: ignore[arg-type]
    if question is not None and not asking.question:
        raise UsageError("--ask: the question is empty")
    stop = ctx.obj if isinstance(ctx.obj, Stop) else Stop()
    report = _Report(as_json=as_json, quiet=quiet, several=len(pictures) > 1, writes=writes)
    files = caption_files.find(pictures)
    report.several = len(files) > 1
    wanted = caption_files.unwritten(files, pictures, overwrite=overwrite) if writes else files
    report.begin(wanted, len(files) - len(wanted))
    if not wanted:
        report.done(0, 0, 0)
        return 0
    opening = load_options_of(places.pop_opening(given))
    with open_describer(opening, writer, lambda: backends.load(opening.backend), report.notify) as describer:
        report.notify("stage", describer.headline)
        describer.writer.seconds = math.inf if deadline is None else deadline
        return _run(describer, wanted, asking, USUAL if limit is None else limit, overwrite, report, stop)


def _run(
    describer: Describer,
    files: Sequence[CaptionFile],
    asking: Asking,
    limit: int,
    overwrite: bool,
    report: _Report,
    stop: Stop,
) -> int:
    """Describe each picture, also after one has failed; return the exit code."""
    run = _Run(describer, files, asking, limit, overwrite, report, stop)
    for first in range(0, len(files), AT_ONCE):
        run.describe(range(first, min(first + AT_ONCE, len(files))))
    codes = run.codes
    code = 0 if not codes else failures.PARTIAL if len(codes) < len(files) else codes[0]
    report.done(len(files) - len(codes), len(codes), code)
    return code


@dataclass
class _Run:
    """The texts about pictures, several of them written at once."""

    describer: Describer
    files: Sequence[CaptionFile]
    asking: Asking
    limit: int
    overwrite: bool
    report: _Report
    stop: Stop
    codes: list[int] = field(default_factory=list)

    def describe(self, numbers: Iterable[int]) -> None:
        """Describe some of the pictures together; if that fails, one by one those that have no text yet."""
        from qwenimg.common.parts.texts.describing import reduced

        seen: dict[int, Uint8] = {}
        for number in numbers:
            self.stop.check()
            with self._failing(number):
                seen[number] = reduced(self._pixels(number))
        waiting = list(seen)
        if len(waiting) > 1:

            def ended(place: int, made: Written) -> None:
                self._ended(order[place], made)
                waiting.remove(order[place])

            order = list(waiting)
            with suppress(QwenimgError, MemoryError):
                self.describer.describe_all([seen[number] for number in order], self.asking, self.limit, ended)
        for number in list(waiting):
            with self._failing(number):
                self._ended(number, self.describer.describe(seen[number], self.asking, self.limit, self.report.part))

    def _pixels(self, number: int) -> Uint8:
        from qwenimg.common.pictures.input import read_image

        pixels, lines = read_image(self.files[number].picture)
        for line in lines:
            self.report.notify("warning", line)
        self.report.reading(number + 1, self.files[number].picture)
        return pixels

    def _ended(self, number: int, made: Written) -> None:
        self.stop.check()
        file, report = self.files[number], self.report
        with self._failing(number):
            if made.cut:
                report.notify("warning", f"{shown_path(file.picture, 60)}: the text is cut after {made.tokens} tokens")
            if not made.text:
                raise UsageError(f"{shown_path(file.picture, 60)}: the model's text is empty; --ask may get one")
            if report.writes:
                file.write(made.text, overwrite=self.overwrite)
            report.written(number + 1, file, made.text, made.tokens, made.cut)

    @contextmanager
    def _failing(self, number: int) -> Iterator[None]:
        """Report an error about a picture, and go on unless it is the only one."""
        try:
            yield
        except (QwenimgError, MemoryError) as error:
            if len(self.files) == 1:
                raise
            self.codes.append(self.report.failure(number + 1, self.files[number].picture, error))


class _Report:
    """Prints a run on standard error, and the texts, the paths of their files or the events of --json on standard
    output. One text alone is printed in a terminal while it is written."""

    def __init__(self, *, as_json: bool, quiet: bool, several: bool, writes: bool) -> None:
        self.as_json, self.quiet, self.several, self.writes = as_json, quiet, several, writes
        self.total = 0
        self._grows = not (as_json or writes) and sys.stdout is not None and sys.stdout.isatty()
        self._shown = ""

    def notify(self, kind: str, text: str) -> None:
        if kind == "warning":
            self._end_line()
            streams.say(f"qwenimg: warning: {text}")
        elif not self.quiet:
            streams.say(text)

    def begin(self, files: Sequence[CaptionFile], kept: int) -> None:
        self.total = len(files)
        if kept:
            others = "their texts are" if kept > 1 else "its text is"
            self.notify(
                "stage", f"{kept} of {kept + len(files)} pictures left out: {others} here; --overwrite replaces"
            )
        rows = [
            {"index": index, "picture": str(one.picture), "path": str(one.text) if self.writes else None}
            for index, one in enumerate(files, 1)
        ]
        self._event("plan", images=rows)

    def reading(self, index: int, picture: Path) -> None:
        if self.several and is_told(index, self.total):
            self.notify("stage", f"picture {index} of {self.total}: {shown_path(picture, 60)}")

    def part(self, text: str) -> None:
        """Print the next words of a text."""
        if self._grows and not self.several:
            self._shown += text
            streams.put(printable(text).encode())

    def written(self, index: int, file: CaptionFile, text: str, tokens: int, cut: bool) -> None:
        path = str(file.text) if self.writes else None
        if self.as_json:
            self._event("text", index=index, picture=str(file.picture), path=path, text=text, tokens=tokens, cut=cut)
        elif self.writes:
            streams.put(os.fsencode(file.text) + b"\n")
        elif self._shown:  # a text that is cut is shorter than what was shown of it
            streams.put(printable(text[len(self._shown) :] if text.startswith(self._shown) else "").encode())
            self._end_line()
        else:
            self._end_line()
            name = f"{clean(file.picture.name, 255)}: " if self.several else ""
            streams.put(f"{name}{printable(text)}\n".encode())

    def _end_line(self) -> None:
        if self._shown:
            self._shown = ""
            streams.put(b"\n")

    def failure(self, index: int, picture: Path, error: Exception) -> int:
        self._end_line()
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
