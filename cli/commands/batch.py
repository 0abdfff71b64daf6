"""The command `batch`: draw many pictures with several workers, and resume interrupted runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qwenimg.cli import failures, options, places, streams
from qwenimg.cli.batch import engines
from qwenimg.cli.batch.contents import contents
from qwenimg.cli.batch.driver import BatchOutcome, Driver
from qwenimg.cli.batch.engines import MakeWorker
from qwenimg.cli.batch.record import BatchJournal, JournalEntries
from qwenimg.cli.batch.tasks import BatchTask, model_identity, parse_shard, shard_of, tasks_of
from qwenimg.cli.commands.generate import generate
from qwenimg.cli.options import FILE
from qwenimg.cli.progress import StepBar
from qwenimg.cli.signals import Stop
from qwenimg.cli.workers.messages import Start
from qwenimg.common.base.amounts import duration
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.load_options import LoadOptions, load_options_of
from qwenimg.common.jobs.image_options import ALL, TEXT_OPTIONS, Options, parse
from qwenimg.common.jobs.job import InputFiles
from qwenimg.common.jobs.legal import check_forms, check_pictures, read_files, read_pictures
from qwenimg.common.jobs.prompt_file import Line, read_prompts
from qwenimg.common.prompts.wildcards import Wildcards

if TYPE_CHECKING:
    from qwenimg.common.hub.model_folders import ModelFolders

NO_DEFAULTS = ("prompt", "latents")  # options of a picture that each line has for itself


class BatchCommand(click.Command):
    """A command whose help lists the options of a picture in a section of their own."""

    title = "Defaults of the lines (a line's own options override them)"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option) and not param.hidden]
        for title, are_defaults in (("Options", False), (self.title, True)):
            records = [one.get_help_record(ctx) for one in params if (one.name in ALL) is are_defaults]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None], col_max=34)


@click.command(
    "batch",
    cls=BatchCommand,
    context_settings={"token_normalize_func": options.known_name, "auto_envvar_prefix": "QWENIMG"},
)
@click.argument("file", metavar="FILE")
@click.option(
    "-o",
    "--output",
    type=FILE,
    required=True,
    metavar="FOLDER",
    allow_from_autoenv=False,
    help="The folder for the pictures and their journal.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=1,
    metavar="N",
    allow_from_autoenv=False,
    help="The number of processes that draw; default 1.",
)
@click.option(
    "--engine",
    type=click.Choice(engines.NAMES),
    default="local",
    allow_from_autoenv=False,
    help="Where the processes run; default local.",
)
@click.option(
    "--shard",
    metavar="I/N",
    allow_from_autoenv=False,
    help="Draw part I of N, counted from 0; default the part of a SLURM array or a launcher.",
)
@click.option(
    "--retry-failed",
    is_flag=True,
    allow_from_autoenv=False,
    help="Try again the pictures that failed in an earlier run.",
)
@click.option("--quiet", is_flag=True, help="Print paths, warnings and errors only.")
@places.declared("model")
@places.declared(
    "backend", multiple=True, help="The backend; repeat it for workers on several, such as cuda:0 and cuda:1."
)
@places.declared(*places.OF_WORKERS, "offline")
@options.of_pictures(*NO_DEFAULTS)
@click.pass_context
def batch(
    ctx: click.Context,
    /,
    file: str,
    output: Path,
    workers: int,
    engine: str,
    shard: str | None,
    retry_failed: bool,
    **given: Any,
) -> int:
    """Draw each line of FILE, as of --prompt-file, into a folder: each picture once, however often it is broken off.

    Run the same command again to go on. It prints the path of each picture."""
    from qwenimg.cli import config, environment
    from qwenimg.common.hub import part_files

    config.apply_defaults(ctx, given)
    environment.check(ctx, given)
    engines.check(engine)
    quiet = given.pop("quiet")
    defaults_of_lines = parse({name: given.pop(name) for name in TEXT_OPTIONS if name in given})
    check_forms(defaults_of_lines, "-", None, None)
    paths = InputFiles(images=given.pop("image"), mask=given.pop("mask"))
    stop = ctx.obj if isinstance(ctx.obj, Stop) else Stop()
    place = parse_shard(shard)
    backend = given.pop("backend")  # a text in config.toml
    backends = (backend,) if isinstance(backend, str) else backend or ("auto",)
    folders, opening = part_files.located(load_options_of(places.pop_opening(given)))
    lines = read_prompts(file)
    reading = Reading(opening, folders, backends[0], paths, defaults_of_lines)
    tasks, faults = reading.tasks(lines, defaults_of_lines)
    count = max(workers, len(backends))
    threads = max(1, (os.cpu_count() or 1) // count) if count > 1 else 0
    starts = [
        Start(models={"model": opening}, backend=backends[i % len(backends)], threads=threads) for i in range(count)
    ]
    notes = [*environment.unknown(generate), *reading.notes]
    making = Making(output.absolute(), place, starts, engine, retry_failed=retry_failed, quiet=quiet)
    return making.drawn(tasks, faults, notes, stop)


class Reading:
    """Makes the pictures of lines: the model's defaults and the pictures that they start from are read once."""

    def __init__(
        self, opening: LoadOptions, folders: ModelFolders, backend: str, files: InputFiles, options: Options
    ) -> None:
        """Read the pictures of `files`, and of the model what decides pixels. options: of all lines. Raises
        QwenimgError."""
        from qwenimg.common.hub import missing

        check_pictures(files, options, controlled="control" in options)
        self.inputs, self.notes = read_pictures(files)
        missing.check(opening, options, folders)
        identity, self.defaults = model_identity(opening)
        self.identity = identity | {"backend": backend}
        self.wildcards, self.files, self.contents = Wildcards(opening.wildcards), read_files(files), contents(folders)

    def tasks(self, lines: Sequence[Line], options: Options) -> tuple[list[BatchTask], list[ModelError]]:
        """Return the pictures of `lines`, and the errors of lines. options: used where a line has none."""
        model = self.identity, self.defaults, self.wildcards
        return tasks_of(lines, *model, options, self.files, self.inputs, self.contents)


