"""The run of `generate`: check the options, open the model, and generate and write each image."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenimg.cli import failures, foreign_words, streams
from qwenimg.cli.progress import RunPrinter
from qwenimg.cli.signals import Stop
from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.jobs.image_options import Options, is_enlarged, option_in, parse
from qwenimg.common.jobs.job import InputFiles, Inputs, Job, jobs_of, makes_folder, with_paths
from qwenimg.common.jobs.legal import check_cache, check_forms, check_pictures, read_noise, read_pictures
from qwenimg.common.jobs.prompt_file import read_prompts
from qwenimg.common.jobs.run import (
    Outcome,
    Output,
    check_files,
    completed,
    control_outputs,
    estimated,
    passing,
    prepare,
    run,
)
from qwenimg.common.prompts.wildcards import Wildcards
from qwenimg.common.request.request import random_seed

if TYPE_CHECKING:
    from qwenimg import Pipeline, Step
    from qwenimg.common.hub.model_folders import ModelFolders
    from qwenimg.common.memory.estimate import Estimate

MOST = 20  # the most faults of a prompt file that are reported one by one if they end the run
Open = Callable[[LoadOptions, Callable[[str, str], None]], "Pipeline"]
"""Opens a model, and has a function that takes its messages."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The options of `generate`, parsed."""

    options: Options  # of every image; lines of the prompt file override them
    opening: LoadOptions
    folders: ModelFolders | None  # those of --models-dir
    files: InputFiles
    latents: Path | None
    prompt_file: str | None
    keep_going: bool
    pattern: str | None  # the value of -o
    output: Output
    preview: bool


def parsed(given: Mapping[str, Any], opening: LoadOptions) -> Run:
    """Parse click's values of the options. No file is opened but the model folders. Raises UsageError and
    ModelError."""
    options = parse(given)
    check_forms(options, given["output"], given["latents"], given["save_latents"])
    if (prompt := prompt_of(given)) is not None:
        options["prompt"] = prompt
    if given["devices"] > 1:
        _check_enlarged(options)
    folders = None
    if opening.models_dir:
        from qwenimg.common.hub.part_files import located

        folders, opening = located(opening)
    output = Output(
        overwrite=given["overwrite"],
        metadata=not given["no_metadata"],
        new_folder=makes_folder(given["output"]),
        save_latents=given["save_latents"],
        keep_control=given["keep_control"],
        put=streams.put,
        views=tuple(name for name in ("stack", "sheet") if given[name]),
        check_cache=given["step_cache_check"],
    )
    if given["output"] == "-" and given["json"]:
        raise UsageError("-o - and --json both write to standard output; give one of them")
    return Run(
        options=options,
        opening=opening,
        folders=folders,
        files=InputFiles(images=given["image"], mask=given["mask"]),
        latents=given["latents"],
        prompt_file=given["prompt_file"],
        keep_going=given["keep_going"],
        pattern=given["output"],
        output=output,
        preview=given["preview"] or opening.preview_with is not None,
    )


def _check_enlarged(options: Options) -> None:
    """Raise UsageError for a picture that several devices would make larger."""
    if is_enlarged(options):
        raise UsageError(
            "--upscale: one device makes pictures larger; leave out --devices, or: qwenimg upscale PICTURE"
        )


def draw(wanted: Run, opens: Open, stop: Stop, report: RunPrinter) -> int:
    """Generate all images of a run, and return the exit code. As many errors as possible are raised before a model is
    opened."""
    from qwenimg.common.hub import missing, resolve
    from qwenimg.common.hub.job_upscalers import JobUpscalers
    from qwenimg.common.hub.model_folders import read_folders

    jobs, failed = _jobs(wanted, report)
    _check_files(wanted, jobs)
    inputs, output = _inputs(wanted, jobs, report)
    opening, keep_going = wanted.opening, wanted.keep_going
    missing.check(opening, wanted.options, wanted.folders or read_folders(()))
    advice = None if opening.parts else resolve.advice(opening.model, partial(_real_model, opening.backend))
    if advice is not None:
        jobs = passing_jobs(
            jobs, lambda job: advice.check(job.prompt, job.get("few_steps")), report, failed, keep_going=keep_going
        )
    upscalers = JobUpscalers(wanted.opening.models_dir)
    for folder in {job.path.parent for job in jobs if job.path is not None}:
        atomic_files.sweep(folder)
    try:
        jobs = passing_jobs(jobs, upscalers.check, report, failed, keep_going=keep_going)
        pipe = opens(replace(opening, compile="auto"), report.notify)
        if wanted.preview:
            pipe.plan_preview()
        if pipe.engine.group is not None:
            jobs = passing_jobs(jobs, lambda job: _check_enlarged(job.options), report, failed, keep_going=keep_going)
        output = replace(output, larger=lambda job: upscalers.enlargement(job, pipe.runtime))
        jobs = [completed(pipe, job, inputs, output.views) for job in jobs]
        check_files(jobs, output)
        if output.save_latents is not None and len({(job.get("width"), job.get("height")) for job in jobs}) > 1:
            raise UsageError("--save-latents: one file takes pictures of one size; this run makes several sizes")
        expected: list[Estimate] = []
        jobs = passing_jobs(
            jobs,
            lambda job: expected.append(estimated(pipe, job, inputs, output)),
            report,
            failed,
            keep_going=keep_going,
        )
        compiled = pipe.compile(opening.compile, sum(one.seconds for one in expected))
        step = max(one.step for one in expected)
        report.headline(pipe.headline(), expected)
        report.decided(opening.compile, compiled)
        report.plan(pipe, jobs)
        if wanted.preview:
            report.previews(pipe)
        prepare(pipe, jobs, inputs)
        pipe.runtime.interrupt = stop.check
        with stop.waits(step):
            listener = RunReport(report, stop, failed, alone=pipe.engine.group is None)
            outcome = run(pipe, jobs, inputs, output, listener)
            if outcome.written and advice is not None and not advice.named:
                report.real_model(advice.real)
            return listener.code(outcome)
    finally:
        upscalers.close()
        report.give_up()


def _real_model(backend: str) -> str:
    """Return the commands that download a model that is not the built-in one."""
    from qwenimg.backends.paper import for_hints
    from qwenimg.common.hub import forecast

    return forecast.hint(for_hints(backend))


class RunReport:
    """Prints the reports of a run, and ends it after a signal. codes: exit codes of failed images. alone: there are no
    other ranks."""

    def __init__(self, report: RunPrinter, stop: Stop, codes: list[int], *, alone: bool = True) -> None:
        self.report, self.stop, self.codes, self.alone = report, stop, codes, alone
        self.notify, self.image = report.notify, report.image

    def begin(self, job: Job) -> None:
        self.stop.picture()
        self.report.begin(job)

    def step(self, job: Job, step: Step) -> None:
        self.report.step(job, step)
        self.stop.step(step.index, step.total, step.seconds)

    def failure(self, job: Job, error: Exception) -> None:
        self.stop.check()
        if not self.alone:
            self.stop.claim()  # a signal that ends all ranks is reported once
        self.codes.append(self.report.failure(job, error))

    def code(self, outcome: Outcome) -> int:
        """Return the exit code of the run. `done` is printed as the last event, also after an error."""
        self.stop.check()
        codes = self.codes
        fatal = codes[-1] if outcome.fatal else 0
        code = fatal or (0 if not codes else failures.PARTIAL if outcome.written else codes[0])
        self.report.done(outcome.written, len(codes), code)
        return code


# Checks before the model is opened


def _jobs(wanted: Run, report: RunPrinter) -> tuple[list[Job], list[int]]:
    """Return a job for each image. Lines of the prompt file with errors are reported; their exit codes are returned."""
    chance = random_seed()
    lines = [("", Options())] if wanted.prompt_file is None else read_prompts(wanted.prompt_file)
    wildcards = Wildcards(wanted.opening.wildcards)
    jobs, faults = jobs_of(wanted.options, lines, wildcards, lambda _: chance, files=wanted.files)
    jobs = with_paths(jobs, wanted.pattern, overwrite=wanted.output.overwrite)
    failed = report_faults(faults, report, left=len(jobs), keep_going=wanted.keep_going)
    folders = wanted.folders
    return jobs if folders is None else [_with_lora_paths(job, folders) for job in jobs], failed


def _with_lora_paths(job: Job, folders: ModelFolders) -> Job:
    """Replace the names of LoRAs that are found in the model folders by paths."""
    loras = job.get("lora")
    return replace(job, options=job.options | {"lora": folders.loras(loras)}) if loras else job