@dataclass(frozen=True)
class Making:
    """A folder that pictures are drawn into, and the processes that draw them."""

    folder: Path
    shard: tuple[int, int]
    starts: Sequence[Start]
    engine: str = "local"
    retry_failed: bool = field(default=False, kw_only=True)
    quiet: bool = field(default=False, kw_only=True)

    def drawn(self, tasks: Sequence[BatchTask], faults: Sequence[ModelError], notes: Sequence[str], stop: Stop) -> int:
        """Draw the pictures that are not there yet, and return the exit code. notes: warnings to print."""
        with contextlib.closing(BatchJournal(self.folder, self.shard)) as journal:
            mine = shard_of(tasks, self.shard)
            entries = journal.entries()
            skipped = [] if self.retry_failed else [task for task in mine if task.key in entries.failed]
            left, replaced = _left([task for task in mine if task not in skipped], journal, entries)
            before = len(mine) - len(left) - len(skipped)
            report = BatchReport(self.folder, len(left), before=before, quiet=self.quiet)
            for line in notes:
                report.say(f"warning: {line}")
            for fault in faults:
                report.say(f"error: {fault}")
            if skipped:
                report.say(f"{len(skipped)} pictures were given up by an earlier run; --retry-failed draws them")
            outcome = BatchOutcome()
            if left:  # else no engine is started
                with engines.opened(self.engine, [start.backend for start in self.starts]) as make_worker:
                    outcome = asyncio.run(_run(left, replaced, journal, self.starts, report, stop, make_worker))
        return report.code(outcome, [*(1 for _ in skipped), *(fault.exit_code for fault in faults)])


async def _run(
    left: list[BatchTask],
    replaced: frozenset[str],
    journal: BatchJournal,
    starts: Sequence[Start],
    report: BatchReport,
    stop: Stop,
    make_worker: MakeWorker,
) -> BatchOutcome:
    loop = asyncio.get_running_loop()
    driver = Driver(left, replaced, journal, starts, report.ended, report.say, make_worker)

    def hears() -> None:
        loop.call_soon_threadsafe(driver.stop)

    with stop.serving(hears):
        return await driver.run()


def _left(
    tasks: list[BatchTask], journal: BatchJournal, entries: JournalEntries
) -> tuple[list[BatchTask], frozenset[str]]:
    """Return the pictures to draw, and of these the keys whose file does not have the journal's hash."""
    left: list[BatchTask] = []
    replaced: set[str] = set()
    for task in tasks:
        if task.key in entries.done:
            if not journal.is_intact(task, entries.done[task.key]):
                left.append(task)
                replaced.add(task.key)
        elif not journal.adopt(task):
            left.append(task)
    return left, frozenset(replaced)


class BatchReport:
    """Prints paths on standard output; progress on standard error, as a bar on a terminal and as lines elsewhere."""

    def __init__(self, folder: Path, total: int, *, before: int, quiet: bool = False) -> None:
        """Create a printer for `total` pictures. before: the number of pictures that earlier runs have drawn. quiet: no
        progress."""
        self.folder, self.total, self.before, self.quiet = folder, total, before, quiet
        self._bar = StepBar() if not quiet and sys.stderr is not None and sys.stderr.isatty() else None
        self._begun, self._ended = time.monotonic(), 0
        if not quiet:
            self.say(f"{total} to draw, {before} there already")

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.close()
        streams.say(f"qwenimg: {text}")

    def ended(self, task: BatchTask, error: str, seconds: float) -> None:
        """Report a finished or failed picture, and the remaining time at the average pace."""
        self._ended += 1
        rest = (time.monotonic() - self._begun) / self._ended * (self.total - self._ended)
        if error:
            self.say(f"error: {task.job.where}: {error}")
        else:
            streams.put(os.fsencode(self.folder / task.name) + b"\n")
        if self._bar is not None:
            self._bar.step(self.total)
        elif not (error or self.quiet):
            left = f", {duration(rest)} left" if rest >= 1 else ""
            self.say(f"{self._ended} of {self.total}: {seconds:.1f} s{left}")

    def code(self, outcome: BatchOutcome, faults: list[int]) -> int:
        """Print the number of pictures that are left, and return the exit code. faults: exit codes of pictures that
        were not tried."""
        if self._bar is not None:
            self._bar.close()
        if outcome.unusable is not None:
            streams.say(f"qwenimg: error: {outcome.unusable.text}")
            return outcome.unusable.exit_code
        codes = [*outcome.failed, *faults]
        if outcome.left:
            self.say(f"{outcome.left} pictures are left; run the same command again to go on")
            codes.append(1)
        return 0 if not codes else failures.PARTIAL if outcome.done or self.before else codes[0]