def prompt_of(given: Mapping[str, Any]) -> str | None:
    """Return the prompt of the command line, or None. Raises UsageError for two prompts."""
    words, prompt, loras = given["words"], given["prompt"], given["lora"]
    if len(words) > 1:
        shown = clean(" ".join(words), 80)
        if len(words) == 2 and words[0].lower() in foreign_words.VERBS:
            raise UsageError(f'{words[0]} is no command; a prompt draws by itself: qwenimg "{clean(words[1], 80)}"')
        if given["seed"] is not None and all(word.isdecimal() for word in words[1:]):
            listed = ",".join([str(given["seed"]), *words[1:]])
            raise UsageError(f"several seeds are one value, without spaces: -s {clean(listed, 60)}, or a range: -s 1-4")
        if loras and _is_number(words[-1]):
            lora = clean(loras[-1], 60)
            raise UsageError(f"--lora takes its strength behind a colon: --lora {lora}:{words[-1]}")
        raise UsageError(f'{len(words)} words where one prompt is expected; quote the prompt: "{shown}"')
    if words and prompt is not None:
        raise UsageError(f"two prompts: {clean(words[0], 60)!r} and that of -p; give one")
    if words and (option := option_in(words[0], foreign_words.OPTIONS)):
        ours = foreign_words.OPTIONS.get(option)
        what = f", and no option here: {ours}" if ours else "; close them before it"
        raise UsageError(f"{option} is inside the quotes of the prompt{what}. To draw it as words: -p")
    prompt = words[0] if words else prompt
    if prompt is not None and given["prompt_file"] is not None:
        raise UsageError("a prompt and --prompt-file; give one of them")
    return None if prompt is None else str(prompt)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_files(wanted: Run, jobs: Sequence[Job]) -> None:
    """Make every check of files that needs no model."""
    output = wanted.output
    if output.check_cache:
        check_cache(jobs)
    if wanted.pattern == "-":
        if output.keep_control:
            raise UsageError("--keep-control writes beside the picture's file; give one with -o")
        if len(jobs) > 1:
            raise UsageError(f"-o -: standard output takes one picture, this run makes {len(jobs)}")
        if sys.stdout is not None and sys.stdout.isatty():
            raise UsageError("-o -: a terminal cannot take a PNG; send the output to a file or a program")
    if output.save_latents is not None:
        atomic_files.check_output(output.save_latents, overwrite=output.overwrite)
    for path in (path for job in jobs for path in (control_outputs(job) if output.keep_control else ())):
        if path is not None:
            atomic_files.check_output(path, overwrite=output.overwrite, new_folder=output.new_folder)


def _inputs(wanted: Run, jobs: Sequence[Job], report: RunPrinter) -> tuple[Inputs, Output]:
    """Read the pictures and noise that jobs start from. Return the arrays, and the output with a note for each
    conversion."""
    noise = None if wanted.latents is None else read_noise(wanted.latents, jobs)
    check_pictures(wanted.files, wanted.options, controlled=any(job.get("control") for job in jobs))
    inputs, lines = read_pictures(wanted.files)
    for line in lines:
        report.notify("warning", line)
    output, rows = wanted.output, 1 if noise is None else max(1, len(noise) // len(jobs))
    noted = replace(output, notes=lambda job, recipe: [*output.notes(job, recipe), *lines])
    return replace(inputs, noise=noise, noise_rows=rows), noted


# Lines of a prompt file that cannot be generated: each is reported, and ends the run or is skipped


def report_faults(faults: Sequence[ModelError], report: RunPrinter, *, left: int, keep_going: bool) -> list[int]:
    """Report `faults` and return their exit codes. Raises the last one if the run ends: without `keep_going`, or with
    no image `left`."""
    if not faults or (keep_going and left):
        return [report.fault(error) for error in faults]
    *others, last = faults[:MOST]
    for error in others:
        report.fault(error)
    if len(faults) > MOST:
        report.fault(last)
        last = ModelError(f"{len(faults) - MOST} more lines of the prompt file are at fault, after those above")
    raise last


def passing_jobs(
    jobs: list[Job],
    check: Callable[[Job], object],
    report: RunPrinter,
    failed: list[int],
    *,
    keep_going: bool,
) -> list[Job]:
    """Return the jobs that pass `check`. An error of a line of a prompt file is reported, and its exit code added to
    `failed`."""
    passed, faults = passing(jobs, check)
    failed += report_faults(faults, report, left=len(passed), keep_going=keep_going)
    return passed
